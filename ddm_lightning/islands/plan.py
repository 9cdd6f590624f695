"""Plan a run before anything is rented: what each member needs, how long it takes and what it costs on a device.

Nothing is computed and no GPU is needed, unless this machine is to be measured. ``members/cost.py`` counts; this module
divides by devices and multiplies by hours, and names the source of each figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from ddm_lightning.config.experiment import Experiment, IslandConfig
from ddm_lightning.config.load import read_yaml
from ddm_lightning.config.merge import island_of
from ddm_lightning.core import checks
from ddm_lightning.core.devices import check_devices, device_bytes, resolve_accelerator
from ddm_lightning.core.errors import UserError, say
from ddm_lightning.core.files import read_json
from ddm_lightning.core.formatting import Bars, format_bytes
from ddm_lightning.core.gpus import Device, find_gpu, parse_gpu
from ddm_lightning.core.weights import free_bytes
from ddm_lightning.islands.local import default_jobs
from ddm_lightning.islands.plan_data import Data, data_of
from ddm_lightning.members.cost import MemberCost, Memory, chosen_strategy, micro_batch_of
from ddm_lightning.members.member import Member
from ddm_lightning.members.run import Run

ASSUMED_DEVICE = "H100 80GB"
ASSUMED_MFU = 0.35
USABLE = 0.9
"""Share of a device's memory that a plan may fill; CUDA's context, NCCL and gaps between tensors take the rest."""
_CHEAPER: dict[Any, Any] = {
    "32-true": "bf16-true",
    "bf16-mixed": "bf16-true",
    "adamw": "adamw-8bit",
    "device": "host",
    False: True,
}
"""What a setting may be changed to, to save memory."""
_NODE = (1, 2, 4, 8)
"""Devices of a node to suggest."""
HERE = "here"
"""Name of this machine's device for ``Planner.on``, which then measures its speed."""
_CPU_FLOPS = 2e11
"""Most FLOPs of a measured step on a CPU, some seconds; a step with fewer samples stands for a larger one."""


@dataclass(frozen=True)
class Rates:
    """What turns FLOPs into hours and money, with the source of each figure."""

    mfu: float
    """Share of the devices' peak; if it is assumed, recomputation counts as work."""
    mfu_source: str
    prices: Mapping[str, float]
    """Dollars per device and hour, by ``Device.name``."""
    price_source: str


def rates_of(mfu: str | None, files: Sequence[str]) -> Rates:
    """Read ``--mfu`` and ``--prices``.

    Args:
        mfu: a share, or a JSON file of ``benchmarks/mfu.py``, whose best figure is taken; None for ``ASSUMED_MFU``.
        files: YAML files with dollars per hour by device; the last one that names a device wins.

    Raises:
        UserError: ``mfu`` is no share, or its file holds none; an unknown device; a negative price.
    """
    value = ASSUMED_MFU
    source = "assumed, too much for small networks; --device here or benchmarks/mfu.py measures"
    if mfu is not None:
        value, source = _read_mfu(mfu)

    prices = {}
    for file in files:
        given: Any = OmegaConf.to_container(read_yaml(Path(file), "write lines such as 'H100: 2.50'"))
        checks.check(given, dict[str, checks.Amount], "", file)
        for name, price in given.items():
            try:
                prices[parse_gpu(name).name] = float(price)
            except UserError as error:
                raise UserError(f"{file}: {error}") from None

    return Rates(value, source, prices, ", ".join(files) or "none given; add --prices FILE")


def _read_mfu(mfu: str) -> tuple[float, str]:
    """Value and source of ``--mfu``."""
    try:
        value = float(mfu)
        source = "--mfu"
    except ValueError:
        found = read_json(Path(mfu), "a result of benchmarks/mfu.py", "give a share such as 0.4, or such a file")
        figures = found.get("figures", {}) if isinstance(found, dict) else {}
        value = max((figure for name, figure in figures.items() if name.startswith("mfu_")), default=0.0)
        source = f"measured in {mfu}"

    if not 0 < value <= 1:
        raise UserError(f"--mfu {mfu}: gives no share of the peak, above 0 and at most 1")

    return value, source


