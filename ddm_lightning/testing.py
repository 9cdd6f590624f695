"""Contracts of plug-ins, for the tests of their authors.

A check takes a factory, called without arguments unless it says otherwise (bind params with ``functools.partial``). It
raises ``AssertionError``, one line with the problem, and leaves the global generator unchanged.

from functools import partial
from ddm_lightning.testing import check_expert

def test_contract() -> None:
    check_expert(partial(MyExpert, width=32), x_shape=(4, 8, 8))
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import jaxtyping
import numpy as np
import torch
from safetensors import torch as safetensors
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from ddm_lightning.config.experiment import LoraConfig, SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOLVERS
from ddm_lightning.core.sharded import local
from ddm_lightning.encoders.interfaces import ImageEncoder
from ddm_lightning.ensemble.routing import Batch, Strategy
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import Samples, Times, expand_rows
from ddm_lightning.flow.solvers import Solver
from ddm_lightning.flow.spec import KINDS, PREDICTIONS, ConditionSpec
from ddm_lightning.flow.timesteps import sampling_times
from ddm_lightning.networks.blocks import compile_blocks
from ddm_lightning.networks.lora import adapt, adaptable, merged
from ddm_lightning.prepare.records import BrokenSample, Record, Source
from ddm_lightning.training.ema import check_float32
from ddm_lightning.training.parallel import shard_blocks

_SPECS = {
    "none": ConditionSpec("none", 0),
    "class": ConditionSpec("class", 5),
    "text": ConditionSpec("text", 6),
    "tokens": ConditionSpec("tokens", 6, length=3),
    "tokens+text": ConditionSpec("tokens+text", 6, length=3, vector_size=5),
}
_NUM_ROWS = 4
_NUM_KEPT = 3
_NUM_CLUSTERS = 3


def check_expert(
    factory: Callable[..., Any], *, x_shape: tuple[int, int, int] = (3, 8, 8), kinds: Sequence[str] = KINDS
) -> None:
    """Check on a CPU that the experts built by ``factory`` can be trained, stored and mixed with others.

    Requirements:

    - It declares its prediction, and the output has the shape and dtype of ``x_t``.
    - ``condition=None`` equals the null condition in every row. Other conditions and other times change the output.
    - In ``eval`` mode, rows do not depend on each other. ``x_t``, ``t`` and the condition stay as they are.
    - A gradient reaches every parameter.
    - Equal seeds give equal initial weights (``torch.empty`` does not).
    - Its weights are float32, and ``state_dict`` alone, stored as safetensors, restores the expert.
    - Compiled block by block and sharded by FSDP2, it has the same gradients (for the last kind).
    - In ``eval`` mode, LoRA adapters act as their merged weights (for the last kind, if peft is installed).
    - It keeps all this for samples of twice the width, or refuses them with an error, best a ``ValueError`` with the
      reason. ``prepare.images.buckets`` needs experts and routers that take other shapes than ``x_shape``.

    Zero initial weights are fine: the check perturbs all weights first.

    Args:
        factory: called as ``factory(x_shape=…, condition=…)``; bind other parameters with ``functools.partial``.
        x_shape: (channels, height, width) of a sample.
        kinds: kinds of condition to check.
    """
    _check_networks("expert", factory, x_shape, kinds)


def check_router(
    factory: Callable[..., Any], *, x_shape: tuple[int, int, int] = (3, 8, 8), kinds: Sequence[str] = KINDS
) -> None:
    """Check on a CPU that the routers built by ``factory`` can be trained, stored and used in an ensemble.

    The requirements are those of ``check_expert``, for logits [b, K] instead of a prediction.

    Args:
        factory: called as ``factory(x_shape=…, condition=…, num_clusters=…)``.
        x_shape: (channels, height, width) of a sample.
        kinds: kinds of condition to check.
    """
    _check_networks("router", partial(factory, num_clusters=_NUM_CLUSTERS), x_shape, kinds, (_NUM_CLUSTERS,))


def _check_networks(
    role: str,
    factory: Callable[..., Any],
    x_shape: tuple[int, int, int],
    kinds: Sequence[str],
    out_shape: tuple[int, ...] = (),
) -> None:
    """``out_shape`` is that of a row's output; empty for that of ``x_t``."""
    wide = (*x_shape[:2], 2 * x_shape[2])
    for kind in kinds:
        with _checking(f"{role} for x_shape={x_shape}, condition {kind!r}"):
            build = partial(_built, partial(factory, x_shape=x_shape, condition=_SPECS[kind]), nn.Module)
            network = _built_twice(build)
            prediction = getattr(network, "prediction", None)
            assert role == "router" or prediction in PREDICTIONS, (
                f"its attribute 'prediction' is {prediction!r}, not one of {', '.join(PREDICTIONS)}"
            )
            check_float32(network)
            condition = _condition(_SPECS[kind])
            x_t = torch.randn(_NUM_ROWS, *x_shape)
            _check_outputs(network, build, x_t, condition, out_shape or x_shape, kind == kinds[-1])
            with _checking(f"samples of shape {wide}"):
                x_t = torch.randn(_NUM_ROWS, *wide)
                try:
                    with torch.inference_mode():  # what it then keeps must do for training, too
                        network(x_t, torch.rand(_NUM_ROWS), condition)
                except Exception:  # noqa: BLE001
                    continue

                _check_outputs(network, build, x_t, condition, out_shape or wide, False)


