"""Plan a run before anything is rented: what each member needs, how long it takes and what it costs on a device.

Nothing is computed and no GPU is needed. ``members/cost.py`` counts; this module divides by devices and multiplies by
hours, and names the source of each figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from ddm_lightning.config.experiment import Experiment, IslandConfig
from ddm_lightning.config.load import read_yaml
from ddm_lightning.config.merge import island_of
from ddm_lightning.core.checks import is_number
from ddm_lightning.core.devices import known_device, peak_tflops, resolve_accelerator
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import read_json
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.encoders.interfaces import bytes_per_sample
from ddm_lightning.members.cost import MemberCost, Memory, chosen_strategy, micro_batch_of
from ddm_lightning.members.member import Member
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.manifest import DataSizes, Manifest, manifest_path

ASSUMED_DEVICE = "H100 80GB"
ASSUMED_MFU = 0.35
USABLE = 0.9
"""Share of a device's memory that a plan may fill; CUDA's context, NCCL and gaps between tensors take the rest."""
_NODE = (1, 2, 4, 8)
"""Devices of a node to suggest."""


@dataclass(frozen=True)
class Data:
    """Sizes of a run's data: of its shards or, before ``prepare``, of what its plug-ins would write."""

    sizes: DataSizes | Manifest
    sample_bytes: int
    """Of one sample in the shards, without its caption's text."""
    num_samples: Sequence[int] | None
    """Training samples of each cluster; None if unknown."""
    source: str


def data_of(experiment: Experiment, num_samples: int | None = None) -> Data:
    """Find the sizes of the data: in the manifest, else from the plug-ins, else assumed.

    Args:
        experiment: the experiment.
        num_samples: images of the source, for experiments that are not prepared.

    Raises:
        UserError: the manifest is damaged.
    """
    run_dir = RunFolder.of(experiment).root
    prepare = experiment.prepare
    if manifest_path(run_dir).exists():
        manifest = Manifest.read(run_dir)
        samples = [cluster.train for cluster in manifest.clusters]
        return Data(manifest, bytes_per_sample(manifest.columns), samples, "counted in the manifest")

    from ddm_lightning.prepare.reading import Plugins
    from ddm_lightning.prepare.records import count_samples

    copies = 1 + prepare.horizontal_flips
    num_captions = max(1, len(prepare.captions))
    try:
        plugins = Plugins(prepare)
        sizes = plugins.sizes()
        found = count_samples(plugins.parts)
        images = plugins.image_encoder
        captions = plugins.caption_encoder
        stored = prod(sizes.x_shape) * np.dtype(images.dtype).itemsize * (1 + (images.stores == "posterior"))
        text = num_captions * bytes_per_sample(captions.columns if captions else {})
        sample_bytes = copies * stored + bytes_per_sample({"label": "int32"}) + text
        source = "from the source and the encoders"
    except (UserError, OSError) as error:
        edge = (prepare.images.size or 256) // 8
        sizes = DataSizes((4, edge, edge), 768, (77, 768), 1000)
        found = None
        if prepare.caption_encoder:
            params = prepare.caption_encoder.params
        else:
            params = {}

        text = {"ids": 4 * 77, "tokens": 2 * 77 * 768}.get(params.get("store", ""), 2 * 768)
        sample_bytes = copies * 4 * prod(sizes.x_shape) + num_captions * text
        source = f"assumed: Stable Diffusion's latents, CLIP ViT-L/14's text, 1000 classes ({first_line(error)})"

    num = num_samples or found
    clusters = prepare.partition.num_clusters
    each = None
    if num is not None:
        each = [round(num * (1 - prepare.held_out_fraction) / clusters)] * clusters

    return Data(sizes, sample_bytes, each, source + (", --samples" if num_samples else ""))


@dataclass(frozen=True)
class Rates:
    """What turns FLOPs into hours and money, with the source of each figure."""

    mfu: float
    """Share of the devices' peak; if it is assumed, recomputation counts as work."""
    mfu_source: str
    prices: Mapping[str, float]
    """Dollars per device and hour, by ``known_device``."""
    price_source: str


def rates_of(mfu: str | None, files: Sequence[str]) -> Rates:
    """Read ``--mfu`` and ``--prices``.

    Args:
        mfu: a share, or a JSON file of ``benchmarks/mfu.py``, whose best figure is taken; None for ``ASSUMED_MFU``.
        files: YAML files with dollars per hour by device; the last one that names a device wins.

    Raises:
        UserError: a share that is none, a file that holds none, an unknown device or a negative price.
    """
    value = ASSUMED_MFU
    source = "assumed; measure it with benchmarks/mfu.py"
    if mfu is not None:
        try:
            value = float(mfu)
            source = "--mfu"
        except ValueError:
            found = read_json(Path(mfu), "a result of benchmarks/mfu.py", "give a share such as 0.4, or such a file")
            if isinstance(found, dict):
                figures = found.get("figures", {})
            else:
                figures = {}

            value = max((figure for name, figure in figures.items() if name.startswith("mfu_")), default=0.0)
            source = f"measured in {mfu}"

        if not 0 < value <= 1:
            raise UserError(f"--mfu {mfu}: gives no share of the peak, above 0 and at most 1")

    prices = {}
    for file in files:
        for name, price in OmegaConf.to_container(read_yaml(Path(file), "write lines such as 'H100: 2.50'")).items():  # type: ignore[union-attr]
            if not is_number(price) or price < 0:
                raise UserError(f"{file}: key {name!r} = {price!r}: give dollars per hour, a number of at least 0")

            try:
                prices[known_device(str(name))[0]] = float(price)
            except UserError as error:
                raise UserError(f"{file}: {error}") from None

    return Rates(value, source, prices, ", ".join(files) or "none given; add --prices FILE")


