"""AdamW in less memory: moments in eight bits, weights in bfloat16, or both, by torch's fused kernel.

Weights, gradients and moments are brought to float32 for some parameters at a time. The fused kernel computes the step,
clips it and skips it. Moments then become codes again, and weights are rounded stochastically: a weight in bfloat16 has
three digits, so that rounding to nearest would lose most small steps.
"""

from __future__ import annotations

import itertools
import math
import runpy
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from jaxtyping import BFloat16, Float32, UInt8
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from ddm_lightning.core.devices import by_rows, local
from ddm_lightning.core.registry import file_of
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.networks.blocks import moment_block

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Keys of the moments in a parameter's state, and whether they have a sign."""
_CODES = "_codes"
_SCALES = "_scales"
_STEPS = "rounded_steps"
# Elements that are in float32 at once, unless one parameter has more.
_NUM_AT_ONCE = 1 << 22


class EightBits:
    """Numbers in [-1, 1] as codes of the dynamic map (Dettmers et al., 2110.02861) that torchao has.

    Args:
        signed: whether the map has negative numbers.
        device: of the numbers.
    """

    def __init__(self, signed: bool, device: torch.device) -> None:
        # Importing torchao takes seconds, and tells of kernels that do not load; this file of it needs torch alone.
        of_torchao = runpy.run_path(str(file_of("torchao", "torchao/optim/quant_utils.py")))
        values = torch.tensor(of_torchao["create_dynamic_map"](signed), device="cpu")
        middles = (values[1:] + values[:-1]) / 2
        upper = torch.arange(1 << 16, dtype=torch.int32, device="cpu") << 16
        smallest = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
        first = torch.bucketize(smallest.nan_to_num(), middles, right=True, out_int32=True)
        self.values = values.to(device)
        self._middles = torch.nn.functional.pad(middles, (0, 1), value=math.inf).to(device)
        self._first = first.to(device)
        """Smallest code of a number by its upper 16 bits. Numbers that share them have two codes at most."""

    def encode(self, numbers: Float32[Tensor, "*n"]) -> UInt8[Tensor, "*n"]:
        """Codes of the nearest numbers in the map. Twenty times faster on a CPU than a search for each number."""
        upper = (numbers.flatten().view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        codes = self._first.index_select(0, upper)
        codes += numbers.flatten() >= self._middles.index_select(0, codes)
        return codes.to(torch.uint8).view_as(numbers)

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
    num = len(numbers)
    noise = torch.empty(math.ceil(num / 4), dtype=torch.int64, device=numbers.device)
    noise.random_(-(2**63), None, generator=generator)
    bits = noise.view(torch.uint16)[:num].int().add_(numbers.view(torch.int32)) >> 16
    return bits.to(torch.int16).view(torch.bfloat16).masked_fill_(numbers.isnan(), math.nan)


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

    found_inf: Tensor | None = None
    """1.0, on the device, to skip this step."""
    grad_scale: Tensor | None = None
    """Divisor of all gradients in this step, on the device."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, key: tuple[int, str] = (0, ""), *, eight_bits: bool
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, _STEPS: 0})
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

        for index, group in enumerate(self.param_groups):
            trained = [p for p in group["params"] if p.grad is not None]
            for parameter in trained:
                self._initialise(parameter)

            filled = [p for p in trained if self._local(p).numel()]
            if filled:
                place = _place(filled[0])
                device = self._local(filled[0]).device
                generator = keyed_generator(*self._key, "rounding", group[_STEPS], index, *place, device=device)
                for block, parameters in self._parts(filled):
                    self._update(parameters, group, block, generator)

            group[_STEPS] += 1

        return loss

    def _block(self, parameter: Tensor) -> int | None:
        if self._eight_bits:
            return moment_block(parameter)

        return None

    def _initialise(self, parameter: Tensor) -> None:
        """Give a parameter without state moments of zero."""
        state = self.state[parameter]
        if "step" in state:
            return

        state["step"] = torch.zeros((), device=self._local(parameter).device)
        block = self._block(parameter)
        for moment in _MOMENTS:
            if block is None:
                state[moment] = torch.zeros_like(parameter.detach(), dtype=torch.float32)
            else:
                num_blocks = parameter.numel() // (len(parameter) * block)
                state[moment + _CODES] = by_rows(parameter, parameter.shape, torch.uint8)
                state[moment + _SCALES] = by_rows(parameter, (len(parameter), num_blocks), torch.float32)

    def _parts(self, parameters: list[Tensor]) -> Iterator[tuple[int | None, list[Tensor]]]:
        """Yield blocks and parameters that are updated at once; their weights share a dtype."""
        kinds: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            kinds.setdefault((self._block(parameter), parameter.dtype), []).append(parameter)

        for (block, _), alike in kinds.items():
            ends = itertools.accumulate(self._local(parameter).numel() for parameter in alike)
            numbered = zip(alike, ends, strict=True)
            for _, part in itertools.groupby(numbered, key=lambda pair: (pair[1] - 1) // _NUM_AT_ONCE):
                yield block, [parameter for parameter, _ in part]

    def _update(
        self, parameters: list[Tensor], group: dict[str, Any], block: int | None, generator: torch.Generator
    ) -> None:
        """Take the step of some parameters."""
        states = [self.state[parameter] for parameter in parameters]
        weights = [self._local(parameter) for parameter in parameters]
        exact = [weight.float() for weight in weights]  # float32 weights themselves
        moments: dict[str, list[Tensor]] = {}
        blocks = {}
        codes = {}
        for moment, signed in _MOMENTS.items():
            if block is None:
                moments[moment] = [self._local(state[moment]) for state in states]
                continue

            codes[moment] = self._stacked(states, moment + _CODES, block)
            decoded = self._map(signed, weights[0].device).decode(codes[moment])
            blocks[moment] = decoded.mul_(self._stacked(states, moment + _SCALES, 1))
            moments[moment] = _split(blocks[moment], weights)

        adamw(
            exact,
            [local(parameter.grad).float() for parameter in parameters],  # type: ignore[arg-type]  # they have one
            moments["exp_avg"],
            moments["exp_avg_sq"],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if weights[0].dtype != torch.float32:
            rounded = round_stochastically(torch.cat([weight.flatten() for weight in exact]), generator)
            for weight, new in zip(weights, _split(rounded, weights), strict=True):
                weight.copy_(new)

        del exact
        for moment, decoded in blocks.items():
            scales = decoded.abs().amax(1, keepdim=True).clip_(1e-12)
            new = self._map(_MOMENTS[moment], decoded.device).encode(decoded.div_(scales))
            self._store(states, moment + _SCALES, scales)
            self._store(states, moment + _CODES, new)

    def _stacked(self, states: list[dict[str, Tensor]], key: str, size: int) -> Tensor:
        """Values of all ``states`` under ``key``, in rows of ``size``."""
        return torch.cat([self._local(state[key]).view(-1, size) for state in states])

    def _store(self, states: list[dict[str, Tensor]], key: str, values: Tensor) -> None:
        """Store what ``_stacked`` gives, unless the step is skipped: decoded numbers need not have the same codes."""
        if self.found_inf is not None:
            values = torch.where(self.found_inf == 0, values, self._stacked(states, key, values.shape[1]))

        stored = [self._local(state[key]) for state in states]
        for old, new in zip(stored, _split(values, stored), strict=True):
            old.copy_(new)


def _split(values: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of ``values``, with the shapes of ``like`` in turn."""
    parts = values.view(-1).split([one.numel() for one in like])
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]


def _place(parameter: Tensor) -> list[int]:
    """This rank's place among shards; copies have the same, so that they are rounded alike."""
    if not isinstance(parameter, DTensor):
        return []

    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return [at for at, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_shard()]
