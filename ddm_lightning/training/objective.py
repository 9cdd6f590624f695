"""The objectives of members: batch → noisy batch → losses, and held-out figures. Pure PyTorch, without a Trainer.

All random numbers (timesteps, noise, dropped conditions, dropout within the network) are keyed by seed, member and
``Position``. So ranks get different ones, and a resumed training neither repeats nor skips any.
"""

from __future__ import annotations

import itertools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.devices import device_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CAPTION_ENCODERS, STRATEGIES
from ddm_lightning.core.weights import check_memory
from ddm_lightning.encoders.interfaces import CaptionEncoder, StoredForm, draw_caption
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble
from ddm_lightning.ensemble.routing import Strategy
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import (
    PATHS,
    interpolate,
    times_on_path,
    training_target,
    velocity_loss_weights,
    x_0_from_velocity,
)
from ddm_lightning.flow.randomness import keyed_generator, keyed_seed
from ddm_lightning.flow.timesteps import sample_timesteps, stratified_timesteps
from ddm_lightning.members.member import Member
from ddm_lightning.members.run import Run
from ddm_lightning.members.signatures import check_signature
from ddm_lightning.members.status import CONDITIONAL, TEMPERATURE_METRIC
from ddm_lightning.networks.calibration import Calibration
from ddm_lightning.shards.manifest import Manifest

NUM_VALIDATION_TIMESTEPS = 8
_COLUMNS = {"class": "label", "tokens": "text_tokens", "text": "text"}
"""Column of the shards by kind of condition."""
CALIBRATION_ERROR_METRIC = "held_out/calibration_error"


@dataclass(frozen=True)
class Position:
    """Place of a batch in a training; keys its randomness."""

    step: int
    """Optimizer steps taken before this batch."""
    rank: int = 0
    num_ranks: int = 1
    part: int = 0
    """Number of the batch within its step, where a Trainer accumulates gradients over several."""


@dataclass(frozen=True)
class NoisyBatch:
    """A batch on the member's path between data and noise; ``t`` is the path's time."""

    x_t: Float[Tensor, "b c h w"]
    t: Float[Tensor, " b"]
    noise: Float[Tensor, "b c h w"]
    x_0: Float[Tensor, "b c h w"]
    condition: Condition | None

    def rows(self, rows: slice) -> NoisyBatch:
        """Return some of the samples."""
        return NoisyBatch(
            self.x_t[rows],
            self.t[rows],
            self.noise[rows],
            self.x_0[rows],
            self.condition and self.condition.rows(rows),
        )


