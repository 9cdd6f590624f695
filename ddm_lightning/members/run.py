"""A run: one experiment, its folder and what the folder holds; opened once and passed on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.config.load import to_yaml
from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_text
from ddm_lightning.members.meta import read_meta
from ddm_lightning.members.roles import all_members, ensemble_members, section_of
from ddm_lightning.members.run_folder import RunFolder, recorded, refuse_changed
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.shards.manifest import DataSizes, Manifest

if TYPE_CHECKING:
    from ddm_lightning.members.member import Member


class Run:
    """An experiment and its run folder, unchecked; ``open`` checks.

    Args:
        experiment: its settings must not change while the run is in use.
        folder: None for the experiment's.
    """

    def __init__(self, experiment: Experiment, folder: RunFolder | None = None) -> None:
        self.experiment = experiment
        """The resolved experiment."""
        self.folder = folder or RunFolder.of(experiment)
        """Where everything is."""
        self._members: dict[str, Member] = {}

    @classmethod
    def open(cls, experiment: Experiment, *, create: bool = False) -> Run:
        """Open the experiment's run folder, after ``refuse_changed``.

        Args:
            experiment: the experiment.
            create: whether to create the folder if it is missing, and to record the resolved experiment in it.

        Raises:
            UserError: as ``refuse_changed``, or the folder is missing and ``create`` is false.
        """
        run = cls(experiment)
        folder = run.folder
        if not (folder.experiment.exists() or create):
            problem = "no run here; start it with fit and the same FILE and settings"
            if folder.ensemble.exists():
                problem = "is a saved ensemble, which has no shards or checkpoints; give the run folder with -c"

            raise UserError(f"{folder.root}: {problem}")

        refuse_changed(experiment)
        if create and recorded(folder) != asdict(experiment):
            atomic_write_text(folder.experiment, to_yaml(experiment))

        return run

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Record the experiment in the folder to train a member.

        After a ``UserError`` before any training, remove a new record, so that a corrected experiment can use the
        folder.

        Raises:
            UserError: as ``open``.
        """
        is_new = not self.folder.experiment.exists()
        before = self._checkpoints()
        Run.open(self.experiment, create=True)
        try:
            yield
        except UserError:
            if is_new and self._checkpoints() == before:
                self.folder.experiment.unlink(missing_ok=True)

            raise

    def _checkpoints(self) -> set[Path]:
        return set(self.folder.root.glob("members/*/checkpoints/*"))

    @cached_property
    def manifest(self) -> Manifest:
        """Description of the prepared shards, read on first use.

        Raises:
            UserError: the shards are not prepared, or the file is damaged.
        """
        return Manifest.read(self.folder.root)

    @property
    def url(self) -> str | None:
        """The run's twin at ``remote``, with the same relative paths; None if there is none."""
        return self.experiment.remote and self.experiment.remote.rstrip("/")

    @property
    def shards(self) -> str:
        """Folder or URL of the shards: ``island.shards``, else this machine's, else those at ``remote``."""
        here = self.folder.shards
        own = self.experiment.island.shards
        if own is not None:
            if remote.is_url(own):
                return own

            return str(Path(own).expanduser())

        if self.url is not None and not here.is_dir():
            return f"{self.url}/{here.relative_to(self.folder.root).as_posix()}"

        return str(here)

    @property
    def names(self) -> list[str]:
        """Names of the ensemble's members."""
        return ensemble_members(self.experiment)

    @property
    def started(self) -> list[str]:
        """Names of the ensemble's members, and of others that have started, such as the monolith."""
        return [
            name
            for name in all_members(self.experiment)  # those of the ensemble first
            if name in self.names or self.folder.member(name).exists()
        ]

    def member(self, name: str) -> Member:
        """The member called ``name``, resolved on first use.

        Raises:
            UserError: as ``resolve`` and ``manifest``.
        """
        if name not in self._members:
            self._members[name] = self.resolve(name, self.manifest)

        return self._members[name]

    def resolve(self, name: str, sizes: Manifest | DataSizes) -> Member:
        """The member called ``name``, for data of these sizes.

        Raises:
            UserError: as ``Member.resolve`` and ``Initial``.
        """
        # Need torch, which those who only look at a run do without.
        from ddm_lightning.members.initial import Initial
        from ddm_lightning.members.member import Member

        member = Member.resolve(name, self.experiment, sizes)
        if member.init_from is None:
            return member

        return Initial(member, member.init_from, self.folder, self.url).member

    def max_steps(self, name: str) -> int:
        """Optimizer steps that the experiment asks of the member."""
        return section_of(name, self.experiment).train.max_steps

    def is_finished(self, name: str) -> bool:
        """Whether the member has handed over an artifact of all steps of the experiment, or ended early.

        Raises:
            UserError: the artifact's description is damaged.
        """
        max_steps = self.max_steps(name)
        return self.folder.has_artifact(name) and read_meta(self.folder.artifact(name)).asked_steps >= max_steps

    def status(self, name: str) -> MemberStatus:
        """Newest status of the member; a finished one's figures come from its artifact, which ``ema`` may change.

        Raises:
            UserError: the status or the artifact's description is damaged.
        """
        status = MemberStatus.read(self.folder.member(name), name, self.max_steps(name))
        # A finished member that trains on has taken more steps than its artifact.
        if self.folder.has_artifact(name) and (meta := read_meta(self.folder.artifact(name))).step >= status.step:
            status.state = "done"
            status.step = meta.step
            status.max_steps = meta.asked_steps
            status.metrics |= meta.metrics

        return status
