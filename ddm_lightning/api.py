"""Training from Python: the public class ``Run``, whose methods are what the commands do.

Modules that need Lightning or Streaming are imported where they are used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from ddm_lightning.config.experiment import Experiment, IslandConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.config.merge import island_of
from ddm_lightning.core.checks import check_positive
from ddm_lightning.core.devices import check_devices, configure_torch, own_defaults
from ddm_lightning.core.environment import Ranks, leave_ranks
from ddm_lightning.core.errors import UserError, hide_passwords
from ddm_lightning.core.formatting import Bars
from ddm_lightning.core.processes import STOPPED
from ddm_lightning.ensemble.manifest import assemble
from ddm_lightning.islands.local import Failure, default_jobs, fit_members
from ddm_lightning.islands.shared import (
    check_free,
    is_prepared_elsewhere,
    publish_prepared,
    pull_ensemble,
    pull_manifest,
)
from ddm_lightning.islands.status import Status, Watch, open_to_watch
from ddm_lightning.members.preflight import check_networks, check_plugins, check_strategy, is_collected, refuse_stale
from ddm_lightning.members.roles import STUDENT, one_member, parse_members
from ddm_lightning.members.run import Run as OpenRun
from ddm_lightning.members.run_folder import RunFolder, refuse_changed, refuse_unprepared
from ddm_lightning.members.signatures import PREPARE, check_keys, sign_manifest
from ddm_lightning.use.ensemble import DecentralizedEnsemble
from ddm_lightning.use.settings import load_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddm_lightning.evaluation.evaluate import Results
    from ddm_lightning.shards.datamodule import ClusterDataModule
    from ddm_lightning.training.module import MemberModule


@contextmanager
def set_up_torch(island: IslandConfig) -> Iterator[None]:
    """Set up torch as the command line does; threads and defaults are the caller's again after the block."""
    num_threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    try:
        with own_defaults():
            configure_torch(island.accelerator, island.num_threads)
            yield
    finally:
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)


class FitError(UserError):
    """Some members did not finish; the others are not affected.

    Args:
        failures: exit code and reason of each of them.
        folder: the run folder.
    """

    def __init__(self, failures: Mapping[str, Failure], folder: RunFolder) -> None:
        self.failures = failures
        codes = {failure.code for failure in failures.values()}
        self.code = codes.pop() if codes in ({2}, {STOPPED}) else 1
        """Exit code of the command."""
        reasons = [f"{member}: {failure.reason}" for member, failure in failures.items()]
        super().__init__(f"{'; '.join(reasons)}; logs: {folder.member('NAME')}/log.txt; fit again to train the rest")


