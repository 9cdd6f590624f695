"""Train one member in this process, from prepared shards to an artifact."""

from __future__ import annotations

import logging
import shutil
import warnings
from pathlib import Path

import lightning as L
from filelock import FileLock, Timeout
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console

from ddm_lightning.config import Experiment, IslandConfig, TrainConfig
from ddm_lightning.core.devices import configure_torch, resolve_accelerator
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.formatting import amount
from ddm_lightning.core.processes import keep_heap
from ddm_lightning.core.registry import CAPTION_ENCODERS
from ddm_lightning.core.weights import check_memory
from ddm_lightning.encoders.interfaces import CaptionEncoder
from ddm_lightning.members.artifact import hand_over, is_finished
from ddm_lightning.members.member import ROUTER, Member, train_config
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.networks.flops import flops_per_sample
from ddm_lightning.shards.datamodule import ClusterDataModule
from ddm_lightning.shards.manifest import Manifest, StoredForm
from ddm_lightning.training.callbacks import (
    DisjointRanks,
    MissedValidation,
    Reporter,
    SampleLog,
    StopOnRequest,
    StopRequested,
)
from ddm_lightning.training.checkpoint.rolling import (
    KeptOrigin,
    RollingCheckpoints,
    check_origin,
    newest_checkpoint,
    step_of,
)
from ddm_lightning.training.ema import (
    FOLDER,
    EmaSnapshots,
    gathered_ema,
    kept_buffers,
    missing_snapshots,
    snapshot_steps,
)
from ddm_lightning.training.expert import ExpertModule
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.parallel.ranks import (
    OwnProcesses,
    after_the_first,
    check_launch,
    handing_over,
    leads,
    speaking_for_all,
)
from ddm_lightning.training.parallel.strategy import BackgroundCheckpoints, checkpoint_bytes, choose_strategy
from ddm_lightning.training.previews import PictureLogger
from ddm_lightning.training.router import RouterModule
from ddm_lightning.training.speed import UNKNOWN_COST, Speed, StepCost

WORKERS_OUTLIVE_SECONDS = 15.0
FLOAT32_BYTES = 4


def build_module(member: Member, island: IslandConfig, manifest: Manifest) -> MemberModule:
    """The member's LightningModule, untrained.

    Raises:
        UserError: unknown network or parameters, flips that the shards have no encodings of, or a network that does
            not fit in memory.
    """
    if member.train.horizontal_flip and manifest.stores == "posterior" and "x_0_flipped" not in manifest.columns:
        raise UserError(
            f"key '{member.section}.train.horizontal_flip': a mirrored latent is not the latent of the mirrored image, "
            "and the shards do not hold that one; prepare with prepare.horizontal_flips=true, or set it to false"
        )
    planned = member.plan_network()
    check_memory([*planned.parameters(), *planned.buffers()], member.name)
    kind = RouterModule if member.role == ROUTER else ExpertModule
    return kind(
        member.build_network(),
        member,
        StoredForm(manifest.stores, manifest.normalisation),
        island=island,
        caption_encoder=_online_encoder(member, manifest),
        num_held_out=sum(manifest.clusters[k].held_out for k in member.clusters),
    )


def _online_encoder(member: Member, manifest: Manifest) -> CaptionEncoder | None:
    """Caption encoder run during training; None if the shards hold what it would give."""
    column = {"text": "text", "tokens": "text_tokens"}.get(member.condition.kind)
    if column is None or member.caption_encoder is None or column in manifest.columns:
        return None
    encoder: CaptionEncoder = CAPTION_ENCODERS.build(member.caption_encoder.name, member.caption_encoder.params)
    return encoder


def build_data(member: Member, island: IslandConfig, manifest: Manifest, run: RunFolder) -> ClusterDataModule:
    """The member's LightningDataModule."""
    clusters = list(member.clusters)
    return ClusterDataModule(
        shards=island.shards or run.shards,
        clusters=clusters,
        batch_size=member.batch_size,
        seed=member.seed,
        cache=run.member(member.name) / "cache",
        num_workers=island.num_workers,
        columns=manifest.columns,
        index_sha256=manifest.index_sha256,
        loader=island.loader,
        held_out_clusters=[k for k in clusters if manifest.clusters[k].held_out > 0],
        # A member that trains on all clusters sees each sample once.
        out_of_cluster=[k for k in clusters if member.role == "expert" and manifest.clusters[k].out_of_cluster > 0],
        pin_memory=resolve_accelerator(island.accelerator) == "gpu",
    )


