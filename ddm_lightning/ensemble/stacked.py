"""Experts of one architecture in one batch: stacked weights, evaluated by ``vmap``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from ddm_lightning.core.errors import UserError
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import PATHS, Samples, Times, to_velocity


class Stack:
    """The weights of K experts as one tensor each; the experts' own become views of it, which takes no more memory.

    Args:
        experts: networks of one architecture on one device.
        paths: path of each.

    Raises:
        UserError: architectures or paths differ.
    """

    def __init__(self, experts: Sequence[nn.Module], paths: Sequence[str]) -> None:
        recipes = [(_recipe(expert), path) for expert, path in zip(experts, paths, strict=True)]
        for k, recipe in enumerate(recipes):
            if recipe != recipes[0]:
                problem = f"expert-{k} differs from expert-0 in its architecture, prediction or path"
                raise UserError(f"sample.stacked = true: {problem}; set sample.stacked=false")
        self._expert, self._path = experts[0], PATHS[paths[0]]
        self._prediction, self._path_name = str(experts[0].prediction), paths[0]
        self._state = stack_module_state(list(experts))
        for k, expert in enumerate(experts):
            for stacked, own in zip(self._state, (expert.named_parameters(), expert.named_buffers()), strict=True):
                for name, tensor in own:
                    tensor.data = stacked[name].detach()[k]

    def velocities(
        self, groups: Sequence[Int[Tensor, " _"]], x_t: Samples, t: Times, condition: Condition | None
    ) -> Float[Tensor, "K m *shape"]:
        """Compute each expert's velocity on its group of rows, filled up to the largest group with any row."""
        rows = pad_sequence(list(groups), batch_first=True)
        values = () if condition is None else (condition.values[rows], condition.keep[rows])
        # Of torch's attention kernels for CPUs, vmap knows this one only.
        with sdpa_kernel(SDPBackend.MATH) if x_t.device.type == "cpu" else nullcontext():
            velocities: Tensor = vmap(self._velocity)(self._state, x_t[rows], t[rows], *values)
        return velocities

    def _velocity(
        self,
        state: tuple[dict[str, Any], dict[str, Any]],
        x_t: Samples,
        t: Times,
        values: Tensor | None = None,
        keep: Bool[Tensor, " b"] | None = None,
    ) -> Samples:
        condition = None if values is None or keep is None else Condition(values, keep)
        x_tau, tau = self._path.from_linear(x_t, t)
        predicted = functional_call(self._expert, state, (x_tau, tau, condition))
        return to_velocity(predicted, x_tau, tau, self._prediction, self._path_name)


def _recipe(expert: nn.Module) -> list[object]:
    """All that an expert computes with but the values of its tensors: modules, their plain attributes, shapes."""
    plain = (int, float, str, bool, tuple, type(None))
    return [
        *((type(part), {k: v for k, v in vars(part).items() if isinstance(v, plain)}) for part in expert.modules()),
        *((name, tensor.shape, tensor.dtype) for name, tensor in expert.state_dict().items()),
    ]