@dataclass(frozen=True)
class Setting:
    """Settings under which a member fits; if none do, those that save the most memory."""

    device_bytes: int
    devices: int
    strategy: str
    micro_batch_size: int
    changes: str
    """Settings ``key=value`` that differ from the experiment's."""
    peak: int
    """Bytes of a device."""
    host: int
    """Bytes of averages in the host's memory."""

    def __str__(self) -> str:
        settings = f"with {self.changes}" if self.changes else "without changes"
        line = f"fits {settings}: {format_bytes(self.peak)} of {format_bytes(self.device_bytes)}"
        if self.peak > USABLE * self.device_bytes:
            line = f"on one node needs at least {format_bytes(self.peak / USABLE)} {settings}"
        if self.devices > 1:
            line += f" on each of {self.devices} ({self.strategy})"

        if self.host:
            line += f", {format_bytes(self.host)} of the host's memory"

        return line


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
    """Fewest devices of one node that hold it, or smallest change, or if none does, all that save memory; None if it
    was not looked for, or ``fit`` refuses all."""
    checkpoint_bytes: int
    shard_bytes: int | None
    samples_per_second: float | None
    """Of all its devices, while it trains."""
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

    device: str
    device_bytes: int | None
    """None if unknown."""
    members: tuple[MemberPlan, ...]
    jobs: int | None = None
    """Members that ``fit`` trains at a time on this machine, if it was measured; None if all train at once."""

    @property
    def fits(self) -> bool:
        """Whether every member does."""
        return all(member.fits is not False for member in self.members)

    @property
    def totals(self) -> dict[str, float | None]:
        """Hours until the last member ends if all start at once, device-hours and dollars of all.

        On this machine, ``jobs`` members at a time share the hours.
        """
        hours = self._combined("hours", max)
        if self.jobs is not None and hours is not None:
            hours = max(hours, sum(member.hours or 0.0 for member in self.members) / self.jobs)

        return {
            "hours": hours,
            "device_hours": self._combined("device_hours", sum),
            "dollars": self._combined("dollars", sum),
        }

    def _combined(self, figure: str, combine: Callable[[list[float]], float]) -> float | None:
        values = [getattr(member, figure) for member in self.members]
        if None in values:
            return None

        return combine(values)

    def warnings(self) -> Iterator[str]:
        """Say what does not fit, and what would."""
        yield from self.suggestions(fits=False)
        if self.device_bytes and not self.jobs and self.totals["hours"] is None:
            yield (
                f"{self.device}: no hours, as its peak in island.precision is not known; GPUs without bfloat16 units "
                "(T4, V100) need 16-mixed"
            )

    def suggestions(self, *, fits: bool = True) -> Iterator[str]:
        """Say under which settings the members fit that do, or that do not; alike ones share a line."""
        rows = []
        for one in self.members:
            if one.fits is fits and (one.suggestion or not fits):
                line = str(one.suggestion or "no setting of one node does; use a larger device")
                if not fits:
                    line = (
                        f"does not fit: {format_bytes(one.memory.peak)}, with {USABLE:.0%} of the device usable; {line}"
                    )

                rows.append((one.member, line))

        for members, line in merged(rows):
            yield f"{members} on {self.device}: {line}"