def fit_member(name: str, experiment: Experiment, run: RunFolder, *, show_progress: bool) -> MemberStatus:
    """Train member ``name`` to its last step, from its newest checkpoint if there is one, and write its artifact.

    Returns:
        Its status: ``done``, or ``stopped`` when SIGTERM or Ctrl-C asked for it.

    Raises:
        UserError: not prepared, damaged shards, unknown network, the member is being trained elsewhere, or torchrun
            started another number of ranks.
        RuntimeError: another rank failed.
    """
    check_launch(experiment.island.devices)
    keep_heap()
    # Paths stay whole and as they are, also in a log file, which passes for 80 columns.
    console = Console(stderr=True, quiet=not leads(), soft_wrap=True, markup=False, highlight=False)
    folder, max_steps = run.member(name), train_config(name, experiment).max_steps
    status = MemberStatus.read(folder, name, max_steps)
    status.max_steps = max_steps  # a finished training may go on
    if is_finished(name, max_steps, run):
        console.print(f"{name} is finished: {run.artifact(name)}")
        status.state = "done"  # also where another island trained it, and one before was stopped here
        return status
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    if leads():
        try:
            # Loading processes of a killed one live on for some seconds, and hold its lock.
            lock.acquire(timeout=WORKERS_OUTLIVE_SECONDS if experiment.island.num_workers else 0)
        except Timeout:
            other = f"another process ({status.pid})" if status.runs() else "another process"
            raise UserError(f"{folder}: {name} is being trained by {other}; wait for it or stop it") from None
    try:
        with handing_over():
            return _fit_locked(name, experiment, run, status, console, show_progress)
    finally:
        lock.release()


def _quieten() -> None:
    """Hide what Lightning says about every run of this kind, so that what is left is worth reading."""
    for message in (
        r".*does not have many workers.*",
        r".*isinstance\(treespec, LeafSpec\).*",
        r".*`IterableDataset` has `__len__` defined.*",
        r".*is smaller than the logging interval.*",
        r"Checkpoint directory .* exists and is not empty.*",
        r"It is recommended to use `self.log\(.*sync_dist=True\)`.*",  # ``drain`` has summed over ranks
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING)


