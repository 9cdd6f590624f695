"""Classes of diffusers' transformers: what each predicts and takes, and how it is called.

Another class is one more entry in ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from ddm_lightning.flow.path import Samples, Times
from ddm_lightning.flow.spec import ConditionSpec

Settings: TypeAlias = Mapping[str, Any]
"""Arguments of a model's constructor."""
_LONGEST_AXIS = 1 << 16
TextTokens: TypeAlias = Float[Tensor, "b m size"]


def _lumina2(
    model: Any,
    x: Samples,
    timestep: Times,
    encoder_hidden_states: TextTokens,
    encoder_attention_mask: Bool[Tensor, "b m"],
) -> Tensor:
    """Call a Lumina-2 and negate its output, which points from noise to data.

    Its own ``forward`` packs each row to the caption's length, which it reads from the device in every call: nothing
    could be counted without data. Here captions stay padded; positions and masks give the same answer.
    """
    edge = model.config.patch_size
    length = encoder_hidden_states.shape[1]
    patches = x.unflatten(3, (-1, edge)).unflatten(2, (-1, edge)).permute(0, 2, 4, 3, 5, 1)  # b rows columns p p c
    rows, columns = patches.shape[1:3]
    # Axes of the rotary positions: place in the caption, row, column. An image stands behind its caption.
    words = functional.pad(torch.arange(length, device=x.device)[:, None], (0, 2)).expand(len(x), -1, -1)
    cells = torch.cartesian_prod(torch.arange(rows, device=x.device), torch.arange(columns, device=x.device))
    behind = encoder_attention_mask.sum(1)[:, None, None].expand(-1, len(cells), 1)
    places = torch.cat([words, torch.cat([behind, cells.expand(len(x), -1, -1)], dim=2)], dim=1)
    angles = []
    for axis, table in enumerate(model.rope_embedder.freqs_cis):
        angles.append(table.to(x.device, torch.complex64)[places[:, :, axis]])

    rotary = torch.cat(angles, dim=2)
    mask = functional.pad(encoder_attention_mask, (0, len(cells)), value=True)

    time, text = model.time_caption_embed(x, timestep, encoder_hidden_states)
    image = model.x_embedder(patches.flatten(3).flatten(1, 2))
    for layer in model.context_refiner:
        text = layer(text, encoder_attention_mask, rotary[:, :length])

    for layer in model.noise_refiner:
        image = layer(image, None, rotary[:, length:], time)

    joint = torch.cat([text, image], dim=1)
    for layer in model.layers:
        joint = layer(joint, mask, rotary, time)

    out = model.norm_out(joint, time)[:, length:].unflatten(2, (edge, edge, -1)).unflatten(1, (rows, columns))
    return -out.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


@dataclass(frozen=True)
class Family:
    """One class. As it is: predicts the velocity at t, and takes images of any size."""

    text: tuple[str, ...] = ()
    """Settings that may hold the size of a text token, the first one set counts; none if the model takes classes."""
    mask: str | None = None
    """Argument that tells the caption's tokens from its padding."""
    pooled: str | None = None
    """Setting with the size of the pooled text vector."""
    blocks: str = "transformer_blocks"
    """The model's blocks, to compile and to shard."""
    first_block: int = 0
    """The first block to compile and to shard.

    FSDP2 gathers a block's weights for its forward pass only, so a block into which the model reaches is skipped.
    """
    prediction: str = "velocity"
    path: str = "linear"
    time: Callable[[Times], Times] = lambda t: t
    """The model's own time on the path ``linear``. On ``vp`` it is a step of DDPM."""
    has_one_size: bool = False
    """Whether ``x_shape`` must have the setting ``sample_size``."""
    is_square: bool = False
    """Whether images of another shape than ``x_shape`` are refused."""
    largest: Callable[[Settings], int] = lambda _: _LONGEST_AXIS
    """Largest height and width, in cells of ``x_t``."""
    most_tokens: Callable[[Settings], int] = lambda _: _LONGEST_AXIS
    call: Callable[..., Tensor] = lambda model, x, **given: model(x, **given, return_dict=False)[0]
    """Gives the prediction for a model, ``x_t``, ``timestep`` and the arguments of the condition."""

    def check_shape(self, settings: Settings, x_shape: Sequence[int], has_one_size: bool) -> None:
        """Refuse samples that a model does not take, or those of another than its one size.

        Raises:
            ValueError: they do not fit.
        """
        channels = settings["in_channels"]
        divisor = settings["patch_size"]
        largest = self.largest(settings)
        if has_one_size:
            divisor = largest = settings["sample_size"]

        _, height, width = x_shape
        if x_shape[0] != channels or height % divisor or width % divisor or max(height, width) > largest:
            raise ValueError(
                f"the model takes samples of shape ({channels}, height, width), both divisible by {divisor} and at "
                f"most {largest}, not {tuple(x_shape)}"
            )

    def check(self, settings: Settings, x_shape: tuple[int, int, int], condition: ConditionSpec) -> None:
        """Refuse samples and conditions that a model does not take.

        Raises:
            ValueError: they do not fit.
        """
        if max(settings.get("axes_lens") or [0]) > _LONGEST_AXIS:
            raise ValueError(f"axes_lens is more than {_LONGEST_AXIS}")

        self.check_shape(settings, x_shape, self.has_one_size)
        if self.text:
            size = next(settings[key] for key in self.text if settings[key] is not None)
            most = self.most_tokens(settings)
            wanted = f"'tokens' of size {size}, at most {most}"
            vector = 0
            if self.pooled:
                vector = settings[self.pooled]
                wanted += f", or 'tokens+text' with a vector of size {vector}"

            fits = condition.size == size and 0 < condition.length <= most and condition.vector_size in (0, vector)
        else:
            size = settings["num_embeds_ada_norm"]
            wanted = f"'class' of at most {size}, or 'none'"
            fits = condition.kind == "none" or (condition.kind == "class" and condition.size <= size)

        if not fits:
            given = ", ".join(f"{name} {value!r}" for name, value in vars(condition).items() if value)
            raise ValueError(f"the model takes conditions of kind {wanted}, not {given}")


FAMILIES = {
    # DiT's output layer takes the embedding of the time from within its first block. It makes a square of all patches:
    # of 2 x 8, without an error, 4 x 4.
    "DiTTransformer2DModel": Family(prediction="epsilon", path="vp", has_one_size=True, is_square=True, first_block=1),
    "PixArtTransformer2DModel": Family(
        prediction="epsilon",
        path="vp",
        has_one_size=True,
        text=("caption_channels", "cross_attention_dim"),
        mask="encoder_attention_mask",
    ),
    "SD3Transformer2DModel": Family(
        time=lambda t: 1000 * t,
        text=("joint_attention_dim",),
        pooled="pooled_projection_dim",
        largest=lambda settings: settings["pos_embed_max_size"] * settings["patch_size"],
    ),
    "PRXTransformer2DModel": Family(text=("context_in_dim",), mask="attention_mask", blocks="blocks"),
    "Lumina2Transformer2DModel": Family(
        time=lambda t: 1 - t,  # 1 is data
        text=("cap_feat_dim",),
        mask="encoder_attention_mask",
        blocks="layers",
        largest=lambda settings: min(settings["axes_lens"][1:]) * settings["patch_size"],
        most_tokens=lambda settings: settings["axes_lens"][0] - 1,
        call=_lumina2,
    ),
}
"""Name of a class in diffusers -> how it is used."""
