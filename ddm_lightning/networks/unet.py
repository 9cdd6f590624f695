"""The convolutional expert: the U-Net of DDPM (2006.11239) with the modulated norms of ADM (2105.05233)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import Samples, Times
from ddm_lightning.flow.spec import PREDICTIONS, ConditionSpec
from ddm_lightning.networks.blocks import CrossAttention, SelfAttention
from ddm_lightning.networks.embeddings import Conditioned, ConditionEmbedding, TimestepEmbedding, TwoLayers


def _norm(channels: int) -> nn.GroupNorm:
    """Groups of at least four channels, at most 32: a group of one would lose the channel's mean."""
    return nn.GroupNorm(max(1, math.gcd(channels, 128) // 4), channels)


class UNetBlock(nn.Module):
    """Residual block of two convolutions, then attention. Compiled and sharded as one unit.

    The second norm is scaled and shifted by time and condition (FiLM, 1709.07871).

    Args:
        channels: of the input, without those of ``skip``.
        skip_channels: of ``skip``; 0 for a block without.
        out_channels: of the output.
        features: of the conditioning vector, and of a text token.
        resample: ``down``, ``up`` or empty: halve or double height and width first.
        num_heads: attention heads; 0 for no attention.
        reads_tokens: whether attention reads the text tokens, too.
    """

    def __init__(
        self,
        channels: int,
        skip_channels: int,
        out_channels: int,
        features: int,
        resample: str = "",
        num_heads: int = 0,
        reads_tokens: bool = False,
    ) -> None:
        super().__init__()
        joined = channels + skip_channels
        self.upsample: nn.Module = nn.Identity()
        self.resample: nn.Module = nn.Identity()
        if resample == "up":
            self.upsample = nn.Upsample(scale_factor=2)
            self.resample = nn.Conv2d(channels, channels, 3, padding=1)
        elif resample == "down":
            self.resample = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

        self.norms = nn.ModuleList([_norm(joined), _norm(out_channels)])
        self.first = nn.Conv2d(joined, out_channels, 3, padding=1)
        self.second = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.modulation = nn.Linear(features, 2 * out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if joined != out_channels:
            self.shortcut = nn.Conv2d(joined, out_channels, 1)

        self.attention = None
        if num_heads:
            self.attention_norm = _norm(out_channels)
            self.attention = SelfAttention(out_channels, num_heads, qk_norm=False)

        self.cross_attention = None
        if reads_tokens:
            self.context = nn.Linear(features, out_channels)
            self.cross_attention = CrossAttention(out_channels, num_heads, qk_norm=False)

    def forward(
        self,
        x: Samples,
        conditioning: Float[Tensor, "b features"],
        context: Float[Tensor, "b m features"] | None,
        skip: Float[Tensor, "b s h2 w2"] | None = None,
    ) -> Float[Tensor, "b out h2 w2"]:
        """The features after this block; ``skip`` are those of the way down at the same resolution."""
        x = self.resample(self.upsample(x))
        if skip is not None:
            x = torch.cat([x, skip], dim=1)

        hidden = self.first(functional.silu(self.norms[0](x)))
        shift, scale = self.modulation(conditioning)[:, :, None, None].chunk(2, dim=1)
        hidden = torch.addcmul(shift, self.norms[1](hidden), 1 + scale)
        x = self.shortcut(x) + self.second(functional.silu(hidden))
        if self.attention is None:
            return x

        tokens = self.attention_norm(x).flatten(2).transpose(1, 2)
        attended = self.attention(tokens)
        if self.cross_attention is not None:
            attended = attended + self.cross_attention(tokens, self.context(context))

        return x + attended.transpose(1, 2).unflatten(2, x.shape[2:])


@EXPERTS.register("unet")
class UNet(Conditioned):
    """Predicts the velocity of ``x_t``, or its noise or data, with convolutions.

    Each level halves height and width, and has as many blocks on the way up as on the way down, with a skip connection
    from each. Two blocks with attention form the middle. A text vector or a class modulates the blocks together with
    the time; text tokens are read by the blocks with attention, the middle at least.

    Args:
        x_shape: (channels, height, width) of ``x_t``; height and width in pixels or latent cells.
        condition: kind and size of the condition.
        width: channels of the first level.
        multipliers: channels of each level, as multiples of ``width``.
        num_blocks: blocks of a level, on the way down and on the way up.
        attention: levels whose blocks have attention, counted from 0.
        num_heads: attention heads of a block.
        prediction: output of the network: ``velocity``, ``epsilon`` (the noise) or ``x_0`` (the data).

    Raises:
        ValueError: sizes that do not fit each other. Choices are checked by the registry.
    """

    def __init__(
        self,
        *,
        x_shape: tuple[int, int, int],
        condition: ConditionSpec,
        width: int,
        multipliers: Sequence[int] = (1, 2, 2),
        num_blocks: int = 2,
        attention: Sequence[int] = (),
        num_heads: int = 4,
        prediction: str = "velocity",
    ) -> None:
        super().__init__()
        if width % 2 or min(width, num_blocks, num_heads, *multipliers) < 1 or not multipliers:
            raise ValueError("width must be even, and num_blocks, num_heads and all multipliers at least 1")

        sizes = [width * multiplier for multiplier in multipliers]
        last = len(sizes) - 1
        with_heads = {*attention, last}
        if not with_heads <= {*range(len(sizes))} or any(sizes[level] % num_heads for level in with_heads):
            raise ValueError(
                f"attention = {list(attention)} names levels from 0 to {last}, whose channels "
                f"(and those of the last level) num_heads = {num_heads} must divide"
            )

        self.num_levels = len(sizes)
        self._check_size(x_shape)
        if prediction not in PREDICTIONS:
            raise ValueError(f"prediction = {prediction!r} is none of {', '.join(PREDICTIONS)}")

        self.prediction = prediction
        features = 4 * width
        self.time_embedding = TimestepEmbedding(features)
        self.add_condition(condition, features)

        down = sorted([*range(len(sizes))] * num_blocks)
        levels = [*down, last, last, *reversed(down)]
        self.num_down = len(down)
        self.blocks = nn.ModuleList()
        before = 0
        for index, level in enumerate(levels):
            resample = ""
            if level > before:
                resample = "down"
            elif level < before:
                resample = "up"

            is_up = index >= self.num_down + 2
            is_middle = index >= self.num_down and not is_up
            has_attention = level in attention or is_middle
            block = UNetBlock(
                channels=sizes[before],
                skip_channels=sizes[level] if is_up else 0,
                out_channels=sizes[level],
                features=features,
                resample=resample,
                num_heads=num_heads if has_attention else 0,
                reads_tokens=has_attention and condition.length > 0,
            )
            self.blocks.append(block)
            before = level

        channels = x_shape[0]
        self.stem = nn.Conv2d(channels, sizes[0], 3, padding=1)
        self.final_norm = _norm(sizes[0])
        self.final = nn.Conv2d(sizes[0], channels, 3, padding=1)
        for name, part in self.named_modules():
            if isinstance(part, (TwoLayers, ConditionEmbedding)):
                part.initialise()

            if name.endswith((".second", ".attention.out")) or part is self.final:
                for parameter in part.parameters():  # each residual branch, and the output, is 0 at the start
                    nn.init.zeros_(parameter)

    def _check_size(self, shape: Sequence[int]) -> None:
        height, width = shape[-2:]
        divisor = 2 ** (self.num_levels - 1)
        if height % divisor or width % divisor:
            raise ValueError(f"{self.num_levels} levels need sizes divisible by {divisor}, not {height}x{width}")

    def forward(self, x_t: Samples, t: Times, condition: Condition | None) -> Samples:
        """The prediction, in the dtype of ``x_t``; ``condition=None`` is the learned null in every row.

        Raises:
            ValueError: the levels do not divide the height and width.
        """
        self._check_size(x_t.shape)
        conditioning = self.conditioning(t, condition)
        context = None
        if self.token_embedding is not None:
            context = self.token_embedding(condition, len(t))

        x = self.stem(x_t.to(self.stem.weight.dtype))
        skips: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            skip = skips.pop() if index >= self.num_down + 2 else None
            x = block(x, conditioning, context, skip)
            if index < self.num_down:
                skips.append(x)

        return self.final(functional.silu(self.final_norm(x))).to(x_t.dtype)
