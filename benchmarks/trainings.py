"""Train one member under different settings, each in a run folder of its own, and read the held-out losses."""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from common import console, load, progress

from ddm_lightning.core.errors import UserError
from ddm_lightning.members.run_folder import RunFolder, refuse_changed
from ddm_lightning.members.status import MemberStatus, loss_of

LOSS = "held_out/loss"


class Trainings:
    """Trainings started with the command line, as a user would.

    Args:
        options: the benchmark's ``config``, ``overrides`` and ``jobs``.
        run: the experiment's prepared run folder, from which all trainings read their shards.
        member: name of the member to train.
    """

    def __init__(self, options: Namespace, run: RunFolder, member: str) -> None:
        self.options, self.run, self.member = options, run, member

    def losses(self, settings: Mapping[Path, Sequence[str]]) -> dict[Path, float]:
        """Run the trainings that are not finished; return the held-out loss of each.

        Args:
            settings: overrides of each training, by its run folder.

        Raises:
            UserError: a folder holds another experiment, a training failed, or there are no held-out samples.
        """
        for folder, keys in settings.items():
            refuse_changed(load(self.options, f"run_dir={folder}", *keys))
        with progress(console()) as bars, ThreadPoolExecutor(self.options.jobs) as pool:
            task = bars.add_task("trainings", total=len(settings))
            found = {}
            waiting = {pool.submit(self._loss, folder, keys): folder for folder, keys in settings.items()}
            try:
                for done in as_completed(waiting):
                    found[waiting[done]] = done.result()
                    bars.advance(task)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # running trainings received the same signal and end, too
                raise
        return {folder: found[folder] for folder in settings}

    def in_folder(self, folder: Path) -> list[str]:
        """Overrides that train the member in ``folder`` on the shards of the experiment's run."""
        return [f"member={self.member}", f"run_dir={folder}", f"island.shards={self.run.shards.resolve()}"]

    def _loss(self, folder: Path, settings: Sequence[str]) -> float:
        run = RunFolder(folder)
        if not run.is_finished(self.member):
            self._train(run, settings)
        status = MemberStatus.read(run.member(self.member), self.member, 0)
        loss = loss_of(status.metrics, "held_out")
        if loss is None:
            raise UserError(f"{run.root}: {self.member} has no held-out samples; see prepare.held_out_fraction")
        return loss

    def _train(self, run: RunFolder, settings: Sequence[str]) -> None:
        if not (run.prepared / "manifest.json").exists():
            # The shards are not copied.
            shutil.rmtree(run.root, ignore_errors=True)
            run.prepared.mkdir(parents=True)
            shutil.copy(self.run.prepared / "manifest.json", run.prepared)
        arguments = ["-c", str(self.options.config), *self.options.overrides, *self.in_folder(run.root), *settings]
        done = subprocess.run(
            [sys.executable, "-m", "ddm_lightning", "fit", *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(f"{run.root}: training ended with code {done.returncode}: {done.stderr[-2000:]}")
