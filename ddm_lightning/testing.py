"""The contract of plug-in experts, for the tests of their authors.

from functools import partial
from ddm_lightning.testing import check_expert

def test_contract() -> None:
    check_expert(partial(MyExpert, width=32), x_shape=(4, 8, 8))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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


class _Batch(NamedTuple):
    """Arguments of ``forward``."""

    x_t: Tensor
    t: Tensor
    condition: Condition | None


def check_expert(
    factory: Callable[..., Any], *, x_shape: tuple[int, int, int] = (3, 8, 8), kinds: Sequence[str] = KINDS
) -> None:
    """Check on a CPU that the experts built by ``factory`` can be trained, stored and mixed with others.

    Requirements:

    - It declares its prediction, and the output has the shape and dtype of ``x_t``.
    - ``condition=None`` equals the null condition in every row, and other conditions change the output.
    - In ``eval`` mode, rows do not depend on each other.
    - A gradient reaches every parameter.
    - Equal seeds give equal initial weights (``torch.empty`` does not).
    - ``state_dict`` alone, stored as safetensors, restores the expert.

    Zero initial weights are fine: the check perturbs all weights first. It leaves the global generator unchanged.

    Args:
        factory: called as ``factory(x_shape=…, condition=…)``; bind other parameters with ``functools.partial``.
        x_shape: (channels, height, width) of a sample.
        kinds: kinds of condition to check.

    Raises:
        AssertionError: one line with the problem and the kind of condition.
    """
    for kind in kinds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                _check(factory, x_shape, _SPECS[kind])
            except AssertionError as error:
                where = f"expert for x_shape={x_shape}, condition {kind!r}"
                raise AssertionError(f"{where}: {error}") from error.__cause__


def _check(factory: Callable[..., Any], x_shape: tuple[int, int, int], spec: ConditionSpec) -> None:
    _check_initial(factory, x_shape, spec)
    expert = _build(factory, x_shape, spec)
    with torch.no_grad():
        for parameter in expert.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    x_t, t = torch.randn(_NUM_ROWS, *x_shape), torch.linspace(0.1, 0.9, _NUM_ROWS)
    batch = _Batch(x_t, t, _condition(spec))
    _check_gradients(expert, batch)
    expert.eval()
    with torch.no_grad():
        out = _forward(expert, batch)
        for row in range(_NUM_ROWS):
            _check_row(expert, batch, torch.tensor([row]), out)
        if batch.condition is not None:
            _check_condition(expert, batch, batch.condition, out)
        _check_state(expert, _build(factory, x_shape, spec), batch, out)


@contextmanager
def _running(call: str) -> Iterator[None]:
    """Turn an exception of a plug-in into one line that names the call."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{call} raises {type(error).__name__}: {error}") from error


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _build(factory: Callable[..., Any], x_shape: tuple[int, int, int], spec: ConditionSpec) -> nn.Module:
    with _running("the factory"):
        expert = factory(x_shape=x_shape, condition=spec)
    _require(isinstance(expert, nn.Module), f"the factory returns a {type(expert).__name__}, not an nn.Module")
    prediction, choices = getattr(expert, "prediction", None), ", ".join(PREDICTIONS)
    _require(prediction in PREDICTIONS, f"its attribute 'prediction' is {prediction!r}, not one of {choices}")
    return expert


def _check_initial(factory: Callable[..., Any], x_shape: tuple[int, int, int], spec: ConditionSpec) -> None:
    """Build twice from one seed; the first time, ``torch.empty`` gives NaN."""
    seed, mode = torch.initial_seed(), torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        first = _build(factory, x_shape, spec)
    finally:
        torch.set_deterministic_debug_mode(mode)
    torch.manual_seed(seed)
    second = _build(factory, x_shape, spec)
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        values = dict(named(second))
        for name, value in named(first):
            same = name not in values or torch.equal(value, values[name])
            _require(same, f"two experts built from one seed differ in {name!r}: initialise it, with torch's generator")


def _condition(spec: ConditionSpec) -> Condition | None:
    """A condition whose last row is null."""
    if spec.kind == "none":
        return None
    if spec.kind == "class":
        values = torch.randint(spec.size, (_NUM_ROWS,))
    else:
        values = torch.randn(_NUM_ROWS, *spec.row_shape)
    return Condition(values, torch.arange(_NUM_ROWS) < _NUM_KEPT)


def _forward(expert: nn.Module, batch: _Batch) -> Tensor:
    """The output, if it has the shape and dtype of ``x_t`` and is finite."""
    with _running(f"forward with {'a condition' if batch.condition is not None else 'condition=None'}"):
        out = expert(*batch)
    shape, dtype = tuple(batch.x_t.shape), batch.x_t.dtype
    _require(isinstance(out, Tensor), f"forward returns a {type(out).__name__}, not a tensor")
    _require(out.shape == shape, f"forward returns shape {tuple(out.shape)} for x_t of shape {shape}")
    _require(out.dtype == dtype, f"forward returns {out.dtype} for x_t of {dtype}")
    _require(bool(out.isfinite().all()), "forward returns numbers that are not finite")
    return out


def _agree(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding: the order of a kernel's sums depends on the batch size."""
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


def _check_gradients(expert: nn.Module, batch: _Batch) -> None:
    out = _forward(expert.train(), batch)
    with _running("backward"):
        (out * torch.randn_like(out)).sum().backward()
    for name, parameter in expert.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros(1) if parameter.grad is None else parameter.grad
            _require(bool((gradient != 0).any()), f"no gradient reaches parameter {name!r}")
            _require(bool(gradient.isfinite().all()), f"gradient of {name!r} not finite")


def _check_row(expert: nn.Module, batch: _Batch, row: Tensor, out: Tensor) -> None:
    condition = None if batch.condition is None else batch.condition.rows(row)
    alone = _forward(expert, _Batch(batch.x_t[row], batch.t[row], condition))
    _require(_agree(alone, out[row]), "a row's output depends on the other rows of its batch")


def _check_condition(expert: nn.Module, batch: _Batch, condition: Condition, out: Tensor) -> None:
    unconditional = _forward(expert, batch._replace(condition=None))
    null = _forward(expert, batch._replace(condition=condition.null()))
    _require(_agree(null, unconditional), "condition=None differs from a condition whose rows are all null")
    _require(not _agree(out[:_NUM_KEPT], unconditional[:_NUM_KEPT]), "the condition does not change the output")


def _check_state(expert: nn.Module, fresh: nn.Module, batch: _Batch, out: Tensor) -> None:
    with _running("state_dict, saved as safetensors,"):
        stored = safetensors.save(expert.state_dict())
    with _running("load_state_dict"):
        fresh.load_state_dict(safetensors.load(stored))
    restored = _forward(fresh.eval(), batch)
    _require(
        _agree(restored, out), "an expert rebuilt from its state_dict answers differently: some state is not in it"
    )
