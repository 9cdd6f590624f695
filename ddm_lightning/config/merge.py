"""Merging of settings, in which a plug-in with another name keeps none of the previous params."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from ddm_lightning.config.experiment import (
    Experiment,
    ExpertConfig,
    InitConfig,
    IslandConfig,
    PluginConfig,
    RouterConfig,
)

_Section = TypeVar("_Section")


def merge(base: Any, change: Any) -> Any:
    """Merge two configurations, which are of no use afterwards.

    A plug-in with another ``name`` keeps none of the previous params. A list replaces a mapping, and a mapping a list.
    """
    _forget_replaced(base, change)
    return OmegaConf.unsafe_merge(base, change)


def _forget_replaced(merged: DictConfig, change: DictConfig) -> None:
    """Empty the params of each plug-in whose name ``change`` replaces, and mappings that become lists or vice versa."""
    for key in map(str, change):
        # References cannot be followed before everything is merged.
        if OmegaConf.is_interpolation(change, key) or OmegaConf.is_interpolation(merged, key):
            continue

        node = merged.get(key)
        given = change.get(key)
        if {type(node), type(given)} == {DictConfig, ListConfig}:
            merged[key] = None
        if not (isinstance(node, DictConfig) and isinstance(given, DictConfig)):
            continue

        if not issubclass(OmegaConf.get_type(node) or dict, PluginConfig):
            _forget_replaced(node, given)
        elif "name" in given and not OmegaConf.is_missing(node, "name") and given["name"] != node["name"]:
            node["params"] = {}


def expert_section(name: str, experiment: Experiment) -> ExpertConfig:
    """The section ``expert`` for the member ``name``: with its overrides, if it has any."""
    return changed(experiment.expert, experiment.expert.overrides.get(name))


def init_of(section: ExpertConfig | RouterConfig) -> InitConfig | None:
    """``init_from`` of a section in its long form; None for random weights."""
    if section.init_from is None:
        return None

    return InitConfig(**init_keys(section.init_from))


def init_keys(value: Any) -> dict[str, Any]:
    """Value of a key ``init_from`` in its long form."""
    if isinstance(value, dict):
        return {"source": None, **value}

    return {"source": value}


def expert_clusters(experiment: Experiment) -> list[int]:
    """Cluster on which each expert trains: by default its number modulo K."""
    clusters = []
    for number in range(experiment.num_experts):
        cluster = expert_section(f"expert-{number}", experiment).cluster
        if cluster is None:
            cluster = number % experiment.prepare.partition.num_clusters

        clusters.append(cluster)

    return clusters


def island_of(name: str, experiment: Experiment) -> IslandConfig:
    """Settings of the member's island: ``island``, changed by ``islands`` first for its role, then for the member."""
    role = name.partition("-")[0]
    island = changed(experiment.island, experiment.islands.get(role))
    if name == role:
        return island

    return changed(island, experiment.islands.get(name))


def changed(section: _Section, change: Mapping[str, Any] | None) -> _Section:
    """A section with some keys changed."""
    if change is None:
        return section

    return OmegaConf.to_object(  # type: ignore[return-value]  # may be of any dataclass
        merge(OmegaConf.structured(section), OmegaConf.create(dict(change)))
    )