def merged(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Join neighbouring rows that differ in their first cell only."""
    for rest, group in groupby(rows, key=lambda row: row[1:]):
        names = [row[0] for row in group]
        label = names[0]
        if len(names) > 1:
            label += f"…{names[-1].rpartition('-')[2]}"

        yield label, *rest


class Planner:
    """Plans members of one experiment; what is counted for one device is reused for the next.

    Args:
        experiment: the experiment.
        members: names.
        data: sizes of its data.
        rates: hours and prices.
        bars: for the members of each device, by default none.

    Raises:
        UserError: a network cannot be built.
    """

    def __init__(
        self, experiment: Experiment, members: Sequence[str], data: Data, rates: Rates, bars: Bars | None = None
    ) -> None:
        self.experiment = experiment
        self.data = data
        self.rates = rates
        self._bars = bars or Bars(show=False)
        self.members = [Run(experiment).resolve(name, data.sizes) for name in members]
        self._costs: dict[str, MemberCost] = {}
        self._speeds: dict[str, float] = {}

    def _cost(self, member: Member) -> tuple[MemberCost, float, float]:
        """Cost, and FLOPs of a sample without and with the backward pass; members of equal costs are counted once."""
        key = _key(member)
        try:
            if key not in self._costs:
                self._costs[key] = MemberCost(member)

            cost = self._costs[key]
            return cost, cost.flops(backward=False, member=member), cost.flops(member=member)
        except UserError as error:  # a size that was assumed may be to blame
            raise UserError(f"{error} (sizes of the data: {self.data.source})") from None

    def on(self, device: str | None) -> Plan:
        """Plan all members on a device.

        Args:
            device: as for ``parse_gpu``; ``here`` to measure this machine; None for a CPU.

        Raises:
            UserError: an unknown device, or a member that cannot be measured.
        """
        jobs = None
        if device == HERE:
            accelerator = self.experiment.island.accelerator
            if resolve_accelerator(accelerator) == "gpu":
                check_devices(accelerator, 1)
                found = Device(torch.cuda.get_device_name(), device_bytes(accelerator), {})
            else:
                free = free_bytes()
                found = Device("this CPU", int(free) if math.isfinite(free) else None, {})

            jobs = default_jobs([member.name for member in self.members], self.experiment)
        elif device is None:
            found = Device("CPU", None, {})
        else:
            found = parse_gpu(device)

        members = tuple(
            self._plan(member, found, is_here=jobs is not None)
            for member in self._bars.track(self.members, description=found.name)
        )
        return Plan(found.name, found.num_bytes, members, jobs)

    def with_suggestions(self, plan: Plan) -> Plan:
        """Look for the fewest devices that hold each member, or for the smallest change; takes some seconds."""
        if plan.device_bytes is None:
            return plan

        gpu = find_gpu(plan.device)
        has_bfloat16 = gpu is None or "bf16" in gpu.peaks
        planned = []
        for one, member in self._bars.track(
            [*zip(plan.members, self.members, strict=True)], description=f"{plan.device}, what fits"
        ):
            cost, _, _ = self._cost(member)
            island = island_of(member.name, self.experiment)
            nodes = sorted({*_NODE, island.devices})
            own = nodes.index(island.devices)
            nodes = nodes[: own + 1] if one.fits else nodes[own:]
            setting = smallest(cost, island, plan.device_bytes, nodes, has_bfloat16=has_bfloat16)
            planned.append(replace(one, suggestion=setting))

        return replace(plan, members=tuple(planned))

    def _plan(self, member: Member, device: Device, *, is_here: bool) -> MemberPlan:
        island = island_of(member.name, self.experiment)
        cost, forward, per_sample = self._cost(member)
        num_bytes = device.num_bytes
        strategy = chosen_strategy(island, cost.state(island), num_bytes or 0)
        checkpoint_bytes = cost.state(island).checkpoint
        memory = cost.memory(island, strategy)
        fits = None
        if num_bytes is not None:
            fits = memory.peak <= USABLE * num_bytes

        rate = None
        peak = device.peak(island.precision)
        if peak is not None:
            work = per_sample
            if island.activation_checkpointing and self.rates.mfu == ASSUMED_MFU:
                work += forward

            rate = self.rates.mfu * peak * 1e12 / work
        elif is_here and fits is not False:
            rate = self._measured_rate(member, island)

        num_samples = member.batch_size * member.train.max_steps
        sample_bytes = self.data.sample_bytes
        hours = device_hours = dollars = shards_in = None
        if rate is not None:
            device_hours = num_samples / rate / 3600
            hours = device_hours / island.num_ranks
            rate *= island.num_ranks
            shards_in = sample_bytes * rate

        price = self.rates.prices.get(device.name)
        if price is not None and device_hours is not None:
            dollars = price * device_hours

        shard_bytes = None
        if self.data.num_samples is not None:
            shard_bytes = sample_bytes * sum(self.data.num_samples[cluster] for cluster in member.clusters)

        return MemberPlan(
            member=member.name,
            parameters=cost.num_parameters,
            flops_per_sample=per_sample,
            flops=num_samples * per_sample,
            devices=island.num_ranks,
            strategy=strategy,
            micro_batch_size=micro_batch_of(member, island)[0],
            memory=memory,
            fits=fits,
            suggestion=None,
            checkpoint_bytes=checkpoint_bytes,
            shard_bytes=shard_bytes,
            samples_per_second=rate,
            hours=hours,
            device_hours=device_hours,
            dollars=dollars,
            shards_in=shards_in,
            checkpoints_out=checkpoint_bytes / (60 * island.publish_every_n_minutes),
        )

    def _measured_rate(self, member: Member, island: IslandConfig) -> float:
        """Samples per second of one device of this machine; equal members are measured once."""
        key = f"{_key(member)} {island}"
        if key not in self._speeds:
            from ddm_lightning.training.measure import samples_per_second

            say(f"{member.name}: measuring a few steps here …")
            num = math.ceil(member.batch_size / island.num_ranks)
            if resolve_accelerator(island.accelerator) == "cpu":
                _, _, per_sample = self._cost(member)
                num = min(num, max(1, int(_CPU_FLOPS / per_sample)))

            self._speeds[key] = samples_per_second(replace(member, batch_size=num), island)

        return self._speeds[key]


def _key(member: Member) -> str:
    """Equal for members whose steps of one shape cost the same."""
    return repr(replace(member, name="", clusters=(), interval=(0.0, 1.0), bucket_shares=()))


def smallest(
    cost: MemberCost, island: IslandConfig, num_bytes: int, nodes: Sequence[int], *, has_bfloat16: bool
) -> Setting | None:
    """Find the cheapest change of settings under which a member fits; if none does, return the last that was tried.

    Smaller micro-batches are tried first, because they cost no FLOPs. Then come activation checkpointing, averages in
    the host's memory, 8-bit moments and bfloat16 weights, each alone before it is tried with those before it.

    Args:
        cost: of the member.
        island: its settings, to change; its micro-batches are the largest.
        num_bytes: memory of a device.
        nodes: numbers of devices to try, the best first.
        has_bfloat16: whether the device has bfloat16 units.

    Returns:
        The settings; None if ``fit`` would refuse all.
    """
    found = None
    most = micro_batch_of(cost.member, island)[0]
    now = (island.precision, cost.member.train.optimizer, island.ema, island.activation_checkpointing)
    choices = product(*(dict.fromkeys((value, _CHEAPER.get(value, value))) for value in now))
    for devices, (precision, optimizer, ema, checkpointing) in product(nodes, choices):
        tried = replace(
            island,
            nodes=1,
            devices=devices,
            strategy="auto",
            precision=precision,
            ema=ema,
            activation_checkpointing=checkpointing,
        )
        changed = cost.with_optimizer(optimizer)
        strategy = chosen_strategy(tried, changed.state(tried), num_bytes)
        # What ``fit`` would refuse.
        by_muon = optimizer == "muon"
        if precision == "bf16-true" and (by_muon or not has_bfloat16):
            continue
        if strategy.startswith("fsdp") and (by_muon or precision == "16-mixed"):
            continue
        if cost.member.batch_size % devices:
            continue

        found = changed, tried, strategy
        size = _largest(*found, most, USABLE * num_bytes)
        if size:
            break

    if found is None:
        return None

    changed, tried, strategy = found
    size = size or 1
    if size < micro_batch_of(cost.member, tried)[0]:
        tried = replace(tried, micro_batch_size=size)

    words = []
    for key, value in vars(tried).items():
        if value != getattr(island, key):
            words.append(f"island.{key}={str(value).lower()}")

    train = changed.member.train
    if train != cost.member.train:
        words.append(f"{cost.member.role.section}.train.optimizer={train.optimizer}")

    memory = changed.memory(tried, strategy)
    return Setting(num_bytes, tried.devices, strategy, size, " ".join(words), memory.peak, memory.host)


def _largest(cost: MemberCost, island: IslandConfig, strategy: str, most: int, room: float) -> int:
    """Largest micro-batch that fits, of at most ``most``: it, or a smaller power of two; 0 if none does."""
    shares = island.devices if strategy.startswith("fsdp") else 1
    if cost.state(island).training / shares > room:
        return 0

    def peak(size: int) -> int:
        return cost.memory(replace(island, micro_batch_size=size), strategy).peak

    most = min(most, micro_batch_of(cost.member, replace(island, micro_batch_size=None))[0])
    at_most = peak(most)
    if at_most <= room:
        return most

    at_least = peak(1)
    if at_least > room:
        return 0

    # Memory is nearly linear in the samples; to count each size would take some seconds.
    each = (at_most - at_least) / (most - 1)
    fitting = 1 + int((room - at_least) / each)
    size = 1 << (fitting.bit_length() - 1)
    while peak(size) > room:
        size //= 2

    return size


def devices_of(experiment: Experiment, asked: Sequence[str] | None, rates: Rates) -> tuple[list[str | None], str]:
    """Devices to plan for, and where they come from."""
    if asked:
        return [*asked], "--device"
    if experiment.island.accelerator == "cpu":
        return [None], "island.accelerator; --device here measures its speed"
    if rates.prices:
        return [*rates.prices], rates.price_source
    if resolve_accelerator("auto") == "gpu":
        name = torch.cuda.get_device_name()
        return [name if find_gpu(name) else HERE], "this machine's"

    source = "assumed, as this machine has no GPU; give --device NAME, or --device here for this machine"
    return [ASSUMED_DEVICE], source


def shortages(experiment: Experiment, members: Sequence[str], devices: Sequence[str]) -> list[str]:
    """Say what does not suit devices that are about to be rented; unknown devices are skipped.

    Raises:
        UserError: as ``Planner``.
    """
    found: list[str] = []
    if devices:
        with Bars(transient=True) as bars:
            planner = Planner(experiment, members, data_of(experiment), rates_of(None, ()), bars)
            for device in devices:
                with suppress(UserError):
                    plan = planner.on(device)
                    if not plan.fits:
                        plan = planner.with_suggestions(plan)

                    found += plan.warnings()

    return found
