"""One training step of a network alone: ours and diffusers' in the same sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.core.devices import autocast
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.blocks import compile_blocks
from ddm_lightning.networks.dit import DiT
from ddm_lightning.training.optimizer import build_optimizer

NUM_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a class-conditional DiT and of its batch."""

    width: int
    depth: int
    num_heads: int
    patch_size: int = 2
    channels: int = 4
    edge: int
    """Height and width of a latent in cells."""
    batch_size: int

    @property
    def x_shape(self) -> tuple[int, int, int]:
        """Shape of one latent."""
        return self.channels, self.edge, self.edge

    def __str__(self) -> str:
        num_tokens = (self.edge // self.patch_size) ** 2
        return f"width {self.width}, depth {self.depth}, {num_tokens} tokens, batch {self.batch_size}"


XL2 = Sizes(width=1152, depth=28, num_heads=16, edge=32, batch_size=32)
"""DiT-XL/2 on latents of 256 x 256 images."""


@dataclass(frozen=True)
class Side:
    """A network and a function that predicts from ``(x_t, t, classes)``."""

    title: str
    network: nn.Module
    predict: Callable[[Tensor, Tensor, Tensor], Tensor]


def our_side(sizes: Sizes) -> Side:
    """Build our DiT."""
    network = DiT(
        x_shape=sizes.x_shape,
        condition=ConditionSpec("class", NUM_CLASSES),
        width=sizes.width,
        depth=sizes.depth,
        num_heads=sizes.num_heads,
        patch_size=sizes.patch_size,
    )

    def predict(x_t: Tensor, t: Tensor, classes: Tensor) -> Tensor:
        predicted: Tensor = network(x_t, t, Condition.of(classes))
        return predicted

    return Side("ours", network, predict)


def diffusers_side(sizes: Sizes, *, nearest: bool) -> Side:
    """Build ``diffusers.DiTTransformer2DModel``, unchanged or as near to ours as it gets.

    Unchanged, every block has its own embedder of time and class, and the GELU is the tanh approximation. With
    ``nearest``, all blocks share the first one's embedder (each still calls it), and the GELU is exact.
    """
    from diffusers import DiTTransformer2DModel

    title = "diffusers"
    activation = "gelu-approximate"
    if nearest:
        title = "diffusers, shared embedder, exact GELU"
        activation = "gelu"

    network = DiTTransformer2DModel(
        num_attention_heads=sizes.num_heads,
        attention_head_dim=sizes.width // sizes.num_heads,
        in_channels=sizes.channels,
        out_channels=sizes.channels,
        num_layers=sizes.depth,
        sample_size=sizes.edge,
        patch_size=sizes.patch_size,
        num_embeds_ada_norm=NUM_CLASSES,
        activation_fn=activation,
    )
    if nearest:
        for block in network.transformer_blocks:
            block.norm1.emb = network.transformer_blocks[0].norm1.emb

    def predict(x_t: Tensor, t: Tensor, classes: Tensor) -> Tensor:
        predicted: Tensor = network(x_t, (1000 * t).long(), classes, return_dict=False)[0]
        return predicted

    return Side(title, network.train(), predict)


class Step:
    """Forward, backward and a step of fused AdamW on fixed random data.

    Args:
        side: the network.
        sizes: sizes of its batch.
        device: training device.
        precision: as ``island.precision``.
        compiled: whether to compile our blocks.
    """

    def __init__(self, side: Side, sizes: Sizes, device: torch.device, precision: str, *, compiled: bool) -> None:
        self.side = side
        self.device = device
        self.precision = precision
        self.network = side.network.to(device)
        if compiled:
            torch.compiler.reset()  # networks share the code of a block, and each shall have kernels for its own sizes
            compile_blocks(self.network)

        self.optimizer = build_optimizer(self.network, TrainConfig(1, sizes.batch_size))
        self.x_t, self.target, self.t = random_batch(sizes.batch_size, sizes.x_shape, device)
        self.classes = torch.arange(sizes.batch_size, device=device) % NUM_CLASSES

    def loss(self) -> Tensor:
        """Compute the loss of the batch."""
        with autocast(self.precision, self.device):
            predicted = self.side.predict(self.x_t, self.t, self.classes)
            return functional.mse_loss(predicted.float(), self.target)

    def take(self) -> None:
        """Take one step."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


def random_batch(num: int, x_shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy samples, targets and times, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    x_t = torch.randn(num, *x_shape, generator=generator)
    target = torch.randn(num, *x_shape, generator=generator)
    t = torch.rand(num, generator=generator)
    return x_t.to(device), target.to(device), t.to(device)