@contextmanager
def _checking(what: str) -> Iterator[None]:
    """Turn any failure into one line that begins with ``what``; leave the global generator unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            yield
        except Exception as error:
            problem = " ".join(str(error).split())[:500]
            if not isinstance(error, AssertionError | UserError):
                problem = f"raises {type(error).__name__}: {problem}"

            raise AssertionError(f"{what}: {problem}") from error


def _built(factory: Callable[[], Any], kind: Any) -> Any:
    built = factory()
    assert isinstance(built, kind), f"the factory returns a {type(built).__name__}, which is no {kind.__name__}"
    return built


def _built_twice(build: Callable[[], nn.Module]) -> nn.Module:
    """Compare two networks built from one seed; for the first, ``torch.empty`` gives NaN."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        first = build()
    finally:
        torch.set_deterministic_debug_mode(mode)

    torch.manual_seed(0)
    second = build()
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        for (name, value), (_, again) in zip(named(first), named(second), strict=True):
            problem = f"two networks built from one seed differ in {name!r}: initialise it with torch's generator"
            assert torch.equal(value, again), problem

    return second


def _condition(spec: ConditionSpec) -> Condition | None:
    """A condition whose last row is null."""
    if spec.kind == "none":
        return None

    if spec.kind == "class":
        values = torch.randint(spec.size, (_NUM_ROWS,))
    else:
        values = torch.randn(_NUM_ROWS, *spec.row_shape)

    vectors = None
    if spec.vector_size:
        vectors = torch.randn(_NUM_ROWS, spec.vector_size)

    return Condition(values, torch.arange(_NUM_ROWS) < _NUM_KEPT, vectors)


