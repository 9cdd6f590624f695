"""Merge changes into settings: files and overrides into an experiment, ``expert.overrides`` into its experts."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddm_lightning.config.experiment import Experiment, ExpertConfig, PluginConfig


def merge(base: Any, change: Any) -> Any:
    """Merge two configurations; a plug-in with another ``name`` keeps none of the previous params."""
    _forget_params(base, change)
    return OmegaConf.merge(base, change)


def _forget_params(merged: Any, change: Any) -> None:
    """Empty the params of each plug-in whose name ``change`` replaces."""
    for key in change:
        # Unresolved: references cannot be followed before everything is merged.
        node, given = merged._get_node(key), change._get_node(key)
        if not all(isinstance(one, DictConfig) and not one._is_none() for one in (node, given)):
            continue
        if OmegaConf.get_type(node) is PluginConfig:
            if "name" in given and not OmegaConf.is_missing(node, "name") and given["name"] != node["name"]:
                node["params"] = {}
        else:
            _forget_params(node, given)


def expert_section(name: str, experiment: Experiment) -> ExpertConfig:
    """The section ``expert`` for the member ``name``: with its overrides, if it has any."""
    change = experiment.expert.overrides.get(name)
    if change is None:
        return experiment.expert
    merged = merge(OmegaConf.structured(experiment.expert), OmegaConf.create(change))
    section: ExpertConfig = OmegaConf.to_object(merged)  # type: ignore[assignment]  # may be of any dataclass
    return section
