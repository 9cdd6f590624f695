"""The expert ``diffusers``: DiT, PixArt and SD3 transformers of the diffusers library, pretrained or not."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import read_json
from ddm_lightning.core.registry import EXPERTS, require
from ddm_lightning.core.weights import read_header
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.flow.path import PATHS, Samples, Times

_DIT, _PIXART, _SD3 = "DiTTransformer2DModel", "PixArtTransformer2DModel", "SD3Transformer2DModel"
_BY_NORM = {"ada_norm_zero": _DIT, "ada_norm_single": _PIXART}
"""Classes of configurations from before diffusers 0.30, which call both ``Transformer2DModel``."""
_BETAS, _NUM_STEPS = (1e-4, 0.02), 1000
"""The linear schedule of DDPM (2006.11239), with which DiT and PixArt were trained."""
_WEIGHTS = "diffusion_pytorch_model"
_REMEDY = "set 'path' to a transformer's folder, written by save_pretrained, such as PIPELINE/transformer"


@EXPERTS.register("diffusers")
class DiffusersTransformer(nn.Module):
    """A ``DiTTransformer2DModel``, ``PixArtTransformer2DModel`` or ``SD3Transformer2DModel``.

    DiT (2212.09748) takes classes or no condition; PixArt-alpha (2310.00426) and SD3 (2403.03206) take text tokens.
    DiT and PixArt predict the noise on the path ``vp``, at DDPM's step of the same signal-to-noise ratio; the variance
    that they may predict, too, is dropped. SD3 predicts the velocity on the path ``linear``, at step 1000·t.

    A dropped class is DiT's own null class; dropped text is learned tokens, 0 at the start. SD3's pooled text vector,
    which our conditions lack, is a learned projection of the mean token, 0 at the start.

    Args:
        x_shape: (channels, height, width) of ``x_t``.
        condition: kind and size of the condition.
        path: folder of ``config.json`` and the initial weights, in safetensors. Artifacts hold ``config`` instead.
        config: content of ``config.json``, for random initial weights.

    Raises:
        UserError: a file is missing, pickled or damaged, or the weights do not fit ``config.json``.
        ValueError: not exactly one of ``path`` and ``config``, or a model that is unknown or takes other inputs.
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
        path: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if (path is None) == (config is None):
            raise ValueError("set one of 'path' and 'config'")
        settings = self.portable({"path": path})["config"] if path is not None else config
        try:
            build, settings = _resolved(settings)
            kind = build.__name__
            _check_fit(kind, settings, x_shape, condition)
            self.model = build(**settings)
        except (UserError, ValueError):
            raise
        except Exception as error:  # noqa: BLE001 (settings may be any JSON)
            raise ValueError(f"config: {type(error).__name__}: {first_line(error)}") from None
        if path is not None:
            _load(self.model, Path(path))
        self.prediction, self.path = ("velocity", "linear") if kind == _SD3 else ("epsilon", "vp")
        self.x_shape = x_shape
        self.null_class = settings.get("num_embeds_ada_norm", 0)
        self.null = None if kind == _DIT else nn.Parameter(torch.zeros(condition.row_shape))
        self.pooled = nn.Linear(condition.size, settings["pooled_projection_dim"]) if kind == _SD3 else None
        for parameter in () if self.pooled is None else self.pooled.parameters():
            nn.init.zeros_(parameter)
        for part in self.model.modules():
            if hasattr(part, "dropout_prob"):  # of classes, which training drops already
                part.dropout_prob = 0.0
        kept = (1 - torch.linspace(*_BETAS, _NUM_STEPS, dtype=torch.float64)).cumprod(0)
        alpha, sigma = kept.sqrt(), (1 - kept).sqrt()
        times = PATHS["vp"].from_linear(alpha, sigma / (alpha + sigma))[1]
        self.register_buffer("times", times.float(), persistent=False)

    @staticmethod
    def portable(params: Mapping[str, Any]) -> dict[str, Any]:
        """Params for an artifact: ``path`` replaced with the ``config`` in that folder.

        Raises:
            UserError: ``config.json`` is missing or damaged.
            ValueError: it describes another model.
        """
        if "path" not in params:
            return dict(params)
        file = Path(str(params["path"])).expanduser() / "config.json"
        build, settings = _resolved(read_json(file, "the model's configuration", _REMEDY, link=True), f"{file}: ")
        others = {key: value for key, value in params.items() if key != "path"}
        return others | {"config": {"_class_name": build.__name__, **settings}}

    @property
    def blocks(self) -> nn.ModuleList:
        """Blocks to compile and shard."""
        return self.model.transformer_blocks

    def forward(self, x_t: Samples, t: Times, condition: Condition | None) -> Samples:
        """The prediction, in the dtype of ``x_t``; ``condition=None`` is null in every row."""
        given = self._classes(len(t), condition) if self.null is None else self._text(self.null, len(t), condition)
        x = x_t.to(self.model.pos_embed.proj.weight.dtype)
        out: Tensor = self.model(x, timestep=self._step(t), **given, return_dict=False)[0]
        return out[:, : self.x_shape[0]].to(x_t.dtype)

    def _step(self, t: Times) -> Times:
        """The model's own time."""
        if self.path == "linear":
            return 1000 * t
        times = self.times.to(t.dtype)
        upper = torch.searchsorted(times, t.contiguous()).clamp(1, _NUM_STEPS - 1)
        below, above = times[upper - 1], times[upper]
        return (upper - 1 + (t - below) / (above - below)).clamp(0, _NUM_STEPS - 1)

    def _classes(self, num_rows: int, condition: Condition | None) -> dict[str, Tensor]:
        null = torch.full((num_rows,), self.null_class, device=self.times.device)
        return {"class_labels": null if condition is None else torch.where(condition.keep, condition.values, null)}

    def _text(self, null: Tensor, num_rows: int, condition: Condition | None) -> dict[str, Tensor]:
        tokens = null.expand(num_rows, -1, -1)
        if condition is not None:  # stored in float16, perhaps
            tokens = torch.where(condition.keep[:, None, None], condition.values.to(null.dtype), tokens)
        pooled = {} if self.pooled is None else {"pooled_projections": self.pooled(tokens.mean(1))}
        return {"encoder_hidden_states": tokens, **pooled}