@dataclass(frozen=True)
class Setting:
    """Settings of an island under which a member fits."""

    devices: int
    strategy: str
    micro_batch_size: int
    activation_checkpointing: bool
    peak: int
    """Bytes of a device."""

    def __str__(self) -> str:
        if self.activation_checkpointing:
            again = " activation_checkpointing=true"
        else:
            again = ""

        return (
            f"devices={self.devices} strategy={self.strategy} micro_batch_size={self.micro_batch_size}{again} "
            f"takes {format_bytes(self.peak)}"
        )


@dataclass(frozen=True)
class MemberPlan:
    """Figures of one member; times in hours, sizes in bytes, money in dollars. None where a figure is unknown."""

    member: str
    parameters: int
    flops_per_sample: float
    """Forward and backward pass."""
    flops: float
    """Of the whole training."""
    devices: int
    """Of all its nodes."""
    strategy: str
    micro_batch_size: int
    """Samples that a device computes at once."""
    memory: Memory
    fits: bool | None
    suggestion: Setting | None
    """Fewest devices of one node that hold it; None if none do, or if it was not looked for."""
    checkpoint_bytes: int
    shard_bytes: int | None
    hours: float | None
    device_hours: float | None
    dollars: float | None
    shards_in: float | None
    """Bytes per second that a node without a cache of its shards reads."""
    checkpoints_out: float
    """Bytes per second, at one checkpoint in each ``island.publish_every_n_minutes``."""


@dataclass(frozen=True)
class Plan:
    """A run on one kind of device."""

    device: str | None
    """None for the CPU."""
    device_bytes: int | None
    members: tuple[MemberPlan, ...]

    @property
    def fits(self) -> bool:
        """Whether every member does."""
        return all(member.fits is not False for member in self.members)

    @property
    def totals(self) -> dict[str, float | None]:
        """Hours until the last member ends if all start at once, device-hours and dollars of all."""
        return {
            "hours": _over([member.hours for member in self.members], max),
            "device_hours": _over([member.device_hours for member in self.members], sum),
            "dollars": _over([member.dollars for member in self.members], sum),
        }

    def warnings(self) -> Iterator[str]:
        """Say what does not fit, and what would."""
        for one in self.members:
            if one.fits is False:
                remedy = one.suggestion or "no setting of one node does; use a larger device"
                yield (
                    f"{one.member}: does not fit: {format_bytes(one.memory.peak)} of {self.device}, of which "
                    f"{USABLE:.0%} are usable; {remedy}"
                )


def _over(values: list[float | None], together: Any) -> float | None:
    if None in values:
        return None

    return together(values)