class Averages:
    """Running averages on the device."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}

    def add(self, sums: Float[Tensor, "*n"], *names: str, count: int | Tensor = 1) -> None:
        """Add sums of values to the averages; skip a sum that is not finite.

        Args:
            sums: one sum, or one per name.
            names: names of the averages.
            count: number of values in each sum.
        """
        sums = sums.detach().float().view(len(names))
        finite = sums.isfinite()
        sums_and_counts = torch.stack([torch.where(finite, sums, 0.0), finite * count])
        self._sums[names] = self._sums.get(names, 0.0) + sums_and_counts

    def drain(self, num_ranks: int = 1) -> dict[str, float]:
        """Return and reset the averages over all ranks, sorted by name; skip those without values.

        The host waits for the device here. With several ranks this is a collective, and all need the same names.
        """
        if not self._sums:
            return {}

        groups = sorted(self._sums)
        table = torch.cat([self._sums[names] for names in groups], dim=1)
        self._sums = {}
        if num_ranks > 1:
            torch.distributed.all_reduce(table)

        sums, counts = table.tolist()
        names = itertools.chain(*groups)
        return {name: total / count for name, total, count in zip(names, sums, counts, strict=True) if count}


@dataclass(eq=False)
class Objective(ABC):
    """Base of the objectives: how a batch is noised, and how its losses count."""

    loss_name = "loss"
    """Name of the loss in curves."""
    network: nn.Module
    """The built network."""
    member: Member
    """Its role, clusters and training settings."""
    stored: StoredForm
    """How the shards hold ``x_0``."""
    caption_encoder: CaptionEncoder | None = None
    """Encodes captions during training; None if the shards hold the result."""
    caption_weights: Sequence[float] = ()
    """Weights of an image's captions, of which each step draws one; empty if images have only one."""
    num_held_out: int = sys.maxsize
    """Held-out samples of its clusters."""
    held_out_ends: Mapping[Bucket, int] = field(default_factory=dict)
    """Where each bucket's held-out samples end, if each bucket begins with a batch of its own."""

    def __post_init__(self) -> None:
        low, high = times_on_path(self.member.interval, self.member.path)
        self.interval = low, high
        fixed = enumerate(stratified_timesteps(NUM_VALIDATION_TIMESTEPS).tolist())
        self.timesteps = {index: t for index, t in fixed if low <= t < high} or {0: (low + high) / 2}
        """Validation timesteps by the index that keys their noise.

        Those of 8 fixed ones that lie in the member's interval, or else the middle of the interval.
        """
        self.start_validation()

    @property
    def prediction(self) -> str:
        """Prediction type that an expert's network declares."""
        return getattr(self.network, "prediction", "velocity")

    def bucket(self, batch: dict[str, Tensor]) -> Bucket | None:
        """Return the bucket of a batch; None if all images have one shape."""
        shape = batch["x_0"].shape[2:]  # a stored posterior has twice the channels
        return next((bucket for bucket in self.member.buckets if bucket.x_shape[1:] == shape), None)

    def x_0(self, batch: dict[str, Tensor]) -> Float[Tensor, "b c h w"]:
        """Return the data of a batch, or the mean of a stored posterior, in fp32 and the networks' units."""
        return self.stored.mean(batch["x_0"])

    def condition(self, batch: dict[str, Tensor]) -> Condition | None:
        """Return the condition of a batch, without dropout."""
        kind = self.member.condition.kind
        if kind == "none":
            return None

        parts = []
        for part in kind.split("+"):
            if self.caption_encoder is None:
                parts.append(batch[_COLUMNS[part]])
            elif part == "text":
                parts.append(self.caption_encoder.vectors_of_stored(batch))
            else:
                parts.append(self.caption_encoder.tokens_of_stored(batch))

        return Condition.of(*parts)

    # Training.

    def seed_network(self, at: Position, device: torch.device) -> None:
        """Seed the global generators, which a network's own dropout uses."""
        seed = keyed_seed(self.member.seed, *self._key("network", at))
        # Only those in use: ``torch.manual_seed`` takes a millisecond per kind of idle device.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def noisy_batch(self, batch: dict[str, Tensor], at: Position) -> NoisyBatch:
        """Sample timesteps, noise, captions and dropped conditions for a batch."""
        config = self.member.timesteps
        stored = batch["x_0"]
        device = stored.device
        generator = keyed_generator(self.member.seed, *self._key("noise", at), device=device)
        if self.member.train.horizontal_flip:
            flipped = torch.rand(len(stored), generator=generator, device=device) < 0.5
            # A mirrored latent is not the latent of the mirrored image. Shards of latents hold the latter.
            if "x_0_flipped" in batch:
                mirrored = batch["x_0_flipped"]
            else:
                mirrored = stored.flip(-1)

            stored = torch.where(flipped[:, None, None, None], mirrored, stored)

        x_0 = self.stored.sample(stored, generator)
        shift = self.member.shift_for(x_0.shape)
        t = sample_timesteps(len(x_0), config.density, config.mean, config.std, shift, generator, device, self.interval)
        noise = torch.randn(x_0.shape, generator=generator, device=device)
        condition = self.condition(self._with_one_caption(batch, at))
        if condition is not None:
            dropped = torch.rand(len(x_0), generator=generator, device=device) < self.member.condition_dropout
            condition = condition.dropped(dropped)

        return NoisyBatch(interpolate(x_0, noise, t, self.member.path), t, noise, x_0, condition)

    def _with_one_caption(self, batch: dict[str, Tensor], at: Position) -> dict[str, Tensor]:
        """Draw a caption per image, from numbers for all ranks' samples: the number of ranks changes no caption."""
        if not self.caption_weights or "has_caption" not in batch:
            return batch

        device = batch["x_0"].device
        generator = keyed_generator(self.member.seed, self.member.name, "caption", at.step, at.part, device=device)
        uniform = torch.rand(len(batch["x_0"]) * at.num_ranks, generator=generator, device=device)
        return draw_caption(batch, self.caption_weights, uniform[at.rank :: at.num_ranks])

    @abstractmethod
    def compute_losses(self, noisy: NoisyBatch, batch: dict[str, Tensor]) -> dict[str, Float[Tensor, " b"]]:
        """Return the ``loss`` of each sample, in fp32, and under other names further figures for curves."""

    def weighted(self, losses: dict[str, Float[Tensor, " b"]], t: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Weight ``loss`` for training; curves show it unweighted."""
        if self.member.loss == "velocity":
            return losses["loss"] * velocity_loss_weights(t, self.prediction, self.member.path)

        return losses["loss"]

    def _key(self, purpose: str, at: Position) -> tuple[int | str, ...]:
        """Key of a batch's random numbers; the part is in it only where a Trainer accumulates."""
        key = (self.member.name, purpose, at.rank, at.step)
        if at.part:
            return *key, at.part

        return key

    # Validation.

    def start_validation(self) -> None:
        """Forget an earlier validation."""
        self.held_out = Averages()

    @abstractmethod
    def validate(self, batch: dict[str, Tensor], batch_idx: int, at: Position) -> None:
        """Add a held-out batch to the figures, at fixed ``timesteps``, so that curves of runs are comparable."""

    def held_out_figures(self, num_ranks: int = 1) -> dict[str, float]:
        """Return the averages since ``start_validation``, over all ranks; a collective: every rank calls it."""
        return self.held_out.drain(num_ranks)

    def noisy_validation_batch(self, batch: dict[str, Tensor], batch_idx: int, index: int, at: Position) -> NoisyBatch:
        """Return the batch at the timestep of this index, with noise that never changes.

        Curves of one and of eight devices are comparable: each rank generates the noise of the whole step and takes the
        rows of its own samples. The ranks' samples alternate in a step (``shards.datamodule.steps``).
        """
        x_0 = self.x_0(batch)
        # Filled on the device: a copy from the host would wait for it.
        t = torch.full((len(x_0),), self.timesteps[index], device=x_0.device)
        # The 0 was a rank once, and keeps the noise of earlier versions.
        generator = keyed_generator(self.member.seed, "validation", batch_idx, index, 0, device=x_0.device)
        # For the full batch even if this one is smaller: random values may depend on their number.
        noise = torch.randn((self.member.batch_size, *x_0.shape[1:]), generator=generator, device=x_0.device)
        noise = noise[at.rank :: at.num_ranks][: len(x_0)]
        return NoisyBatch(interpolate(x_0, noise, t, self.member.path), t, noise, x_0, self.condition(batch))

    def num_counted(self, batch: dict[str, Tensor], batch_idx: int, at: Position) -> int:
        """Return how many rows of a held-out batch count towards the averages; they come first.

        If the held-out samples do not divide equally among ranks, some ranks repeat one as their last row
        (``shards.datamodule.steps``). Its loss is computed, because FSDP2 needs all ranks, but not counted.
        """
        first = batch_idx * self.member.batch_size + at.rank
        bucket = self.bucket(batch)
        end = self.held_out_ends[bucket] if bucket else self.num_held_out
        return min(len(batch["sample_id"]), len(range(first, end, at.num_ranks)))

    def add_held_out(self, name: str, suffix: str, sums: Tensor, batch: dict[str, Tensor], num: int) -> None:
        """Add a sum over ``num`` rows to an average, and to that of their bucket."""
        self.held_out.add(sums, f"held_out/{name}{suffix}", count=num)
        bucket = self.bucket(batch)
        if bucket:
            self.held_out.add(sums, f"held_out/{name}{suffix}_{bucket.name}", count=num)


class Regression(Objective):
    """Flow-matching expert or monolith: regresses ``ε − x_0``, or the target that its network declares, at ``x_t``.

    The loss is the mean squared error in fp32 (McAllister et al., arXiv 2501.05450, section 3).
    """

    def compute_losses(self, noisy: NoisyBatch, batch: dict[str, Tensor]) -> dict[str, Float[Tensor, " b"]]:
        return {"loss": self._squared_error(noisy, *self.ends(noisy, batch))}

    def ends(self, noisy: NoisyBatch, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return data and noise, the ends of each sample's path."""
        return noisy.x_0, noisy.noise

    def _squared_error(self, noisy: NoisyBatch, x_0: Tensor, noise: Tensor) -> Float[Tensor, " b"]:
        """Mean squared error of each sample, whose path ends at ``x_0`` and ``noise``."""
        prediction = self.network(noisy.x_t, noisy.t, noisy.condition)
        target = training_target(x_0, noise, noisy.t, self.prediction, self.member.path)
        return F.mse_loss(prediction.float(), target, reduction="none").flatten(1).mean(1)

    @torch.no_grad()
    def validate(self, batch: dict[str, Tensor], batch_idx: int, at: Position) -> None:
        num = self.num_counted(batch, batch_idx, at)
        for index, t in self.timesteps.items():
            noisy = self.noisy_validation_batch(batch, batch_idx, index, at)
            loss = self._squared_error(noisy, noisy.x_0, noisy.noise)[:num].sum()
            self.add_held_out("loss", "", loss, batch, num)
            self.held_out.add(loss, f"held_out/loss_t{t:.3f}", count=num)


class Distillation(Regression):
    """Student: regresses the ensemble's velocity instead of ``ε − x_0`` (arXiv 2501.05450, section 4).

    The held-out loss is that of an expert, so that it can be compared with the monolith's.
    """

    teacher: Ensemble
    """All experts, and the router if ``strategy`` needs one."""
    strategy: Strategy | None = None
    """Weights the experts; None evaluates the expert of each sample's cluster."""

    def teach(self, run: Run) -> None:
        """Take the run's finished ensemble as the teacher.

        Raises:
            UserError: no ensemble, a damaged artifact, a refused signature, or a strategy without weights or without
                its router.
        """
        experiment = run.experiment
        name = experiment.distill.teacher
        manifest = read_ensemble(run.folder.ensemble)
        for member, folder in manifest.folders.items():
            check_signature(member, folder, experiment)

        self.teacher = load_ensemble(manifest, device_of(experiment.island.accelerator))
        self.teacher.precision = experiment.sample.precision
        if name == "owner":
            return

        self.strategy = STRATEGIES.build(name, {})
        # The base's ``weights`` is not implemented: the strategy overrides ``field`` or ``generate``.
        if type(self.strategy).weights is Strategy.weights:
            raise UserError(f"key 'distill.teacher' = {name!r}: does not weight velocities; set owner, full or top-1")

        lacks_router = self.teacher.router is None and len(self.teacher.priors) > 1
        if self.strategy.needs_router and lacks_router:
            raise UserError(f"key 'distill.teacher' = {name!r}: needs the router, which the ensemble lacks; set owner")

    def ends(self, noisy: NoisyBatch, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the teacher's estimates of data and noise, the ends of each sample's path."""
        x_t, t = PATHS[self.member.path].to_linear(noisy.x_t, noisy.t)
        if self.strategy is None:
            weights = F.one_hot(batch["cluster"], self.member.num_clusters).to(x_t)
        else:
            weights = self.strategy.weights(self.teacher.probabilities(x_t, t, noisy.condition))

        velocity = self.teacher.velocity(x_t, t, noisy.condition, weights=weights)
        x_0 = x_0_from_velocity(x_t, velocity, t)
        return x_0, x_0 + velocity


class Classification(Objective):
    """Router: classifies noisy samples by cluster with a cross-entropy (arXiv 2501.05450, section 3.2).

    It trains on the natural mixture of clusters, so its probabilities contain the cluster priors.
    """

    loss_name = "cross_entropy"

    def compute_losses(self, noisy: NoisyBatch, batch: dict[str, Tensor]) -> dict[str, Float[Tensor, " b"]]:
        """Return the cross-entropy of each sample, in nats, and whether its cluster is the likeliest."""
        logits = self.network(noisy.x_t, noisy.t, noisy.condition).float()
        hits = (logits.argmax(1) == batch["cluster"]).float()
        return {"loss": F.cross_entropy(logits, batch["cluster"], reduction="none"), "accuracy": hits}

    def start_validation(self) -> None:
        super().start_validation()
        num = self.member.num_clusters
        self.confusion = torch.zeros(NUM_VALIDATION_TIMESTEPS, num, num)
        """Probabilities of this rank's part of a validation, summed by timestep and true cluster; on the CPU."""
        self.calibrations: dict[str, Calibration] = {}
        """Calibration without (``""``) and with (``CONDITIONAL``) the condition, of this rank's samples."""

    @torch.no_grad()
    def validate(self, batch: dict[str, Tensor], batch_idx: int, at: Position) -> None:
        """Add cross-entropy and accuracy, without and with the condition."""
        num = self.num_counted(batch, batch_idx, at)
        cluster = batch["cluster"][:num]
        cluster_on_host = cluster.cpu()
        sample_id = batch["sample_id"][:num].cpu()
        for index in range(NUM_VALIDATION_TIMESTEPS):
            noisy = self.noisy_validation_batch(batch, batch_idx, index, at)
            branches: dict[str, Condition | None] = {"": None}
            if noisy.condition is not None:
                branches[CONDITIONAL] = noisy.condition

            for branch, condition in branches.items():
                logits = self.network(noisy.x_t, noisy.t, condition).float()[:num]
                nll = F.cross_entropy(logits, cluster, reduction="sum")
                hits = (logits.argmax(1) == cluster).float().sum()
                self.add_held_out(self.loss_name, branch, nll, batch, num)
                self.add_held_out("accuracy", branch, hits, batch, num)
                self.held_out.add(nll, f"held_out/{self.loss_name}{branch}{time_suffix(index)}", count=num)
                self.held_out.add(hits, f"held_out/accuracy{branch}{time_suffix(index)}", count=num)

                logits = logits.cpu()
                calibration = self.calibrations.setdefault(branch, Calibration(NUM_VALIDATION_TIMESTEPS))
                calibration.add(index, logits, cluster_on_host, sample_id)
                if not branch:
                    self.confusion[index].index_add_(0, cluster_on_host, logits.softmax(1))

    def held_out_figures(self, num_ranks: int = 1) -> dict[str, float]:
        """Return the averages, the temperatures, and the calibration errors without and with them; a collective."""
        figures = super().held_out_figures(num_ranks)
        for branch, calibration in self.calibrations.items():
            self._sum_over_ranks(calibration.loss, num_ranks)
            self._sum_over_ranks(calibration.reliability, num_ranks)
            before, after = calibration.errors()
            for index, temperature in enumerate(calibration.temperatures()):
                suffix = f"{branch}{time_suffix(index)}"
                figures[f"{TEMPERATURE_METRIC}{suffix}"] = temperature
                figures[f"{CALIBRATION_ERROR_METRIC}{suffix}"] = before[index]
                figures[f"{CALIBRATION_ERROR_METRIC}_calibrated{suffix}"] = after[index]

        return {name: value for name, value in figures.items() if math.isfinite(value)}

    def sum_confusion(self, num_ranks: int) -> Float[Tensor, "t k k"]:
        """Return the confusion of all ranks; a collective, once per validation."""
        self._sum_over_ranks(self.confusion, num_ranks)
        return self.confusion

    def _sum_over_ranks(self, sums: Tensor, num_ranks: int) -> None:
        if num_ranks > 1:
            on_device = sums.to(next(self.network.parameters()).device)
            torch.distributed.all_reduce(on_device)
            sums.copy_(on_device)


OBJECTIVES: dict[str, type[Objective]] = {
    "regression": Regression,
    "classification": Classification,
    "distillation": Distillation,
}
"""Objectives by name; each role names its own."""


def build_objective(member: Member, run: Run, network: nn.Module | None = None) -> Objective:
    """Build the objective of a member of ``run``, around ``network`` or else its untrained network.

    Raises:
        UserError: unknown network or parameters, shards without latents of mirrored images, a network too large for the
            memory, another caption encoder than that of the shards, or as ``teach``.
    """
    manifest = run.manifest
    is_latent = manifest.image_encoder.name != "pixels"
    if member.train.horizontal_flip and is_latent and "x_0_flipped" not in manifest.columns:
        raise UserError(
            f"key '{member.role.section}.train.horizontal_flip': the shards hold no latents of mirrored images; "
            "prepare with prepare.horizontal_flips=true, or set it to false"
        )

    if network is None:
        planned = member.plan_network()
        check_memory([*planned.parameters(), *planned.buffers()], member.name)
        network = member.build_network()
        if member.lora is not None and member.initial is not None:
            member.add_adapters(network, member.initial.fitting(network))

    caption_weights: list[float] = []
    caption_encoder = None
    if member.condition.kind not in ("class", "none"):
        if len(manifest.captions) > 1:
            caption_weights = [caption.weight for caption in manifest.captions]

        columns = {_COLUMNS[kind] for kind in member.condition.kind.split("+")}
        if not columns <= manifest.columns.keys() and member.caption_encoder is not None:
            caption_encoder = build_caption_encoder(run)

    objective = OBJECTIVES[member.role.objective](
        network,
        member,
        StoredForm(manifest.stores, manifest.normalisation),
        caption_encoder=caption_encoder,
        caption_weights=caption_weights,
        num_held_out=sum(manifest.clusters[k].held_out for k in member.clusters),
        held_out_ends=_held_out_ends(member, manifest),
    )
    if isinstance(objective, Distillation):
        objective.teach(run)

    return objective


def _held_out_ends(member: Member, manifest: Manifest) -> dict[Bucket, int]:
    """Return ``Objective.held_out_ends``."""
    ends = {}
    end = 0
    for bucket, clusters in zip(manifest.buckets, manifest.bucket_samples, strict=True):
        num_batches = math.ceil(end / member.batch_size)
        end = num_batches * member.batch_size + sum(clusters[k].held_out for k in member.clusters)
        ends[bucket] = end

    return ends


def build_caption_encoder(run: Run) -> CaptionEncoder:
    """Build the encoder of captions, which has to be the model that prepared the shards, as on other islands.

    Raises:
        UserError: its files differ.
    """
    plugin = run.experiment.prepare.caption_encoder
    assert plugin is not None  # experiments with text have one
    encoder = CAPTION_ENCODERS.build(plugin.name, plugin.params)
    found = encoder.provenance()
    differing = []
    for name, value in run.manifest.provenance.get("caption_encoder", {}).items():
        if name.endswith("sha256") and value != found.get(name):
            differing.append(name)

    if differing:
        raise UserError(
            f"key 'prepare.caption_encoder': {' and '.join(differing)} of this machine's model differ from those in "
            f"{run.folder.prepared / 'manifest.json'}; copy the model, with its tokenizer, from where prepare ran"
        )

    return encoder


def time_suffix(index: int) -> str:
    """Suffix of the curves at the ``index``-th validation timestep, such as ``_t0.062``."""
    return f"_t{(index + 0.5) / NUM_VALIDATION_TIMESTEPS:.3f}"
