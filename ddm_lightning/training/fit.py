"""Train one member in this process, from prepared shards to an artifact."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console

from ddm_lightning.config.experiment import Experiment, IslandConfig
from ddm_lightning.core.devices import autocast, configure_torch, device_of, resolve_accelerator
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.core.processes import FITTED_BY, keep_heap
from ddm_lightning.core.registry import CALLBACKS, require
from ddm_lightning.members.artifact import hand_over
from ddm_lightning.members.cost import checkpoint_bytes, step_cost
from ddm_lightning.members.member import Member
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import lock_member
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.networks.attention import chosen_kernel
from ddm_lightning.shards.datamodule import ClusterDataModule
from ddm_lightning.training import callbacks, ema, ranks, rolling
from ddm_lightning.training.loggers import build_loggers
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.objective import Distillation, build_objective
from ddm_lightning.training.parallel import BackgroundCheckpoints, choose_strategy
from ddm_lightning.training.previews import SampleLogger, ScoreLogger

WORKERS_OUTLIVE_SECONDS = 15.0


def fit_member(name: str, run: Run, *, show_progress: bool) -> MemberStatus:
    """Train member ``name`` to its last step, from its newest checkpoint if there is one, and write its artifact.

    Members that a ``fit`` of several started wait if another process trains them, and may then find nothing left to do.

    Returns:
        Its status: ``done``, or ``stopped`` if SIGTERM, Ctrl-C or a plug-in callback ended the training early.

    Raises:
        UserError: not prepared, damaged shards, unknown network or callback, the member is being trained elsewhere, or
            torchrun started another number of ranks.
        RuntimeError: another rank failed.
    """
    island = run.experiment.island
    ranks.check_launch(island.devices)
    if "wandb" in island.loggers:
        require("key 'island.loggers': 'wandb'", "wandb", extra="wandb")
    keep_heap()
    # Keep paths whole, also in a log file, which passes for 80 columns.
    console = Console(stderr=True, quiet=not ranks.leads(), soft_wrap=True, markup=False, highlight=False)
    folder, max_steps = run.folder.member(name), run.max_steps(name)
    status = MemberStatus.read(folder, name, max_steps)
    if not run.is_finished(name):
        folder.mkdir(parents=True, exist_ok=True)
        # The loading processes of a killed one live on for some seconds and hold its lock.
        seconds, waits = WORKERS_OUTLIVE_SECONDS if island.num_workers else 0.0, FITTED_BY in os.environ
        user = f"another process ({status.pid})" if status.runs() else "another process"
        lock = lock_member(folder, user, -1 if waits else seconds) if ranks.leads() else contextlib.nullcontext()
        with lock, ranks.handing_over():
            if not (waits and run.is_finished(name)):
                return _fit_locked(name, run, console, show_progress)
    console.print(f"{name} is finished: {run.folder.artifact(name)}")
    # Even if it was stopped here and another island finished it; a finished training may be extended.
    status.state, status.max_steps = "done", max_steps
    return status


def _fit_locked(name: str, run: Run, console: Console, show_progress: bool) -> MemberStatus:
    experiment, folder, max_steps = run.experiment, run.folder.member(name), run.max_steps(name)
    island = experiment.island
    status = MemberStatus.read(folder, name, max_steps)
    status.max_steps = max_steps  # a finished training may be extended
    configure_torch(island.accelerator, island.num_threads)
    member = run.member(name)
    objective = build_objective(member, run)
    if isinstance(objective, Distillation):
        objective.teach(run)
    module = MemberModule(objective, island)
    data = build_data(member, run)

    num_parameters, num_widths = sum(p.numel() for p in module.network.parameters()), len(member.train.ema_widths)
    strategy, reason = choose_strategy(island, num_parameters, num_widths, member.train.optimizer)
    module.speed.cost = step_cost(member, island, module.network)
    size = checkpoint_bytes(num_parameters, num_widths)
    for line in (
        f"{num_parameters / 1e6:.2f} M parameters, {reason}",
        f"a checkpoint takes {format_bytes(size)} of the disk and of the host's memory",
        module.speed.cost.line,
        *_attention_line(module, island),
    ):
        console.print(f"{name}: {line}")

    resume, lines = rolling.newest_checkpoint(folder / "checkpoints", leads=ranks.leads())
    for line in lines:
        console.print(line)
    resumed_step = rolling.step_of(resume) if resume else 0
    if resume:
        changed = rolling.check_origin(resume, name, experiment)
        console.print(f"{name}: resumes at step {resumed_step}")
        if changed:
            console.print(f"{name}: {changed}")
    status.validated_step = min(status.validated_step, resumed_step)  # later validations are repeated

    trainer, stop = build_trainer(
        member, experiment, folder, status, strategy, resumed_step, show_progress=show_progress
    )
    with contextlib.closing(data), ranks.speaking_for_all(trainer):
        try:
            with stop.listening():
                status.state = "starting"
                if ranks.leads():
                    status.write(folder)
                trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
            is_done = trainer.global_step >= member.train.max_steps
        except callbacks.StopRequested:
            is_done = False
        leader = trainer.is_global_zero
        weights = ema.unsharded_ema(module.network, trainer.optimizers[0], keeps=leader) if is_done else {}
        if leader and is_done:
            weights |= ema.kept_buffers(module.network)

    if is_done:
        status.step = trainer.global_step
        if leader:
            shutil.rmtree(folder / ema.FOLDER / "artifact", ignore_errors=True)  # ``ema`` kept it, after fewer steps
            hand_over(run.folder.artifact(name), member, run.manifest, weights, objective.prediction, status)
    else:
        step = max(trainer.global_step, resumed_step)
        console.print(f"{name}: stopped at step {step}; the same command resumes it")
    status.state = "done" if is_done else "stopped"
    if leader:
        status.write(folder)
    return status


def _attention_line(module: MemberModule, island: IslandConfig) -> Iterator[str]:
    device = device_of(island.accelerator)
    if device.type == "cuda" and island.attention in ("auto", "sdpa"):
        with autocast(island.precision, device):
            yield f"attention by torch's kernel {chosen_kernel(module.network, device)}"


def build_data(member: Member, run: Run) -> ClusterDataModule:
    """Build the LightningDataModule of a member of ``run``."""
    island, manifest, clusters = run.experiment.island, run.manifest, member.clusters
    return ClusterDataModule(
        shards=island.shards or run.folder.shards,
        clusters=clusters,
        batch_size=member.batch_size,
        seed=member.seed,
        cache=run.folder.member(member.name) / "cache",
        num_workers=island.num_workers,
        columns=manifest.columns,
        index_sha256=manifest.index_sha256,
        held_out_clusters=[k for k in clusters if manifest.clusters[k].held_out > 0],
        # A member that trains on all clusters has these samples already.
        out_of_cluster=[k for k in clusters if member.role.out_of_cluster and manifest.clusters[k].out_of_cluster > 0],
        pin_memory=resolve_accelerator(island.accelerator) == "gpu",
    )


def build_trainer(
    member: Member,
    experiment: Experiment,
    folder: Path,
    status: MemberStatus,
    strategy: BackgroundCheckpoints,
    resumed_step: int = 0,
    *,
    show_progress: bool = False,
) -> tuple[L.Trainer, callbacks.StopOnRequest]:
    """Build the Trainer of one member, and the callback that stops it on request.

    Args:
        member: the member.
        experiment: gives the island and the settings of sample images; recorded in checkpoints.
        folder: receives checkpoints, curves and ``status.json``.
        status: kept up to date.
        strategy: from ``choose_strategy``.
        resumed_step: step of the checkpoint to resume from; 0 for none.
        show_progress: whether to show a progress bar.

    Raises:
        UserError: an unknown plug-in callback, or flags in ``island.trainer`` that Lightning refuses.
    """
    island = experiment.island
    checkpoints = rolling.RollingCheckpoints(folder / "checkpoints", island, rolling.origin_of(member.name, experiment))
    stop = callbacks.StopOnRequest(checkpoints)
    samples, every = SampleLogger(member, experiment.sample, stop), island.evaluate_every_n_steps
    all_callbacks: list[L.Callback] = [
        callbacks.Reporter(folder, status, show_progress),
        callbacks.MissedValidation(folder, status, island.validate_every_n_steps, resumed_step),
        checkpoints,
        stop,
        samples,
        *([ScoreLogger(samples, experiment.evaluate, every)] if every and not member.role.classifies else []),
        *([ema.EmaSnapshots(folder, member.train)] if member.train.ema_widths else []),
        *(CALLBACKS.build(plugin.name, plugin.params) for plugin in island.callbacks),
    ]
    _quieten(keep_notes="profiler" in island.trainer)
    flags = {"enable_model_summary": False, **island.trainer}
    try:
        trainer = L.Trainer(
            accelerator=resolve_accelerator(island.accelerator),
            devices=island.devices,
            strategy=strategy,
            precision=island.precision,  # type: ignore[arg-type]  # Lightning lists the strings in a Literal
            max_steps=member.train.max_steps,
            max_epochs=-1,
            val_check_interval=island.validate_every_n_steps,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            logger=build_loggers(island.loggers, folder, experiment.name, resumed_step),
            callbacks=all_callbacks,
            plugins=[ranks.OwnProcesses()],
            log_every_n_steps=island.log_every_n_steps,
            enable_checkpointing=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
            default_root_dir=folder,
            **flags,
        )
    except (MisconfigurationException, TypeError, ValueError) as error:
        if not (island.trainer or island.callbacks):
            raise
        raise UserError(f"keys 'island.trainer' and 'island.callbacks': {first_line(error)}; change them") from error
    return trainer, stop


def _quieten(*, keep_notes: bool) -> None:
    """Hide the warnings and notes that Lightning gives in every run of this kind; a profiler's table is a note."""
    for message in (
        r".*does not have many workers.*",
        r".*isinstance\(treespec, LeafSpec\).*",
        r".*is smaller than the logging interval.*",
        r"Checkpoint directory .* exists and is not empty.*",
        r"Experiment logs directory .* exists and is not empty.*",
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.distributed"):
        logging.getLogger(name).setLevel(logging.INFO if keep_notes else logging.WARNING)