class Planner:
    """Plans members of one experiment; what is counted for one device is reused for the next.

    Args:
        experiment: the experiment.
        members: names.
        data: sizes of its data.
        rates: hours and prices.

    Raises:
        UserError: a network cannot be built.
    """

    def __init__(self, experiment: Experiment, members: Sequence[str], data: Data, rates: Rates) -> None:
        self.experiment = experiment
        self.data = data
        self.rates = rates
        self.members = [Run(experiment).resolve(name, data.sizes) for name in members]
        self._costs: dict[str, tuple[MemberCost, float, float]] = {}

    def _cost(self, member: Member) -> tuple[MemberCost, float, float]:
        """Cost, and FLOPs of a sample without and with the backward pass; equal members are counted once."""
        key = repr(replace(member, name="", clusters=(), interval=(0.0, 1.0)))
        if key not in self._costs:
            try:
                cost = MemberCost(member)
            except UserError as error:  # a size that was assumed may be to blame
                raise UserError(f"{error} (sizes of the data: {self.data.source})") from None

            self._costs[key] = cost, cost.flops(backward=False), cost.flops()

        return self._costs[key]

    def on(self, device: str | None) -> Plan:
        """Plan all members on a device; None for the CPU.

        Raises:
            UserError: an unknown device.
        """
        name, num_bytes = known_device(device) if device else (None, None)
        return Plan(name, num_bytes, tuple(self._plan(member, name, num_bytes) for member in self.members))

    def with_suggestions(self, plan: Plan) -> Plan:
        """Look for the fewest devices of one node that hold each member; takes some seconds for a large network."""
        if plan.device_bytes is None:
            return plan

        settings = (
            smallest(self._cost(member)[0], island_of(member.name, self.experiment), plan.device_bytes)
            for member in self.members
        )
        pairs = zip(plan.members, settings, strict=True)
        return replace(plan, members=tuple(replace(one, suggestion=setting) for one, setting in pairs))

    def _plan(self, member: Member, device: str | None, num_bytes: int | None) -> MemberPlan:
        island = island_of(member.name, self.experiment)
        cost, forward, per_sample = self._cost(member)
        strategy = chosen_strategy(island, cost.state, num_bytes or 0)
        memory = cost.memory(island, strategy)
        num_samples = member.batch_size * member.train.max_steps
        hours = device_hours = None
        peak = peak_tflops(device, island.precision, tf32=True) if device else None
        if peak is not None:
            if island.activation_checkpointing and self.rates.mfu == ASSUMED_MFU:
                recomputed = forward
            else:
                recomputed = 0.0

            device_hours = num_samples * (per_sample + recomputed) / (self.rates.mfu * peak * 1e12) / 3600
            hours = device_hours / island.num_ranks

        price = self.rates.prices.get(device or "")
        counts = self.data.num_samples
        return MemberPlan(
            member=member.name,
            parameters=cost.num_parameters,
            flops_per_sample=per_sample,
            flops=num_samples * per_sample,
            devices=island.num_ranks,
            strategy=strategy,
            micro_batch_size=micro_batch_of(member, island)[0],
            memory=memory,
            fits=None if num_bytes is None else memory.peak <= USABLE * num_bytes,
            suggestion=None,
            checkpoint_bytes=cost.state.checkpoint,
            shard_bytes=None if counts is None else self.data.sample_bytes * sum(counts[k] for k in member.clusters),
            hours=hours,
            device_hours=device_hours,
            dollars=None if price is None or device_hours is None else price * device_hours,
            shards_in=hours and self.data.sample_bytes * num_samples / (3600 * hours),
            checkpoints_out=cost.state.checkpoint / (60 * island.publish_every_n_minutes),
        )


def smallest(cost: MemberCost, island: IslandConfig, num_bytes: int) -> Setting | None:
    """Find the fewest devices of one node that hold a member, with the largest micro-batches.

    They have no more samples than ``island``'s own. Activation checkpointing comes after smaller micro-batches, which
    cost no FLOPs.

    Args:
        cost: of the member.
        island: its settings, to change.
        num_bytes: memory of a device.
    """
    room = USABLE * num_bytes
    own = micro_batch_of(cost.member, island)[0]
    for devices in sorted({*_NODE, island.devices}):
        for checkpointing in sorted({island.activation_checkpointing, True}):
            tried = replace(island, nodes=1, devices=devices, strategy="auto", activation_checkpointing=checkpointing)
            strategy = chosen_strategy(tried, cost.state, num_bytes)
            if strategy.startswith("fsdp"):
                shares = devices
            else:
                shares = 1

            if cost.member.batch_size % devices or cost.state.training / shares > room:
                continue

            def peak(size: int, tried: IslandConfig = tried, strategy: str = strategy) -> int:
                return cost.memory(replace(tried, micro_batch_size=size), strategy).peak

            size = min(own, micro_batch_of(cost.member, replace(tried, micro_batch_size=None))[0])
            most = peak(size)
            if most > room and (least := peak(1)) <= room:
                # Nearly linear in the samples; to count each size would take some seconds.
                each = (most - least) / (size - 1)
                size = 1 << (1 + int((room - least) / each)).bit_length() - 1
                most = least + int(each * (size - 1))

            if most <= room:
                return Setting(devices, strategy, size, checkpointing, most)

    return None


def devices_of(experiment: Experiment, asked: Sequence[str] | None, rates: Rates) -> tuple[list[str | None], str]:
    """Devices to plan for, and where they come from."""
    if asked:
        return [*asked], "--device"
    if experiment.island.accelerator == "cpu":
        return [None], "island.accelerator"
    if rates.prices:
        return [*rates.prices], rates.price_source
    if resolve_accelerator("auto") == "gpu":
        return [torch.cuda.get_device_name()], "this machine's"

    return [ASSUMED_DEVICE], "assumed, as this machine has no GPU; give --device NAME, or island.accelerator=cpu"


def shortages(experiment: Experiment, members: Sequence[str], devices: Sequence[str]) -> list[str]:
    """Say what does not fit on devices that are about to be rented; of a device that is not known, nothing.

    Raises:
        UserError: as ``Planner``.
    """
    found: list[str] = []
    if devices:
        planner = Planner(experiment, members, data_of(experiment), rates_of(None, ()))
        for device in devices:
            with suppress(UserError):
                plan = planner.on(device)
                found += [] if plan.fits else planner.with_suggestions(plan).warnings()

    return found