def _check_outputs(
    network: nn.Module,
    build: Callable[[], nn.Module],
    x_t: Tensor,
    condition: Condition | None,
    out_shape: tuple[int, ...],
    whole: bool,
) -> None:
    """Check gradients, rows, condition and state of a network, and training and adapters for a ``whole`` check.

    ``build`` builds others alike.
    """
    t = torch.linspace(0.1, 0.9, _NUM_ROWS)
    given = [x_t, t]
    if condition is not None:
        given.append(condition.values)

    before = [value.clone() for value in given]

    def forward(network: nn.Module, condition: Condition | None, rows: slice = slice(None)) -> Tensor:
        out = network(x_t[rows], t[rows], None if condition is None else condition.rows(rows))
        _check_output(out, x_t.new_empty(len(t[rows]), *out_shape))
        return out

    def rebuilt() -> nn.Module:
        fresh = build()
        fresh.load_state_dict(safetensors.load(safetensors.save(network.state_dict())))
        return fresh

    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))

    out = forward(network.train(), condition)
    (out * torch.randn_like(out)).sum().backward()
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            assert gradient is not None and (gradient != 0).any(), f"no gradient reaches parameter {name!r}"
            assert gradient.isfinite().all(), f"gradient of {name!r} not finite"

    network.eval()
    with torch.no_grad():
        out = forward(network, condition)
        assert all(map(torch.equal, given, before)), "it changes x_t, t or the condition, which other members read"
        assert not _agree(network(x_t, t.flip(0), condition), out), "t does not change the output"
        alone = forward(network, condition, slice(1, 2))
        assert _agree(alone, out[1:2]), "a row's output depends on the other rows of its batch"
        if condition is not None:
            unconditional = forward(network, None)
            null = forward(network, condition.null())
            assert _agree(null, unconditional), "condition=None differs from a condition whose rows are all null"
            assert not _agree(out[:_NUM_KEPT], unconditional[:_NUM_KEPT]), "the condition does not change the output"

        assert _agree(forward(rebuilt().eval(), condition), out), (
            "a network rebuilt from its state_dict answers differently: some state is not in it"
        )

    if whole:
        # A compiler cannot trace run-time checks of shapes.
        with mock.patch.object(jaxtyping.config, "jaxtyping_disable", True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check_on_island(rebuilt, partial(forward, condition=condition))


def _check_on_island(rebuilt: Callable[[], nn.Module], run: Callable[[nn.Module], Tensor]) -> None:
    """Check the gradients of a network that is compiled and sharded, and that adapters act as merged weights."""

    def gradients(network: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)  # of dropout
        run(network.train()).square().mean().backward()
        return [local(parameter.grad) for parameter in network.parameters() if parameter.grad is not None]

    expected = gradients(rebuilt())
    network = rebuilt()
    store = distributed.HashStore()  # type: ignore[attr-defined]  # public, but not in ``__all__``
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with _checking("compiled and sharded"):
            compile_blocks(network, "eager")  # makes graphs, and needs no C++ compiler
            shard_blocks(network, init_device_mesh("cpu", (1,)))
            assert all(map(_agree, gradients(network), expected)), "its gradients are others"
    finally:
        distributed.destroy_process_group()

    network = rebuilt()
    layers = adaptable(network)
    if layers and find_spec("peft"):
        with _checking("with LoRA adapters"), torch.no_grad():
            adapt(network, LoraConfig(2, None, layers), network.state_dict())
            for parameter in network.parameters():
                nn.init.normal_(parameter, std=0.3)

            merged_network = rebuilt()
            merged_network.load_state_dict(merged(network))
            assert _agree(run(network.eval()), run(merged_network.eval())), (
                "it answers otherwise than with merged weights in eval mode: it reads weights past their layers"
            )


def _check_output(out: Any, like: Tensor) -> None:
    assert isinstance(out, Tensor), f"forward returns a {type(out).__name__}, not a tensor"
    assert out.shape == like.shape, f"forward returns shape {tuple(out.shape)} instead of {tuple(like.shape)}"
    assert out.dtype == like.dtype, f"forward returns {out.dtype} for x_t of {like.dtype}"
    assert out.isfinite().all(), "forward returns numbers that are not finite"


def _agree(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding: the order of a kernel's sums depends on the batch size."""
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


class _Answers(nn.Module):
    """Expert or router that answers with a function of ``x_t``."""

    prediction = "x_0"

    def __init__(self, answer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x_t: Tensor, _t: Tensor, _condition: Condition | None) -> Tensor:
        return self.answer(x_t)


def check_strategy(factory: Callable[[], Any]) -> None:
    """Check on a CPU a routing strategy that ``factory`` builds.

    Weights must be at least 0, sum to 1, depend on their own row alone and permute with the experts. Samples must be
    finite and independent of their batch, for each solver that it takes, with one expert and with three.
    """
    with _checking("strategy"):
        strategy: Strategy = _built(factory, Strategy)
        known = SOLVERS.names()
        assert set(strategy.solvers) <= set(known), f"solvers must be some of {', '.join(known)}"
        for num_clusters in (1, 3):
            if type(strategy).weights is not Strategy.weights:
                _check_weights(strategy, num_clusters)

            for solver in strategy.solvers or known:
                _check_samples(strategy, num_clusters, solver)


def _check_weights(strategy: Strategy, num_clusters: int) -> None:
    probabilities = (3 * torch.randn(6, num_clusters)).softmax(1)
    probabilities[0] = torch.eye(num_clusters)[0]
    weights = strategy.weights(probabilities.clone())
    alone = strategy.weights(probabilities[2:3].clone())
    order = torch.arange(num_clusters).roll(1)
    permuted = strategy.weights(probabilities[:, order])
    _check_output(weights, probabilities)
    assert (weights >= 0).all(), "a weight is negative"
    assert _agree(weights.sum(1), torch.ones(6)), "weights of a row do not sum to 1"
    assert _agree(alone, weights[2:3]), "a row's weights depend on the other rows of its batch"
    assert _agree(permuted, weights[:, order]), "weights depend on the order of the experts"


def _check_samples(strategy: Strategy, num_clusters: int, solver: str) -> None:
    experts = [_Answers(partial(torch.full_like, fill_value=k + 1.0)) for k in range(num_clusters)]
    router = None
    if num_clusters > 1 and strategy.needs_router:
        router = _Answers(lambda x_t: x_t.flatten(1).mean(1, keepdim=True) * torch.tensor([[1.0, -1.0, 0.5]]))

    ensemble = Ensemble(experts, router, [1 / num_clusters] * num_clusters)

    def samples(*numbers: int) -> Tensor:
        batch = Batch(ensemble, None, [(number,) for number in numbers], (1, 4, 4), 0, SampleConfig())
        return strategy.generate(batch, sampling_times(4), SOLVERS.build(solver, {}))

    whole = samples(*range(4))
    _check_output(whole, torch.empty(4, 1, 4, 4))
    assert _agree(samples(2), whole[2:3]), "a sample depends on the other samples of its batch"


def check_solver(factory: Callable[[], Any]) -> None:
    """Check on a CPU a solver that ``factory`` builds.

    Requirements, on the exact velocity of Gaussian data of mean 1 and std 0.5:

    - It asks for velocities at times in (0, 1], one per row, and keeps the dtype of x.
    - It comes to the data: 64 steps leave an error in mean and std of at most 0.05.
    - Rows do not depend on each other.
    - It draws noise if and only if ``is_stochastic``, and none for a step to 0.
    - It calls ``on_step`` after each step, or once at the end, and goes on with the result.
    """
    with _checking("solver"):
        solver: Solver = _built(factory, Solver)
        num_steps = 64
        x_1 = torch.randn(500, 2)
        drawn = torch.randn(num_steps, 500, 2)
        x_1 = (x_1 - x_1.mean(0)) / x_1.std(0)
        asked: set[int] = set()

        def velocity(x_t: Samples, t: Times) -> Samples:
            assert t.shape == (len(x_t),) and ((t > 0) & (t <= 1)).all(), f"asks for a velocity at t = {t}"
            time = expand_rows(t, x_t)
            variance = 0.25 * (1 - time) ** 2 + time**2
            return (time - 0.25 * (1 - time)) / variance * (x_t - (1 - time)) - 1

        def solve(rows: slice) -> Tensor:
            def noise(step: int) -> Tensor:
                asked.add(step)
                return drawn[step, rows]

            return solver.solve(velocity, x_1[rows], sampling_times(num_steps), noise)

        whole = solve(slice(None))
        _check_output(whole, x_1)
        mean_error = float((whole.mean(0) - 1).abs().max())
        std_error = float((whole.std(0) - 0.5).abs().max())
        problem = f"mean and std of the samples are wrong by {mean_error:.3f} and {std_error:.3f}"
        assert max(mean_error, std_error) <= 0.05, problem
        assert _agree(solve(slice(3, 5)), whole[3:5]), "a row depends on the other rows of its batch"
        ended: list[float] = []

        def replaced(_: int, s: float, x_s: Samples) -> Samples:
            ended.append(s)
            return x_s if s else x_s + 1

        end = solver.solve(velocity, x_1, sampling_times(num_steps), drawn.__getitem__, replaced)
        reached = sampling_times(num_steps)[1:].tolist()
        assert ended in (reached, reached[-1:]), f"calls on_step after {len(ended)} steps, not {num_steps} or the last"
        assert torch.equal(end, whole + 1), "does not go on with the result of on_step, or its steps change with it"
        num_expected = num_steps - 1 if solver.is_stochastic else 0
        assert asked == set(range(num_expected)), f"draws noise for {len(asked)} steps, not {num_expected}"


def check_source(factory: Callable[[], Any]) -> None:
    """Check a source that ``factory`` builds: stable parts, and samples with unique keys, right types and labels.

    Samples must be the same at each reading. Reads every sample twice, so give it a small data set.
    """
    with _checking("source"):
        source = _built(factory, Source)
        again = _built(factory, Source)
        parts = list(source.parts())
        assert parts == list(again.parts()), "two calls of parts differ"
        assert parts and len({part.name for part in parts}) == len(parts), "no parts, or two of one name"
        keys: set[str] = set()
        for part in parts:
            found = list(source.read(part))
            repeated = list(again.read(part))
            where = f"part {part.name!r}"
            assert part.num_samples in (None, len(found)), f"{where} has {len(found)} samples, not num_samples"
            assert list(map(_content, found)) == list(map(_content, repeated)), f"two reads of {where} differ"
            for one in found:
                assert one.key not in keys, f"{where}: key {one.key!r} comes twice"
                keys.add(one.key)
                if isinstance(one, BrokenSample):
                    continue

                is_rgb = one.image.dtype == np.uint8 and one.image.ndim == 3 and one.image.shape[2] == 3
                assert is_rgb, f"{where}: image of {one.key!r} is not uint8 [h, w, 3]"
                assert 0 <= one.label < source.num_classes, f"{where}: label of {one.key!r} is no class"
                assert isinstance(one.caption, str), f"{where}: caption of {one.key!r} is no text"


def _content(one: Record | BrokenSample) -> dict[str, Any]:
    return {**vars(one), "image": getattr(one, "image", np.empty(0)).tobytes()}


def check_encoder(factory: Callable[[], Any], *, image_size: int = 32) -> None:
    """Check an image encoder that ``factory`` builds: shapes, type, equal bytes for equal images, and ``decode``.

    An image's encoding must not depend on the others of its batch.

    Args:
        factory: see above.
        image_size: height and width of images that the encoder can take.
    """
    with _checking(f"image encoder for images of {image_size} pixels"):
        encoder = _built(factory, ImageEncoder)
        again = _built(factory, ImageEncoder)
        assert encoder.stores in ("x_0", "posterior"), f"stores = {encoder.stores!r} is not x_0 or posterior"
        images = np.random.default_rng(0).integers(0, 256, (3, image_size, image_size, 3), dtype=np.uint8)
        shape = encoder.x_shape(image_size)
        stored = encoder.encode(images)
        num_channels = shape[0]
        if encoder.stores == "posterior":  # mean and std
            num_channels *= 2

        expected = (3, num_channels, *shape[1:])
        assert stored.shape == expected, f"encode returns shape {stored.shape}, x_shape asks for {expected}"
        assert str(stored.dtype) == encoder.dtype, f"encode returns {stored.dtype}, dtype says {encoder.dtype}"
        is_same = stored.tobytes() == again.encode(images).tobytes()
        assert is_same, "two encoders give different bytes for the same images"
        alone = encoder.encode(images[:1])
        problem = "an image's encoding depends on the other images of its batch"
        assert np.allclose(alone, stored[:1], 1e-2, 1e-2), problem
        decoded = encoder.decode(torch.zeros(3, *shape))
        problem = f"decode returns {decoded.dtype} {decoded.shape}, not uint8 {images.shape}"
        assert decoded.dtype == np.uint8 and decoded.shape == images.shape, problem