def build_trainer(
    member: Member,
    experiment: Experiment,
    folder: Path,
    status: MemberStatus,
    strategy: BackgroundCheckpoints,
    resumed_step: int = 0,
    *,
    cost: StepCost = UNKNOWN_COST,
    show_progress: bool = False,
) -> tuple[L.Trainer, StopOnRequest]:
    """The Trainer of one member, and the callback that stops it on request.

    Args:
        member: the member.
        experiment: gives the island and the settings of previews; kept in checkpoints.
        folder: where checkpoints, curves and ``status.json`` go.
        status: kept up to date.
        strategy: what ``choose_strategy`` says.
        resumed_step: step of the checkpoint that it will go on from; 0 for none.
        cost: of a sample, for MFU.
        show_progress: whether there is a progress bar.
    """
    island = experiment.island
    speed = Speed(member.batch_size, cost)
    reporter = Reporter(folder, status, member.batch_size, island.log_every_n_steps, show_progress, speed)
    rolling = RollingCheckpoints(
        folder / "checkpoints",
        island.checkpoint_every_n_steps,
        island.keep_checkpoints,
        island.validate_every_n_steps,
        island.milestone_every_n_steps,
    )
    stop = StopOnRequest(rolling)
    callbacks: list[L.Callback] = [
        reporter,
        # Before what saves checkpoints, so that one who resumes from such a step has its snapshot.
        *([EmaSnapshots(folder, member.train)] if member.train.ema_widths else []),
        stop,
        DisjointRanks(),
        KeptOrigin(member.name, experiment),
        rolling,
        PictureLogger(member, experiment.sample, stop),
    ]
    if island.log_sample_ids:
        callbacks.append(SampleLog(folder))
    callbacks.append(speed)  # behind all that takes time
    callbacks.append(MissedValidation(folder, status, island.validate_every_n_steps))
    _quieten()
    logger = TensorBoardLogger(
        folder, name="", version="tensorboard", purge_step=resumed_step + 1 if resumed_step else None
    )
    trainer = L.Trainer(
        accelerator=resolve_accelerator(island.accelerator),
        devices=island.devices,
        strategy=strategy,
        precision=island.precision,  # type: ignore[arg-type]  # Lightning lists the strings in a Literal and checks them
        max_steps=member.train.max_steps,
        max_epochs=-1,
        val_check_interval=island.validate_every_n_steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=logger,
        callbacks=callbacks,
        plugins=[OwnProcesses()],
        log_every_n_steps=island.log_every_n_steps,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    return trainer, stop


def _cost(module: MemberModule) -> tuple[StepCost, str]:
    """Work of a sample, and a line that says it; of a plug-in that is computed by unknown operations there is none."""
    island, member = module.island, module.member
    try:
        forward, whole = (
            flops_per_sample(module.network, member.x_shape, member.condition, backward=backward)
            for backward in (False, True)
        )
    except (RuntimeError, NotImplementedError) as error:
        return UNKNOWN_COST, f"its FLOPs cannot be counted ({first_line(error)}), so no MFU is shown"
    recomputed = forward if island.activation_checkpointing else 0.0
    return StepCost.of(whole, recomputed, island.accelerator, island.precision, island.devices)


def _disk_bytes(checkpoint: int, num_parameters: int, island: IslandConfig, train: TrainConfig) -> int:
    """Checkpoints, of which one more than are kept while it is written, milestones, snapshots and the artifact."""
    num_kept = island.keep_checkpoints + 1
    if island.milestone_every_n_steps is not None:
        num_kept += train.max_steps // island.milestone_every_n_steps
    num_copies = 1 + len(train.ema_widths) * len(snapshot_steps(train))
    return num_kept * checkpoint + num_copies * FLOAT32_BYTES * num_parameters


def _fit_locked(
    name: str, experiment: Experiment, run: RunFolder, status: MemberStatus, console: Console, show_progress: bool
) -> MemberStatus:
    island, folder = experiment.island, run.member(name)
    configure_torch(island.accelerator, island.num_threads)
    manifest = Manifest.read(run.root)
    member = Member.resolve(name, experiment, manifest)
    module = build_module(member, island, manifest)
    data = build_data(member, island, manifest, run)
    num_parameters = sum(p.numel() for p in module.network.parameters())
    num_widths = len(member.train.ema_widths)
    strategy, reason = choose_strategy(island, num_parameters, num_widths, member.train.optimizer)
    size = checkpoint_bytes(num_parameters, num_widths, island.precision)
    whole = _disk_bytes(size, num_parameters, island, member.train)
    console.print(f"{name}: {num_parameters / 1e6:.2f} M parameters, {reason}")
    console.print(f"{name}: a checkpoint takes {amount(size)} of the disk and of the host's memory")
    console.print(f"{name}: all that it keeps takes about {amount(whole)} of the disk, besides curves")
    cost, line = _cost(module)
    console.print(f"{name}: {line}")

    with after_the_first(f"checkpoint of {folder}"):
        resume, lines = newest_checkpoint(folder / "checkpoints", leads=leads())
    for line in lines:
        console.print(line, soft_wrap=True)
    resumed_step = step_of(resume) if resume else 0
    if resume:
        changed = check_origin(resume, name, experiment)
        console.print(f"{name}: resumes at step {resumed_step}")
        for said in (changed, missing_snapshots(folder, member.train, resumed_step)):
            if said:
                console.print(f"{name}: {said}")
    status.validated_step = min(status.validated_step, resumed_step)  # what comes behind it comes again
    trainer, stop = build_trainer(
        member, experiment, folder, status, strategy, resumed_step, cost=cost, show_progress=show_progress
    )
    with speaking_for_all(trainer):
        try:
            with stop.listening():
                status.state = "starting"
                if leads():
                    status.write(folder)
                trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
        except StopRequested:
            stop.stopped = True
        leader = trainer.is_global_zero
        weights = {} if stop.stopped else gathered_ema(module.network, trainer.optimizers[0], keeps=leader)
        if leader and not stop.stopped:
            weights |= kept_buffers(module.network)

    if stop.stopped:
        status.state = "stopped"
        if trainer.is_global_zero:
            status.write(folder)
        console.print(f"{name}: stopped at step {max(trainer.global_step, resumed_step)}; the same command resumes it")
        return status
    status.step = trainer.global_step
    if trainer.is_global_zero:
        prediction = getattr(module.network, "prediction", "velocity")
        shutil.rmtree(folder / FOLDER / "artifact", ignore_errors=True)  # what ``ema`` kept of fewer steps
        hand_over(run.artifact(name), member, manifest, weights, prediction, status)
        status.state = "done"
        status.write(folder)
    return status