class Run:
    """One experiment and its run folder, to prepare, train, evaluate and sample from Python.

    Each method does what the command of its name does, writes the same files and resumes like it. Progress is shown on
    a terminal and in notebooks. Ctrl-C, or a notebook's interrupt, raises ``KeyboardInterrupt`` after a checkpoint;
    call the method again to resume. Torch's threads, defaults and random numbers stay the caller's.

        run = Run("tiny_2x.yaml", {"expert.train.max_steps": 200})
        run.fit()
        images = run.ensemble().sample(["red disc"], num=4)

    Args:
        place: experiment file, or run folder. If it or ``run_dir`` is relative, each method looks in the folder that is
            current when it is called: give absolute paths before ``os.chdir``.
        overrides: settings that override the file: ``key=value`` texts, or a mapping of dotted keys to values.
        experiment: the experiment of ``place``, if it is loaded already.

    Raises:
        UserError: as ``load_experiment``.
    """

    def __init__(
        self,
        place: str | Path,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        *,
        experiment: Experiment | None = None,
    ) -> None:
        if isinstance(overrides, Mapping):
            overrides = [
                f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in overrides.items()
            ]

        self.place = os.path.expanduser(place)  # noqa: PTH111 (pathlib would change URLs)
        self.overrides = [*map(hide_passwords, overrides)]
        self._loaded = experiment
        self.experiment = experiment or load_experiment(self.place, self.overrides)
        """The resolved experiment; its settings must not be changed."""
        self.folder = RunFolder.of(self.experiment)
        """Paths in the run folder; ``folder.root`` is the folder itself."""

    @property
    def grid(self) -> Path:
        """PNG file of the sample images that ``fit`` writes."""
        return self.folder.samples / f"{self.experiment.sample.strategy}.png"

    @property
    def settings(self) -> Experiment:
        """The experiment as the run folder records it, with the sections of ``place`` that may change.

        Raises:
            UserError: as ``load_settings``.
        """
        return self._loaded or load_settings(self.place, self.overrides, allow_paths=True)

    def check(self, members: Sequence[str] = ()) -> None:
        """Check plug-ins, keys for signatures, and that the run folder is not another experiment's; write nothing.

        Args:
            members: names of those whose keys are needed.

        Raises:
            UserError: a check fails.
        """
        check_plugins(self.experiment, self.place, self.overrides)
        refuse_changed(self.experiment)
        run = OpenRun(self.experiment)
        for name in (PREPARE, *members):
            check_keys(name, run)

    def check_sizes(self, sizes: Any, *, initial: bool = False) -> None:
        """Check networks against the sizes of the data; see ``check_networks``."""
        check_networks(self.experiment, sizes, self.place, self.overrides, initial=initial)

    def prepare(self, *, prune: bool = False, parts: str | None = None) -> Path | None:
        """Cluster the data set and write one folder of shards per cluster, unless that is done; publish at ``remote``.

        Args:
            prune: whether to remove encoded parts that the source no longer lists.
            parts: this machine's share, such as ``2/5``; None for all.

        Returns:
            The folder of what is prepared; None if another machine completes it.

        Raises:
            UserError: plug-ins, networks or keys that do not fit, data that cannot be read, or a folder or URL with
                other data.
        """
        from ddm_lightning.prepare.engine import Reporter
        from ddm_lightning.prepare.share import Share
        from ddm_lightning.prepare.stages import prepare
        from ddm_lightning.training.prompts import encoded_prompts

        experiment = self.experiment
        self.check()
        share = None if parts is None else Share.parse(parts)
        check = partial(self.check_sizes, initial=True)
        check_free(OpenRun(experiment), parts=share is not None)
        with (
            set_up_torch(experiment.island),
            Bars(Console(), transient=True) as bars,
        ):
            reporter = Reporter(bars)
            manifest = prepare(experiment, self.folder.root, reporter, check, prune, share)
            if manifest is not None:
                check(manifest)  # also if it is up to date
                # Only now: after an error in prepare, the corrected experiment may use the same folder.
                run = OpenRun.open(experiment, create=True)
                sign_manifest(run)
                encoded_prompts(run)
                publish_prepared(run, partial(reporter.advance, "publish"))

        if share is not None:  # a folder without shards is left, and would be taken for the run's shards
            shutil.rmtree(self.folder.shards, ignore_errors=True)
        if manifest is None:
            return None

        return self.folder.prepared

    def fit(self, *members: str, jobs: int | None = None) -> Status:
        """Train members, each in a process of its own, and assemble the ensemble once all are finished.

        What is finished is skipped. One member alone needs prepared shards; for several, or all, ``prepare`` comes
        first. The assembled ensemble's sample images go to ``grid``.

        Args:
            members: names such as ``expert-0``; none for all of the ensemble.
            jobs: members to train at once; None for as many as fit this machine.

        Returns:
            Status of all members.

        Raises:
            FitError: a ``UserError`` that names the members that did not finish, their errors and their logs.
            UserError: unknown members, or as ``prepare`` or ``to_train``.
            KeyboardInterrupt: Ctrl-C or a signal; each member has written a checkpoint.
        """
        check_positive("jobs", jobs)
        wanted = ",".join(members) or "all"
        names = parse_members(wanted, self.experiment)
        check_strategy(self.experiment.sample, self.place, self.overrides)
        started = Ranks.read().world_size
        if started > 1:
            raise UserError(f"{started} processes of fit were started, as by torchrun; start it once, or name a member")

        if len(names) == 1 and wanted != "all":  # "all" is assembled, too, even if it is one expert
            self.to_train(names[0])
        else:
            self._get_ready(names)

        leave_ranks()
        run = OpenRun.open(self.experiment, create=True)
        refuse_stale([run.member(name) for name in names], run)
        failures = fit_members(names, run, jobs or default_jobs(names, self.experiment), Console())
        if failures:
            raise FitError(failures, run.folder)
        if all(map(run.is_finished, run.names)):
            self.assemble()

        return self.status()

    def _get_ready(self, members: Sequence[str]) -> None:
        """Prepare what several members need, or fetch it."""
        for member in members:
            island = island_of(member, self.experiment)
            check_devices(island.accelerator, island.devices)
            if island.nodes > 1:
                raise UserError(
                    f"key 'island.nodes' = {island.nodes}: start fit on each node with member={member} alone"
                )

        run = OpenRun(self.experiment)
        if is_prepared_elsewhere(run):
            pull_ensemble(run)
        elif not is_collected(members, run):
            self.check(members)
            self.prepare()

    def to_train(self, member: str) -> OpenRun:
        """Open the run to train one member on this machine, which is its island.

        Raises:
            UserError: the shards are not prepared, or for another experiment; the devices are not here; or plug-ins,
                networks or keys do not fit.
        """
        island = island_of(member, self.experiment)
        check_devices(island.accelerator, island.devices)
        self.check([member])
        run = OpenRun(replace(self.experiment, island=island))
        if member == STUDENT and run.url:  # it needs its teacher
            pull_ensemble(run)
        else:
            pull_manifest(run)

        manifest = run.manifest  # raises unless the shards are prepared; an island does not prepare them
        refuse_unprepared(self.experiment)
        if not run.folder.experiment.exists():
            self.check_sizes(manifest)

        return run

    def assemble(self) -> None:
        """Assemble the finished members, and write sample images if they are missing or of other members.

        Raises:
            UserError: as ``ensemble.manifest.assemble``, or an artifact is damaged.
        """
        experiment = self.experiment
        is_new = assemble(OpenRun(experiment))
        if self.grid.exists() and not is_new:
            print("all members are finished and their samples are there: nothing to do")
            return

        from ddm_lightning.use.samples import write_samples

        with set_up_torch(experiment.island):
            ensemble = DecentralizedEnsemble.open(experiment, partial=True)
            write_samples(ensemble, self.grid, experiment.sample.prompts)

    def lightning(self, member: str) -> tuple[MemberModule, ClusterDataModule]:
        """Build what a Lightning Trainer of your own needs to train a member: ``Trainer(…).fit(module, data)``.

        The module starts from the weights that ``fit`` starts from; the data are its batches, in its order.

        Args:
            member: its name; the shards must be prepared.

        Returns:
            LightningModule and LightningDataModule. A batch is a dict with ``x_0`` ``[b c h w]`` and the columns of
            the condition.

        Raises:
            UserError: as ``one_member`` or ``to_train``.
        """
        from ddm_lightning.training.fit import build_data
        from ddm_lightning.training.module import MemberModule
        from ddm_lightning.training.objective import build_objective

        name = one_member(member, self.experiment, "lightning")
        run = self.to_train(name)
        own = run.member(name)
        with own_defaults():
            module = MemberModule(build_objective(own, run), run.experiment.island)
            if own.initial is not None and own.lora is None:  # under adapters they are the base, which is loaded
                own.initial.load(module.network)

        return module, build_data(own, run)

    def status(self) -> Status:
        """Look at the members, on all islands if the experiment has a ``remote``.

        Returns:
            One ``Seen`` per member: state, step, losses, samples per second, seconds left. A notebook shows the table.

        Raises:
            UserError: there is no run yet, the URL cannot be read, or a status is damaged.
        """
        run = open_to_watch(self.settings)
        return Status(run, Watch(run).look())

    def curves(self) -> Figure:
        """Draw the losses of all members that have started: held-out ones with dots, those of training fainter.

        Returns:
            A matplotlib figure, one panel per kind of loss; the x-axis counts optimizer steps. A notebook shows it.

        Raises:
            UserError: as ``status``.
        """
        from ddm_lightning.islands.page import losses_figure

        return losses_figure(open_to_watch(self.settings))

    def ensemble(self) -> DecentralizedEnsemble:
        """Load the trained ensemble, or ``sample.member`` alone, with the experiment's settings of sampling.

        An expert whose artifact is missing is left out, with a note on stderr.

        Raises:
            UserError: no ensemble is assembled, an artifact is damaged, or the device is not here.
        """
        ensemble = DecentralizedEnsemble.open(self._fetched().experiment, partial=True)
        return ensemble.to(ensemble.device)

    def _fetched(self, *, whole: bool = False) -> OpenRun:
        """Open the run for sampling; if it has a URL, fetch its ``sample.member``, or else the whole ensemble."""
        run = OpenRun(self.settings)
        sample = run.experiment.sample
        if not whole:  # a diagnosis has strategies of its own
            check_strategy(sample, self.place, self.overrides)

        check_devices(run.experiment.island.accelerator, 1)
        if Ranks.read().rank == 0:  # the others wait for it
            pull_ensemble(run, None if whole else sample.member)

        return run

    def evaluate(self, images: str | Path | None = None, out: str | Path | None = None) -> Results | None:
        """Score the ensemble's samples against held-out images, as the section ``evaluate`` says; resumable.

        Args:
            images: folder or ``.npz`` file to score instead of new samples.
            out: results folder; None for one in the run folder.

        Returns:
            Content of ``evaluation.json``, such as ``["scores"]["kid"]["value"]``; its file is in ``path``. None on
            all but the first rank of torchrun.

        Raises:
            UserError: as ``ensemble``, or ``Evaluation``.
        """
        from ddm_lightning.evaluation.evaluate import evaluate

        run = self._fetched()
        with set_up_torch(run.experiment.island):
            return evaluate(run, images, out)

    def diagnose(self, strategies: Sequence[str] | None = None, num: int = 256) -> dict[str, Any]:
        """Measure experts by cluster, the router by noise level and the clusters' shares in samples.

        Args:
            strategies: those whose samples are classified; None for the usual ones and the experiment's.
            num: images per strategy.

        Returns:
            The figures of ``diagnosis/diagnosis.json``.

        Raises:
            UserError: as ``ensemble``, no held-out samples, or an unknown strategy.
        """
        from ddm_lightning.evaluation.diagnosis import diagnose

        check_positive("num", num)
        run = OpenRun.open(self._fetched(whole=True).experiment)
        with set_up_torch(run.experiment.island):
            return diagnose(run, strategies, num, self.overrides)