def _resolved(config: Any, place: str = "") -> tuple[Any, dict[str, Any]]:
    """Class of ``config``, and all arguments of its constructor: keys it does not know are dropped, as diffusers does.

    Raises:
        ValueError: another model's configuration.
    """
    name = config.get("_class_name")
    name = _BY_NORM.get(str(config.get("norm_type"))) if name == "Transformer2DModel" else name
    if name not in (_DIT, _PIXART, _SD3):
        raise ValueError(f"{place}_class_name is {config.get('_class_name')!r}, not {_DIT}, {_PIXART} or {_SD3}")
    require("expert 'diffusers'", "diffusers", extra="latents")
    build = getattr(importlib.import_module("diffusers"), name)
    found = {key: config.get(key, one.default) for key, one in inspect.signature(build).parameters.items()}
    # As JSON would return it.
    return build, {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


def _check_fit(kind: str, settings: Mapping[str, Any], x_shape: tuple[int, int, int], condition: ConditionSpec) -> None:
    """Refuse samples and conditions that the model does not take.

    Raises:
        ValueError: they do not fit.
    """
    channels, patch = settings["in_channels"], settings["patch_size"]
    size = settings["sample_size"]
    if kind == _SD3:
        size = settings["pos_embed_max_size"] * patch
        fits = all(cells % patch == 0 and cells <= size for cells in x_shape[1:])
        wanted = f"({channels}, height, width) of at most {size} and divisible by {patch}"
    else:
        fits, wanted = x_shape[1:] == (size, size), f"({channels}, {size}, {size})"
    if not fits or x_shape[0] != channels:
        raise ValueError(f"the model takes samples of shape {wanted}, not {x_shape}")
    sizes = settings.get("use_additional_conditions")
    if sizes or (sizes is None and kind == _PIXART and size == 128):  # diffusers' default
        raise ValueError("the model reads resolution and aspect ratio (use_additional_conditions), which shards lack")
    given = f"kind {condition.kind!r}, size {condition.size}"
    if kind == _DIT:
        classes = settings["num_embeds_ada_norm"]
        if condition.kind != "none" and (condition.kind != "class" or condition.size > classes):
            raise ValueError(f"the model takes conditions of kind 'class' of at most {classes}, or 'none', not {given}")
        return
    text = settings["joint_attention_dim"] if kind == _SD3 else settings["caption_channels"]
    text = settings["cross_attention_dim"] if text is None else text
    if condition.kind != "tokens" or condition.size != text:
        raise ValueError(f"the model takes conditions of kind 'tokens' of size {text}, not {given}")


def _load(model: nn.Module, folder: Path) -> None:
    """Load the weights in ``folder``; on the meta device compare names and shapes only.

    Raises:
        UserError: files are missing, pickled or damaged, or do not fit the model.
    """
    folder = folder.expanduser()
    files = sorted(folder.glob(f"{_WEIGHTS}-?????-of-?????.safetensors")) or [folder / f"{_WEIGHTS}.safetensors"]
    state: dict[str, Tensor] = {}
    for file in files:
        header = read_header(file, f"{_REMEDY} (safe_serialization=True)", link=True)
        state |= header if next(model.parameters()).is_meta else load_file(file)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(
            f"{folder}: the weights do not fit config.json: {' '.join(str(error).split())[:300]}; copy the model again"
        ) from None
