"""Contract check for plug-in experts, to be called in the tests of a plug-in.

from functools import partial
from ddm_lightning.testing import check_expert

def test_contract() -> None:
    check_expert(partial(MyExpert, width=32), x_shape=(4, 8, 8))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from ddm_lightning.flow.condition import KINDS, Condition, ConditionSpec
from ddm_lightning.flow.prediction import PREDICTIONS

_SPECS = {
    "none": ConditionSpec("none", 0),
    "class": ConditionSpec("class", 5),
    "text": ConditionSpec("text", 6),
    "tokens": ConditionSpec("tokens", 6, length=3),
}
_NUM_ROWS = 4
_NUM_KEPT = 3


def check_expert(
    factory: Callable[..., Any], *, x_shape: tuple[int, int, int] = (3, 8, 8), kinds: Sequence[str] = KINDS
) -> None:
    """Check on the CPU that experts from ``factory`` can be trained, stored and mixed with others.

    Checks the declared prediction, the shape and type of the output, that ``condition=None`` is the null condition in
    every row, that the condition matters, that rows are independent in ``eval`` mode, that a gradient reaches every
    parameter, that one seed gives the same initial weights twice (``torch.empty`` does not), and that ``state_dict``
    alone, through safetensors, rebuilds the expert. Zero initial weights are fine: all weights are perturbed first.
    The global generator is restored.

    Args:
        factory: called as ``factory(x_shape=…, condition=…)``; bind its other parameters with ``functools.partial``.
        x_shape: (channels, height, width) of a sample that the expert supports.
        kinds: kinds of condition that the expert supports.

    Raises:
        AssertionError: one line with the problem and the kind of condition.
    """
    for kind in kinds:
        with torch.random.fork_rng(devices=[]), _context(f"expert for x_shape={x_shape}, condition {kind!r}"):
            torch.manual_seed(0)
            _check(factory, x_shape, _SPECS[kind])


@contextmanager
def _context(what: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error.__cause__


@contextmanager
def _running(what: str) -> Iterator[None]:
    """Turn any error of a plug-in into a line that names the call."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__}: {error}") from error


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _check(factory: Callable[..., Any], x_shape: tuple[int, int, int], spec: ConditionSpec) -> None:
    _check_initial(factory, x_shape, spec)
    expert = _build(factory, x_shape, spec)
    with torch.no_grad():
        for parameter in expert.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    x_t, t = torch.randn(_NUM_ROWS, *x_shape), torch.linspace(0.1, 0.9, _NUM_ROWS)
    condition = _condition(spec)
    _check_gradients(expert, x_t, t, condition)
    expert.eval()
    with torch.no_grad():
        out = _forward(expert, x_t, t, condition)
        _check_output(out, x_t)
        _check_rows(expert, x_t, t, condition, out)
        if condition is not None:
            _check_condition(expert, x_t, t, condition, out)
        _check_state(expert, _build(factory, x_shape, spec), x_t, t, condition, out)


def _build(factory: Callable[..., Any], x_shape: tuple[int, int, int], spec: ConditionSpec) -> nn.Module:
    with _running("the factory"):
        expert = factory(x_shape=x_shape, condition=spec)
    _require(isinstance(expert, nn.Module), f"the factory returns a {type(expert).__name__}, not an nn.Module")
    prediction = getattr(expert, "prediction", None)
    choices = ", ".join(PREDICTIONS)
    _require(prediction in PREDICTIONS, f"its attribute 'prediction' is {prediction!r}, not one of {choices}")
    return expert


def _check_initial(factory: Callable[..., Any], x_shape: tuple[int, int, int], spec: ConditionSpec) -> None:
    """Build twice from one seed; ``torch.empty`` gives NaN the first time."""
    seed, mode = torch.initial_seed(), torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        first = _initial(_build(factory, x_shape, spec))
    finally:
        torch.set_deterministic_debug_mode(mode)
    torch.manual_seed(seed)
    second = _initial(_build(factory, x_shape, spec))
    for name in first.keys() & second.keys():
        same = torch.equal(first[name], second[name])
        _require(same, f"two experts built from one seed differ in {name!r}: initialise it, with torch's generator")


def _initial(expert: nn.Module) -> dict[str, Tensor]:
    return {**dict(expert.named_parameters()), **dict(expert.named_buffers())}


def _condition(spec: ConditionSpec) -> Condition | None:
    """Random condition whose last row is null."""
    if spec.kind == "none":
        return None
    if spec.kind == "class":
        values = torch.randint(spec.size, (_NUM_ROWS,))
    else:
        values = torch.randn(_NUM_ROWS, *((spec.length,) if spec.length else ()), spec.size)
    return Condition(values, torch.arange(_NUM_ROWS) < _NUM_KEPT)


def _forward(expert: nn.Module, x_t: Tensor, t: Tensor, condition: Condition | None) -> Any:
    with _running(f"forward with {'a condition' if condition is not None else 'condition=None'}"):
        return expert(x_t, t, condition)


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether tensors are equal up to the summation order of kernels."""
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


def _check_output(out: Any, x_t: Tensor) -> None:
    _require(isinstance(out, Tensor), f"forward returns a {type(out).__name__}, not a tensor")
    _require(out.shape == x_t.shape, f"forward returns shape {tuple(out.shape)} for x_t of shape {tuple(x_t.shape)}")
    _require(out.dtype == x_t.dtype, f"forward returns {out.dtype} for x_t of {x_t.dtype}")
    _require(bool(out.isfinite().all()), "forward returns numbers that are not finite")


def _check_gradients(expert: nn.Module, x_t: Tensor, t: Tensor, condition: Condition | None) -> None:
    expert.train()
    out = _forward(expert, x_t, t, condition)
    _check_output(out, x_t)
    with _running("backward"):
        (out * torch.randn_like(out)).sum().backward()
    for name, parameter in expert.named_parameters():
        if parameter.requires_grad:
            reached = parameter.grad is not None and bool((parameter.grad != 0).any())
            _require(reached, f"no gradient reaches parameter {name!r}")
            _require(
                parameter.grad is None or bool(parameter.grad.isfinite().all()), f"gradient of {name!r} not finite"
            )


def _check_rows(expert: nn.Module, x_t: Tensor, t: Tensor, condition: Condition | None, out: Tensor) -> None:
    for row in range(_NUM_ROWS):
        chosen = torch.tensor([row])
        part = None if condition is None else condition.rows(chosen)
        alone = _forward(expert, x_t[chosen], t[chosen], part)
        _require(_agree(alone, out[chosen]), "a row's output depends on the other rows of its batch")


def _check_condition(expert: nn.Module, x_t: Tensor, t: Tensor, condition: Condition, out: Tensor) -> None:
    unconditional = _forward(expert, x_t, t, None)
    _require(
        _agree(_forward(expert, x_t, t, condition.null()), unconditional),
        "condition=None differs from a condition whose rows are all null",
    )
    _require(not _agree(out[:_NUM_KEPT], unconditional[:_NUM_KEPT]), "the condition does not change the output")


def _check_state(
    expert: nn.Module, fresh: nn.Module, x_t: Tensor, t: Tensor, condition: Condition | None, out: Tensor
) -> None:
    with _running("state_dict, saved as safetensors,"):
        stored = safetensors.save(expert.state_dict())
    with _running("load_state_dict"):
        fresh.load_state_dict(safetensors.load(stored))
    again = _forward(fresh.eval(), x_t, t, condition)
    _require(_agree(again, out), "an expert rebuilt from the state_dict answers differently: some state is not in it")
