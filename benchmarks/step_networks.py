"""One training step of a network by itself: ours, and diffusers' of the same sizes."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from step_clock import Clock, Seconds, now, since, total
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks import DiT, set_attention
from ddm_lightning.training.optimizer import build_optimizer
from ddm_lightning.training.parallel.strategy import compile_blocks

NUM_CLASSES = 10


@dataclass(frozen=True)
class Sizes:
    """A class-conditional DiT and a batch for it."""

    width: int
    depth: int
    num_heads: int
    patch_size: int
    channels: int
    edge: int
    """Height and width of a latent, in cells."""
    batch_size: int

    @property
    def num_tokens(self) -> int:
        """Patches of a latent."""
        return (self.edge // self.patch_size) ** 2

    @property
    def x_shape(self) -> tuple[int, int, int]:
        """Of one latent."""
        return self.channels, self.edge, self.edge

    def __str__(self) -> str:
        return (
            f"width {self.width}, depth {self.depth}, {self.num_heads} heads, {self.num_tokens} tokens, "
            f"batch {self.batch_size}"
        )


@dataclass(frozen=True)
class Side:
    """A network, and how it is called for its prediction at ``(x_t, t, classes)``."""

    title: str
    network: nn.Module
    predict: Callable[[Tensor, Tensor, Tensor], Tensor]

    @property
    def num_parameters(self) -> int:
        """Shared ones count once."""
        return sum(parameter.numel() for parameter in self.network.parameters())


def our_side(sizes: Sizes, attention: str = "auto", wrap: Callable[[nn.Module], nn.Module] | None = None) -> Side:
    """Our DiT, its parts spread over processes by ``wrap``."""
    network = DiT(
        x_shape=sizes.x_shape,
        condition=ConditionSpec("class", NUM_CLASSES),
        width=sizes.width,
        depth=sizes.depth,
        num_heads=sizes.num_heads,
        patch_size=sizes.patch_size,
    )
    set_attention(network, attention)
    wrapped = network if wrap is None else wrap(network)

    def predict(x_t: Tensor, t: Tensor, classes: Tensor) -> Tensor:
        predicted: Tensor = wrapped(x_t, t, Condition.of(classes))
        return predicted

    return Side("ours", wrapped, predict)


def diffusers_side(sizes: Sizes, *, nearest: bool) -> Side:
    """``diffusers.DiTTransformer2DModel``, as it is or with what differs from ours taken away.

    As it is, every block has an embedder of time and class of its own, and the GELU is the tanh approximation; with
    ``nearest`` the blocks share the first one's embedder (each still calls it), and the GELU is the exact one.
    """
    from diffusers import DiTTransformer2DModel

    network = DiTTransformer2DModel(
        num_attention_heads=sizes.num_heads,
        attention_head_dim=sizes.width // sizes.num_heads,
        in_channels=sizes.channels,
        out_channels=sizes.channels,
        num_layers=sizes.depth,
        sample_size=sizes.edge,
        patch_size=sizes.patch_size,
        num_embeds_ada_norm=NUM_CLASSES,
        activation_fn="gelu" if nearest else "gelu-approximate",
    )
    if nearest:
        for block in network.transformer_blocks:
            block.norm1.emb = network.transformer_blocks[0].norm1.emb

    def predict(x_t: Tensor, t: Tensor, classes: Tensor) -> Tensor:
        predicted: Tensor = network(x_t, (1000 * t).long(), classes, return_dict=False)[0]
        return predicted

    title = "diffusers, shared embedder, exact GELU" if nearest else "diffusers"
    return Side(title, network.train(), predict)


def original_side(sizes: Sizes, folder: Path) -> Side:
    """The DiT of its authors, https://github.com/facebookresearch/DiT, checked out at ``folder``.

    Its licence is not for commerce, so nothing here brings it. Weights start where ours do: blocks are the identity.

    Raises:
        UserError: it is not there, or is not what it was.
    """
    path = folder / "models.py"
    spec = importlib.util.spec_from_file_location("original_dit", path)
    try:
        assert spec is not None and spec.loader is not None  # it ends in .py
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        network: nn.Module = module.DiT(
            input_size=sizes.edge,
            patch_size=sizes.patch_size,
            in_channels=sizes.channels,
            hidden_size=sizes.width,
            depth=sizes.depth,
            num_heads=sizes.num_heads,
            num_classes=NUM_CLASSES,
            learn_sigma=False,
        )
    except (OSError, ImportError, AttributeError, TypeError) as error:
        raise UserError(
            f"--original {folder}: {type(error).__name__}: {error}; give a checkout of facebookresearch/DiT, "
            "which needs timm"
        ) from error

    def predict(x_t: Tensor, t: Tensor, classes: Tensor) -> Tensor:
        predicted: Tensor = network(x_t, 1000 * t, classes)
        return predicted

    return Side("the original DiT", network.train(), predict)


def forget_compiled() -> None:
    """Have what is compiled from here on get kernels for its own sizes, as it would have alone.

    All blocks share the code that is compiled: torch would take sizes of two networks for one that varies, with slow
    kernels for any, and refuses many kinds. What was compiled before is compiled once more when it is called.
    """
    torch.compiler.reset()
    torch._dynamo.config.automatic_dynamic_shapes = False


class Timed(ABC):
    """A training step, which takes turns with others."""

    device: torch.device
    network: nn.Module
    optimizer: Optimizer
    num_parts = 1
    """In which the batch goes through the network."""

    @abstractmethod
    def loss(self) -> Tensor:
        """Of a part of the batch: a forward pass."""

    @abstractmethod
    def take(self) -> None:
        """One step."""

    def seconds(self, num_steps: int, clock: Clock = now) -> Seconds:
        """Of one step, on average over ``num_steps``."""
        start = clock()
        for _ in range(num_steps):
            self.take()
        return total([since(start, self.device, clock)], num_steps)


class Step(Timed):
    """Forward, backward and a step of fused AdamW on fixed random data.

    Args:
        side: what is trained.
        sizes: its batch.
        device: where.
        half: whether under bfloat16 autocast.
        compiled: whether our blocks are compiled.
    """

    def __init__(self, side: Side, sizes: Sizes, device: torch.device, *, half: bool, compiled: bool) -> None:
        self.side, self.device, self.half = side, device, half
        self.network = side.network.to(device)
        if compiled:
            forget_compiled()
            compile_blocks(self.network)
        self.optimizer = build_optimizer(self.network, TrainConfig(1, sizes.batch_size))
        generator = torch.Generator().manual_seed(0)
        shape = (sizes.batch_size, *sizes.x_shape)
        self.x_t, self.target = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
        self.t = torch.rand(sizes.batch_size, generator=generator).to(device)
        self.classes = torch.randint(NUM_CLASSES, (sizes.batch_size,), generator=generator).to(device)

    def loss(self) -> Tensor:
        """Of the batch."""
        with torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext():
            predicted = self.side.predict(self.x_t, self.t, self.classes)
            return functional.mse_loss(predicted.float(), self.target)

    def take(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


def in_turn(
    steps: Mapping[str, Timed], num_rounds: int, steps_a_turn: int, clock: Clock = now
) -> dict[str, list[Seconds]]:
    """Seconds a step of each side, one value a round; every second round goes backwards.

    Two turns of each warm up.
    """
    for step in steps.values():
        step.seconds(2 * steps_a_turn, clock)
    found: dict[str, list[Seconds]] = {name: [] for name in steps}
    for number in range(num_rounds):
        for name in list(steps)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(steps[name].seconds(steps_a_turn, clock))
    return found
