"""Train one member in this process, from prepared shards to an artifact."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.warnings import disable_possible_user_warnings

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.devices import (
    autocast,
    check_precision,
    configure_torch,
    device_of,
    devices_named,
    resolve_accelerator,
    resolve_precision,
)
from ddm_lightning.core.environment import ALONE, Ranks
from ddm_lightning.core.errors import UserError, first_line, say
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.core.processes import FITTED_BY, on_stop_signal
from ddm_lightning.core.registry import CALLBACKS, require
from ddm_lightning.members.artifact import hand_over
from ddm_lightning.members.checkpoints import step_of
from ddm_lightning.members.cost import State, state_of, step_cost
from ddm_lightning.members.member import Member
from ddm_lightning.members.roles import STUDENT
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import lock_member
from ddm_lightning.members.signatures import sign_artifact
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.networks.attention import chosen_kernel
from ddm_lightning.networks.lora import frozen
from ddm_lightning.shards.datamodule import ClusterDataModule
from ddm_lightning.training import callbacks, checkpoint, ema, ranks
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.objective import build_objective
from ddm_lightning.training.parallel import BackgroundCheckpoints, choose_strategy, environment
from ddm_lightning.training.previews import SampleLogger, build_loggers, fixed_rows


def fit_member(member: Member, run: Run, mine: Ranks) -> MemberStatus:
    """Train a member to its last step, from its newest checkpoint if there is one, and write its artifact.

    If a ``fit`` of several members started this process, it waits while another one trains the member, and may then
    find it finished.

    Args:
        member: the member.
        run: its run.
        mine: this process's place among the ranks.

    Returns:
        Its status: ``done``, or ``stopped`` if SIGTERM, Ctrl-C or a plug-in callback ended the training early.

    Raises:
        UserError: not prepared, damaged shards, unknown network or callback, or the member is being trained elsewhere.
    """
    if "wandb" in run.experiment.island.loggers:
        require("key 'island.loggers': 'wandb'", "wandb", extra="wandb")

    check_machine(member, run.experiment.island)
    name = member.name
    folder = run.folder.member(name)
    waits = FITTED_BY in os.environ  # a ``fit`` of several members started this process
    max_steps = member.train.max_steps
    status = MemberStatus.read(folder, name, max_steps)
    status.max_steps = max_steps  # a finished training may be extended
    is_finished = ranks.broadcast_from_rank_zero(mine, "finished", run.is_finished(name))
    if not is_finished:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as locks:
            if mine.is_first:
                user = f"another process ({status.pid})" if status.runs() else "another process"
                locks.enter_context(lock_member(folder, user, seconds=-1 if waits else 0.0))

            if not (waits and run.is_finished(name)):
                return _train(member, run, status, mine)

    if mine.is_first:
        say(f"{name} is finished: {run.folder.artifact(name)}")

    status.state = "done"  # even if it was stopped here and another island finished it
    return status


def check_machine(member: Member, island: IslandConfig) -> None:
    """Check that this machine has what the member's optimizer and the island's precision need.

    Raises:
        UserError: it has not.
    """
    if member.train.optimizer == "adamw-8bit":
        require(f"key '{member.role.section}.train.optimizer': 'adamw-8bit'", "torchao", extra="lowmem")

    check_precision(island.precision, device_of(island.accelerator))


def _train(member: Member, run: Run, status: MemberStatus, mine: Ranks) -> MemberStatus:
    """Train a member whose lock this process, or rank zero, holds."""
    island = run.experiment.island
    folder = run.folder.member(member.name)
    configure_torch(island.accelerator, island.num_threads)
    module = MemberModule(build_objective(member, run), island)
    data = build_data(member, run, mine.node)
    if member.train.keep == "best" and not data.held_out_clusters:
        raise UserError(
            f"key '{member.role.section}.train.keep' = 'best': {member.name} has no held-out samples to choose by; "
            "set it to last, or prepare anew with held_out_fraction"
        )

    def tell(line: str) -> None:
        if mine.is_first:
            say(f"{member.name}: {line}")

    module.speed.cost = step_cost(member, island, module.network)
    num_parameters = sum(parameter.numel() for parameter in module.network.parameters())
    state = state_of(module.network, member.train, island)
    strategy, reason = choose_strategy(island, state, member.train.optimizer)
    for line in _costs(module, num_parameters, reason, state):
        tell(line)

    too_small = _too_small(member, run)
    if too_small:
        section = "distill" if member.name == STUDENT else f"{member.role.section}.train"
        tell(
            f"{', '.join(too_small)}: a share of {member.train.max_steps} steps that is less than one batch, so it may "
            f"never be trained on; raise {section}.max_steps, or leave it out of prepare.images.buckets"
        )

    origin = checkpoint.origin_of(member, run.experiment)
    newest = None
    if mine.is_first:
        newest = checkpoint.choose(folder / "checkpoints", origin)

    newest_name = ranks.broadcast_from_rank_zero(mine, "checkpoint", newest.name if newest else None)
    resume = None
    first_step = 0
    if newest_name:
        resume = folder / "checkpoints" / newest_name
        first_step = step_of(resume)
    elif member.initial is not None:
        # Under adapters, the initial weights are the frozen base, which ``build_objective`` has loaded.
        if member.lora is None:
            member.initial.load(module.network)

        tell(f"starts from {member.initial.source}, SHA-256 {member.initial.sha256}")
        for line in member.initial.differing:
            tell(line)

    trainer, stop = build_trainer(member, run, status, strategy, origin, first_step, mine)
    with contextlib.closing(data):
        is_done = False
        # ``StopRequested`` leaves ``is_done`` False even at the last step: held-out figures may be missing.
        with contextlib.suppress(callbacks.StopRequested), on_stop_signal(stop.request):
            status.state = "starting"
            status.device = devices_named(island.accelerator, island.num_ranks)
            if mine.is_first:
                status.write(folder)

            trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
            is_done = trainer.global_step >= trainer.max_steps  # which a callback may have lowered

        # A stop may come before the Trainer has restored its step.
        status.step = max(trainer.global_step, first_step)
        if is_done:
            status.state = "done"
            _hand_over(module, trainer, run, status)
        else:
            status.state = "stopped"
            tell(f"stopped at step {status.step}; the same command resumes it")

    if mine.is_first:
        status.write(folder)

    return status


def _too_small(member: Member, run: Run) -> list[str]:
    """Names of buckets whose samples fill no batch within the training."""
    manifest = run.manifest
    total = sum(manifest.clusters[k].train for k in member.clusters)
    names = []
    for bucket, clusters in zip(manifest.buckets, manifest.bucket_samples, strict=True):
        num = sum(clusters[k].train for k in member.clusters)
        if 0 < num * member.train.max_steps < total:
            names.append(bucket.name)

    return names


def _costs(module: MemberModule, num_parameters: int, reason: str, state: State) -> Iterator[str]:
    """Describe the number of parameters, the strategy and its ``reason``, the costs, and the attention kernel."""
    num_frozen = sum(weight.numel() for weight in frozen(module.network).values())
    on_base = f" on a frozen base of {num_frozen / 1e6:.2f} M" if num_frozen else ""
    yield f"{num_parameters / 1e6:.2f} M parameters{on_base}, {reason}"

    yield f"per device, unsharded: {state}"
    yield f"a checkpoint takes {format_bytes(state.checkpoint)} of the disk and of the host's memory"

    yield module.speed.cost.line
    island = module.island
    device = device_of(island.accelerator)
    if device.type == "cuda" and island.attention in ("auto", "sdpa"):
        with autocast(island.precision, device):
            kernel = chosen_kernel(module.network, device)

        if kernel is not None:
            yield f"attention by torch's kernel {kernel}"


def _hand_over(module: MemberModule, trainer: L.Trainer, run: Run, status: MemberStatus) -> None:
    """Write the artifact on rank zero. A collective: every rank calls it."""
    member = module.member
    weights = ema.unsharded_ema(module.network, trainer.optimizers[0], keeps=trainer.is_global_zero)
    if trainer.is_global_zero:
        # The command ``ema`` keeps the artifact that it replaces; that one is older than this training.
        shutil.rmtree(run.folder.member(member.name) / ema.FOLDER / "artifact", ignore_errors=True)
        hand_over(
            run.folder.artifact(member.name),
            member,
            run.manifest,
            weights | ema.kept_buffers(module.network),
            module.objective.prediction,
            status,
            sign=partial(sign_artifact, name=member.name, run=run),
        )


def build_data(member: Member, run: Run, node: int = 0) -> ClusterDataModule:
    """Build the LightningDataModule of a member of ``run`` on one of its nodes."""
    island = run.experiment.island
    manifest = run.manifest
    cache = run.folder.member(member.name) / "cache"
    if node:
        cache /= f"node-{node}"  # nodes may share a disk

    return ClusterDataModule(
        shards=run.shards,
        clusters=member.clusters,
        batch_size=member.batch_size,
        seed=member.seed,
        cache=cache,
        num_workers=island.num_workers,
        max_cache_bytes=island.cache_gb and island.cache_gb * 1e9,
        columns=manifest.columns,
        index_sha256=manifest.index_sha256,
        held_out_clusters=[k for k in member.clusters if manifest.clusters[k].held_out > 0],
        pin_memory=resolve_accelerator(island.accelerator) == "gpu",
        buckets=manifest.buckets,
    )


def build_trainer(
    member: Member,
    run: Run,
    status: MemberStatus,
    strategy: BackgroundCheckpoints,
    origin: Mapping[str, Any],
    first_step: int = 0,
    mine: Ranks = ALONE,
) -> tuple[L.Trainer, callbacks.StopOnRequest]:
    """Build the Trainer of one member, and the callback that stops it on request.

    Args:
        member: the member.
        run: gives the island, the settings of sample images, and the folder for checkpoints, curves and the status.
        status: kept up to date.
        strategy: from ``choose_strategy``.
        origin: what a checkpoint records of its member and experiment, from ``origin_of``.
        first_step: step of the checkpoint to resume from; 0 for none.
        mine: this process's place among the ranks.

    Raises:
        UserError: an unknown plug-in callback, or flags in ``island.trainer`` that Lightning refuses.
    """
    experiment = run.experiment
    folder = run.folder.member(member.name)
    island = experiment.island
    checkpoints = callbacks.RollingCheckpoints(folder / "checkpoints", island, origin)
    stop = callbacks.StopOnRequest(checkpoints, mine)
    all_callbacks: list[L.Callback] = [
        callbacks.Reporter(folder, status, show=mine.is_first),
        callbacks.MissedValidation(folder, status, island.validate_every_n_steps),
        *([callbacks.BestWeights(status)] if member.train.keep == "best" else []),
        *([ema.EmaSnapshots(folder, member.train)] if member.train.ema_widths else []),
        checkpoints,
        stop,
        SampleLogger(experiment.sample, stop, fixed_rows(member, run, mine)),
        *(CALLBACKS.build(plugin.name, plugin.params) for plugin in island.callbacks),
    ]
    quieten(keep_notes="profiler" in island.trainer)
    try:
        trainer = L.Trainer(
            accelerator=resolve_accelerator(island.accelerator),
            devices=island.devices,
            num_nodes=island.nodes,
            strategy=strategy,
            precision=resolve_precision(island.precision, device_of(island.accelerator)),  # type: ignore[arg-type]
            max_steps=member.train.max_steps,
            max_epochs=-1,
            val_check_interval=island.validate_every_n_steps,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            logger=build_loggers(island.loggers, folder, experiment.name, first_step),
            callbacks=all_callbacks,
            plugins=[environment(mine)],
            log_every_n_steps=island.log_every_n_steps,
            enable_checkpointing=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
            default_root_dir=folder,
            **{"enable_model_summary": False, **island.trainer},  # the island's flags may ask for it
        )
    except (MisconfigurationException, TypeError, ValueError) as error:
        if not (island.trainer or island.callbacks):
            raise

        raise UserError(f"keys 'island.trainer' and 'island.callbacks': {first_line(error)}; change them") from error

    return trainer, stop


def quieten(*, keep_notes: bool) -> None:
    """Hide what Lightning says in every training, or of callbacks left out; a profiler's table is such a note."""
    disable_possible_user_warnings()
    own_choice = r".*callbacks used to create the checkpoint need to be provided.*"
    for message in (r".*isinstance\(treespec, LeafSpec\).*", r".*exists and is not empty.*", own_choice):
        warnings.filterwarnings("ignore", message=message)

    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.distributed"):
        logging.getLogger(name).setLevel(logging.INFO if keep_notes else logging.WARNING)
