"""AdamW in less memory: moments in eight bits, weights in bfloat16, or both, by torch's fused kernel.

Weights, gradients and moments are brought to float32 for some parameters at a time. The fused kernel computes the step,
clips it and skips it. Then moments become codes again, and weights bfloat16. Both are rounded stochastically: rounding
to the nearest of few numbers would lose most small steps.
"""

from __future__ import annotations

import itertools
import math
import runpy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import BFloat16, Float32, Int32, UInt8
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from ddm_lightning.core.registry import file_of
from ddm_lightning.core.sharded import by_rows, local
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.cost import NUM_AT_ONCE
from ddm_lightning.networks.blocks import moment_block

_STEPS = "rounded_steps"


class EightBits:
    """Numbers in [-1, 1] as codes of the dynamic map (Dettmers et al., 2110.02861) that torchao has.

    Args:
        signed: whether the map has negative numbers.
        device: of the numbers.
    """

    def __init__(self, signed: bool, device: torch.device) -> None:
        # Importing torchao takes seconds, and tells of kernels that do not load; this file of it needs torch alone.
        of_torchao = runpy.run_path(str(file_of("torchao", "torchao/optim/quant_utils.py")))
        self.values = torch.tensor(of_torchao["create_dynamic_map"](signed), device=device)
        self._above = self.values.roll(-1)
        self._above[-1] = math.inf
        upper = torch.arange(1 << 16, dtype=torch.int32, device=device) << 16
        smallest = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32).nan_to_num()
        self._first = torch.bucketize(smallest, self._above, right=True, out_int32=True)
        """Smallest code of a number by its upper 16 bits. Numbers that share them have two codes at most."""
        if not signed:
            # No second moment becomes 0, as in torchao: beside larger ones in its block, a step would then be tens of
            # times the learning rate.
            self._first.clip_(1)

    def encode(self, numbers: Float32[Tensor, "*n"], generator: torch.Generator) -> UInt8[Tensor, "*n"]:
        """Round to one of the two nearest numbers in the map, to the nearer one more often, so that the mean is exact.

        Rounding to the nearest, as torchao does, loses most changes of second moments: a step changes them by a
        thousandth.
        """
        parts = [self._encode(part, generator) for part in numbers.flatten().split(NUM_AT_ONCE)]
        return torch.cat(parts).view_as(numbers)

    def _encode(self, numbers: Float32[Tensor, " n"], generator: torch.Generator) -> UInt8[Tensor, " n"]:
        # Seven times faster on a CPU than ``torch.bucketize``.
        codes = self._first.index_select(0, (numbers.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
        codes += numbers >= self._above.index_select(0, codes)
        below = self.values.index_select(0, codes)
        gaps = self._above.index_select(0, codes).sub_(below)
        shares = _random_bits(len(numbers), numbers.device, generator) / (1 << 16)
        codes += numbers - below > shares * gaps
        return codes.to(torch.uint8)

    def decode(self, codes: UInt8[Tensor, "*n"]) -> Float32[Tensor, "*n"]:
        """Numbers of the codes."""
        return self.values.index_select(0, codes.flatten().int()).view_as(codes)


def round_stochastically(
    numbers: Float32[Tensor, " n"], generator: torch.Generator | None = None
) -> BFloat16[Tensor, " n"]:
    """Round to one of the two nearest bfloat16 numbers, to the nearer one more often, so that the mean is exact.

    Adding 16 random bits carries into the upper half as often as the lower half says. Infinities, NaN and numbers that
    bfloat16 has stay; beyond its largest number is infinity.
    """
    bits = _random_bits(len(numbers), numbers.device, generator).add_(numbers.view(torch.int32)) >> 16
    return bits.to(torch.int16).view(torch.bfloat16).masked_fill_(numbers.isnan(), math.nan)


def _random_bits(num: int, device: torch.device, generator: torch.Generator | None) -> Int32[Tensor, " num"]:
    """Numbers of 16 random bits."""
    noise = torch.empty(math.ceil(num / 4), dtype=torch.int64, device=device)
    noise.random_(-(2**63), None, generator=generator)
    return noise.view(torch.uint16)[:num].int()


class CompactAdamW(Optimizer):
    """AdamW for weights in float32 or bfloat16, with moments in float32 or, of large matrices, in eight bits.

    A float32 weight with float32 moments is updated as by torch's fused AdamW, to the bit. State is plain tensors:
    moments, or their codes and one scale per ``moment_block``, sharded by rows like the weight.

    Args:
        groups: parameter groups, each with its weight decay.
        lr: learning rate.
        key: seed and names of the training, which key its rounding with the step and the shard.
        eight_bits: whether matrices that have a ``moment_block`` get moments in eight bits.
    """

    _step_supports_amp_scaling = True
    """The gradient scaler of ``16-mixed`` sets ``found_inf`` instead of waiting for it."""
    found_inf: Tensor | None = None
    """1.0, on the device, to skip this step."""
    grad_scale: Tensor | None = None
    """Divisor of all gradients in this step, on the device."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, key: tuple[int, str] = (0, ""), *, eight_bits: bool
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, _STEPS: 0})
        self._key = key
        self._eight_bits = eight_bits
        self._map = cache(EightBits)
        # Asking DTensors for their shards at each step takes long.
        self._local = cache(local)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments, codes and averages in their own dtypes; torch's would convert them to the weights'."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, values in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = {key: value.to(parameter.device) for key, value in values.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; if ``found_inf`` is 1, change neither weights nor moments. The host does not wait."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        first = self.param_groups[0]["params"][0]
        place: list[int] = []
        if isinstance(first, DTensor):
            # Shards lie along the last dimension; copies, along another, are rounded alike.
            place = [first.device_mesh.get_local_rank(-1)]

        number = self.param_groups[0][_STEPS]
        generator = keyed_generator(*self._key, "rounding", number, *place, device=first.device)
        for group in self.param_groups:
            for block, part in self._parts(group["params"]):
                self._update(part, group, block, generator)

            group[_STEPS] += 1

        return loss

    def _block(self, parameter: Tensor) -> int:
        """Size of the blocks of a parameter's moments; 0 for moments in float32."""
        if self._eight_bits:
            return moment_block(parameter) or 0

        return 0

    def _parts(self, parameters: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield parameters that are updated at once, and the size of their blocks."""
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        trained.sort(key=self._block)
        ends = itertools.accumulate(self._local(parameter).numel() for parameter in trained)
        numbered = zip(trained, ends, strict=True)
        for (block, _), part in itertools.groupby(numbered, lambda one: (self._block(one[0]), one[1] // NUM_AT_ONCE)):
            yield block, [parameter for parameter, _ in part]

    def _update(self, parameters: list[Tensor], group: dict[str, Any], block: int, generator: torch.Generator) -> None:
        """Take the step of some parameters."""
        for parameter in parameters:
            self._initialise(parameter, block)

        states = [self.state[parameter] for parameter in parameters]
        weights = [self._local(parameter) for parameter in parameters]
        moments = partial(self._moments, states, block, generator)
        with moments("exp_avg") as first, moments("exp_avg_sq") as second:
            exact = [weight.float() for weight in weights]  # float32 weights themselves
            adamw(
                exact,
                [local(parameter.grad).float() for parameter in parameters],  # type: ignore[arg-type]  # they have one
                first,
                second,
                [],
                [state["step"] for state in states],
                fused=True,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=1e-8,
                maximize=False,
            )
            if weights[0].dtype != torch.float32:
                _copy(round_stochastically(torch.cat([one.flatten() for one in exact]), generator), weights)

            del exact

    def _initialise(self, parameter: Tensor, block: int) -> None:
        """Give a parameter without state moments of zero."""
        state = self.state[parameter]
        if "step" in state:
            return

        state["step"] = torch.zeros((), device=parameter.device)
        for moment in ("exp_avg", "exp_avg_sq"):
            if block:
                scales = (len(parameter), parameter.numel() // len(parameter) // block)
                state[f"{moment}_codes"] = by_rows(parameter, parameter.shape, torch.uint8)
                state[f"{moment}_scales"] = by_rows(parameter, scales, torch.float32)
            else:
                state[moment] = torch.zeros_like(parameter.detach(), dtype=torch.float32)

    @contextmanager
    def _moments(
        self, states: list[dict[str, Tensor]], block: int, generator: torch.Generator, name: str
    ) -> Iterator[list[Tensor]]:
        """Yield moments in float32, to be changed in place; codes are decoded, and encoded again afterwards."""
        if not block:
            yield [self._local(state[name]) for state in states]
            return

        codes = [self._local(state[f"{name}_codes"]) for state in states]
        scales = [self._local(state[f"{name}_scales"]) for state in states]
        old_codes = torch.cat([one.view(-1, block) for one in codes])
        old_scales = torch.cat([one.view(-1, 1) for one in scales])
        eight = self._map(name == "exp_avg", old_codes.device)
        numbers = eight.decode(old_codes).mul_(old_scales)
        yield _split(numbers, codes)
        new_scales = numbers.abs().amax(1, keepdim=True).clip_(1e-12)
        new_codes = eight.encode(numbers.div_(new_scales), generator)
        if self.found_inf is not None:  # decoded numbers need not have the codes that they were decoded from
            counts = self.found_inf == 0
            new_codes = torch.where(counts, new_codes, old_codes)
            new_scales = torch.where(counts, new_scales, old_scales)

        _copy(new_codes, codes)
        _copy(new_scales, scales)


def _split(values: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of ``values``, with the shapes of ``like`` in turn."""
    parts = values.view(-1).split([one.numel() for one in like])
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]


def _copy(values: Tensor, into: list[Tensor]) -> None:
    for old, new in zip(into, _split(values, into), strict=True):
        old.copy_(new)
