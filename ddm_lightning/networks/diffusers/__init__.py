"""The expert ``diffusers``: transformers of the diffusers library, pretrained or not."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.registry import EXPERTS, require
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import PATHS, Samples, Times
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.diffusers.families import FAMILIES

_BY_NORM = {"ada_norm_zero": "DiTTransformer2DModel", "ada_norm_single": "PixArtTransformer2DModel"}
"""Classes of configurations from before diffusers 0.30, which call both ``Transformer2DModel``."""
_BETAS = (1e-4, 0.02)
_NUM_STEPS = 1000
"""The linear schedule of DDPM (2006.11239), with which DiT and PixArt were trained."""


@EXPERTS.register("diffusers")
class DiffusersTransformer(nn.Module):
    """A transformer of one of the classes in ``FAMILIES``.

    DiT (2212.09748) takes classes or no condition; PixArt-alpha (2310.00426), SD3 (2403.03206), PRX and Lumina-Image
    2.0 (2503.21758) take text tokens. DiT and PixArt predict the noise on the path ``vp``, at DDPM's step of the same
    signal-to-noise ratio; the variance that they may predict, too, is dropped. The others predict the velocity on the
    path ``linear``.

    A dropped class is DiT's own null class. Dropped text is learned, 0 at the start: one token, or for SD3, which has
    no mask, a token in each place. SD3's pooled text vector is that of a condition ``tokens+text``, also learned where
    it is dropped; for ``tokens`` it is a learned projection of the mean token, 0 at the start.

    DiT takes no other shape than ``x_shape``, the others take all heights and widths that their patches divide. PixArt
    stretches its positions over the image, SD3 takes the middle of a table, PRX and Lumina count patches from the top
    left.

    Args:
        x_shape: (channels, height, width) of ``x_t``.
        condition: kind and size of the condition.
        config: content of ``config.json``; by default that of the folder that ``expert.init_from`` names.

    Raises:
        UserError: diffusers is not installed.
        ValueError: no ``config``, or a model that is unknown or takes other inputs.
    """

    wraps = "model."
    """Prefix of the model's own weights, under which ``init_from`` loads those of a folder of diffusers."""
    times: Tensor
    """Time on the path ``vp`` of each of DDPM's steps."""

    def __init__(
        self,
        *,
        x_shape: tuple[int, int, int],
        condition: ConditionSpec,
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if config is None:
            raise ValueError("set expert.init_from to the folder of a transformer, or the param 'config'")

        try:
            build, settings = _resolved(config)
            self.family = FAMILIES[build.__name__]
            self.family.check(settings, x_shape, condition)
            reads_sizes = settings.get("use_additional_conditions", False)
            if reads_sizes is None:
                reads_sizes = settings["sample_size"] == 128

            if reads_sizes:
                raise ValueError(
                    "the model reads resolution and aspect ratio (use_additional_conditions), which shards lack"
                )

            self.model = build(**settings)
        except (UserError, ValueError):
            raise
        except Exception as error:  # noqa: BLE001 (settings may be any JSON)
            raise ValueError(f"config: {type(error).__name__}: {first_line(error)}") from None

        self.prediction = self.family.prediction
        self.path = self.family.path
        self.x_shape = x_shape
        self.null_class = settings.get("num_embeds_ada_norm", 0)
        self.null = None
        if self.family.text:
            num_null = 1 if self.family.mask else condition.length
            self.null = nn.Parameter(torch.zeros(num_null, condition.size))

        self.null_vector = None
        self.pooled = None
        if condition.vector_size:
            self.null_vector = nn.Parameter(torch.zeros(condition.vector_size))
        elif self.family.pooled:
            self.pooled = nn.Linear(condition.size, settings[self.family.pooled])
            nn.init.zeros_(self.pooled.weight)
            nn.init.zeros_(self.pooled.bias)

        for part in self.model.modules():
            if hasattr(part, "dropout_prob"):  # of classes, which training drops already
                part.dropout_prob = 0.0

        kept = (1 - torch.linspace(*_BETAS, _NUM_STEPS, dtype=torch.float64)).cumprod(0)
        alpha = kept.sqrt()
        sigma = (1 - kept).sqrt()
        _, times = PATHS["vp"].from_linear(alpha, sigma / (alpha + sigma))
        self.register_buffer("times", times.float(), persistent=False)

    @staticmethod
    def params_of(config: Any) -> dict[str, Any]:
        """Params for the model that a ``config.json`` describes.

        Raises:
            UserError: diffusers is not installed.
            ValueError: it describes another model.
        """
        build, settings = _resolved(config)
        return {"config": {"_class_name": build.__name__, **settings}}

    @property
    def blocks(self) -> nn.ModuleList:
        """Blocks to compile and shard."""
        return getattr(self.model, self.family.blocks)[self.family.first_block :]

    def forward(self, x_t: Samples, t: Times, condition: Condition | None) -> Samples:
        """The prediction, in the dtype of ``x_t``; ``condition=None`` is null in every row.

        Raises:
            ValueError: the model does not take the shape.
        """
        if x_t.shape[1:] != self.x_shape:
            self.family.check_shape(self.model.config, x_t.shape[1:], self.family.is_square)

        if self.null is None:
            given = self._classes(len(t), condition)
        else:
            given = self._text(self.null, len(t), condition)

        x = x_t.to(next(self.model.parameters()).dtype)
        out = self.family.call(self.model, x, timestep=self._step(t), **given)
        return out[:, : self.x_shape[0]].to(x_t.dtype)

    def _step(self, t: Times) -> Times:
        """The model's own time."""
        if self.path == "linear":
            return self.family.time(t)

        times = self.times.to(t.dtype)
        upper = torch.searchsorted(times, t.contiguous()).clamp(1, _NUM_STEPS - 1)
        below = times[upper - 1]
        above = times[upper]
        return (upper - 1 + (t - below) / (above - below)).clamp(0, _NUM_STEPS - 1)

    def _classes(self, num_rows: int, condition: Condition | None) -> dict[str, Tensor]:
        classes = torch.full((num_rows,), self.null_class, device=self.times.device)
        if condition is not None:
            classes = torch.where(condition.keep, condition.values, classes)

        return {"class_labels": classes}

    def _text(self, null: Tensor, num_rows: int, condition: Condition | None) -> dict[str, Tensor]:
        tokens = null.expand(num_rows, -1, -1)
        is_token = torch.ones(num_rows, len(null), dtype=torch.bool, device=null.device)
        if condition is not None:
            # stored in float16, perhaps
            values = condition.values.to(null.dtype)
            keep = condition.keep[:, None]
            padding = (0, 0, 0, values.shape[1] - len(null))
            tokens = torch.where(keep[:, :, None], values, nn.functional.pad(tokens, padding))
            # Encoders write zeros after a caption's end, and at least one token.
            first = torch.arange(values.shape[1], device=null.device) == 0
            is_token = first | (keep & (values != 0).any(2))

        given = {"encoder_hidden_states": tokens}
        if self.family.mask:
            given[self.family.mask] = is_token

        if self.pooled is not None:
            given["pooled_projections"] = self.pooled(tokens.mean(1))
        elif self.null_vector is not None:
            vectors = self.null_vector.expand(num_rows, -1)
            if condition is not None and condition.vectors is not None:
                vectors = torch.where(condition.keep[:, None], condition.vectors.to(null.dtype), vectors)

            given["pooled_projections"] = vectors

        return given


def _resolved(config: Any) -> tuple[Any, dict[str, Any]]:
    """Class of ``config``, and all arguments of its constructor: keys it does not know are dropped, as diffusers does.

    Raises:
        ValueError: another model's configuration.
    """
    name = config.get("_class_name")
    if name == "Transformer2DModel":
        name = _BY_NORM.get(str(config.get("norm_type")))
    elif name is None and "context_in_dim" in config:  # as Photoroom's converter writes it
        name = "PRXTransformer2DModel"

    if name not in FAMILIES:
        raise ValueError(f"_class_name is {config.get('_class_name')!r}, not one of {', '.join(FAMILIES)}")

    require("expert 'diffusers'", "diffusers", extra="latents")
    build = getattr(importlib.import_module("diffusers"), name)
    settings = {}
    for key, parameter in inspect.signature(build).parameters.items():
        value = config.get(key, parameter.default)
        settings[key] = list(value) if isinstance(value, tuple) else value  # as JSON would return it

    return build, settings
