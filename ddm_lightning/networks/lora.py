"""LoRA adapters (Hu et al., 2106.09685) on a frozen network, by the library peft (extra ``lora``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ddm_lightning.config.experiment import LoraConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import require
from ddm_lightning.core.weights import save_weights

_NAME = "default"
"""What peft calls the adapter within the network, which has only one."""
_FROZEN = "frozen_weights"


def adaptable(network: nn.Module) -> list[str]:
    """Names of the linear and convolutional layers on which an adapter acts.

    It would not on a projection that ``nn.MultiheadAttention`` reads past its layer, nor on a weight that is computed
    from others (weight norm). Nor does peft take every rank for grouped convolutions.
    """
    names = []
    for name, part in network.named_modules():
        is_layer = isinstance(part, nn.Linear | nn.Conv2d) and not isinstance(part, NonDynamicallyQuantizableLinear)
        has_weight = "weight" in dict(part.named_parameters(recurse=False))
        if is_layer and has_weight and getattr(part, "groups", 1) == 1:
            names.append(name)

    return names


def adapt(network: nn.Module, lora: LoraConfig, base: Mapping[str, Tensor]) -> None:
    """Freeze the weights ``base`` in a network, and add adapters to it, in place.

    Frozen weights become buffers outside of ``state_dict``, so they are not trained, averaged or saved. Parameters that
    ``base`` lacks are trained with the adapters.

    Args:
        network: takes the values of ``base``.
        lora: rank, alpha and layers. The adapters start as zero.
        base: weights by their names in ``network``.

    Raises:
        UserError: peft is not installed, there is no such layer, or ``base`` does not fit.
    """
    config = _of_peft(lora)
    own = network.state_dict()
    layers = adaptable(network)
    from peft import inject_adapter_in_model

    for name, value in base.items():
        if name not in own or own[name].shape != value.shape:
            raise UserError(f"the frozen base does not fit the network at {name!r}; take the base of this network")

    chosen: list[str] = []
    for target in lora.target_modules or [""]:
        found = [re.escape(name) for name in layers if f".{name}".endswith(f".{target}")]
        if not found:
            known = dict.fromkeys(re.sub(r".*\.\d+\.(?=\D)", "", name) for name in layers)
            raise UserError(
                f"lora.target_modules: no layer that takes adapters ends in {target!r}; "
                f"such layers are {', '.join(known)}"
            )

        chosen += found

    config.target_modules = "|".join(chosen)
    # In eval mode, the fused path of nn.TransformerEncoderLayer reads weights past their layers.
    torch.backends.mha.set_fastpath_enabled(False)
    inject_adapter_in_model(config, network, _NAME)
    network.requires_grad_(True)  # peft freezes what it has not added
    for name, value in base.items():
        layer, leaf = _place(network, name)
        delattr(layer, leaf)
        layer.register_buffer(leaf, own[name].detach().copy_(value), persistent=False)

    vars(network)[_FROZEN] = list(base)


def frozen(network: nn.Module) -> dict[str, Tensor]:
    """Weights that ``adapt`` has frozen, by the names they had before; empty for other networks."""
    return {name: getattr(*_place(network, name)) for name in vars(network).get(_FROZEN, ())}


def merged(network: nn.Module) -> dict[str, Tensor]:
    """Weights ``W + (alpha / rank)·B·A`` with which the network without adapters computes what this one does."""
    from peft.tuners.lora import LoraLayer

    weights = frozen(network)
    for name, value in network.state_dict().items():
        if ".lora_" not in name:
            weights[name.replace(".base_layer.", ".")] = value

    for name, layer in network.named_modules():
        if isinstance(layer, LoraLayer):
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + layer.get_delta_weight(_NAME)

    return weights


def write_peft(folder: Path, lora: LoraConfig, state: Mapping[str, Tensor], inner: str = "") -> None:
    """Write adapters as peft reads them, and those of a model of diffusers as diffusers does, too.

    The scale ``alpha / rank`` is within ``lora_B``, and the written alpha is the rank: readers of weights alone take
    the scale for 1.

    Args:
        folder: exists.
        lora: as in ``adapt``.
        state: ``state_dict`` of the adapted network; entries that are no adapters are skipped.
        inner: what the names of diffusers' model within it begin with; empty for other networks.
    """
    config = _of_peft(lora)
    files = {"adapter_model.safetensors": "base_model.model"}
    if inner:
        files["pytorch_lora_weights.safetensors"] = "transformer"

    for file, model in files.items():
        adapters = {}
        for name, value in state.items():
            if ".lora_B." in name:
                value = value * (config.lora_alpha / config.r)
            if ".lora_" in name:
                theirs = name.removeprefix(inner).replace(f".{_NAME}.", ".")
                adapters[f"{model}.{theirs}"] = value

        save_weights(folder / file, adapters, str(folder))

    config.lora_alpha = config.r
    config.save_pretrained(str(folder))


def _of_peft(lora: LoraConfig) -> Any:
    require("key 'expert.network.lora'", "peft", extra="lora")
    import peft

    alpha = lora.rank if lora.alpha is None else lora.alpha
    return peft.LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=list(lora.target_modules))


def _place(network: nn.Module, name: str) -> tuple[Any, str]:
    """Layer that has a weight, within that of peft if there is one, and the weight's name there."""
    place, _, leaf = name.rpartition(".")
    layer = network.get_submodule(place)
    return getattr(layer, "base_layer", layer), leaf
