"""The experiment file.

``load_experiment`` merges a YAML file with overrides, checks types and names against the dataclasses, then refuses
contradictions between fields. Importing this package imports neither torch nor Lightning.
"""

from __future__ import annotations

from ddm_lightning.config.experiment import (
    ConditionConfig,
    Experiment,
    ExpertConfig,
    ImagesConfig,
    IslandConfig,
    PartitionConfig,
    PluginConfig,
    PrepareConfig,
    RouterConfig,
    SampleConfig,
    ShardsConfig,
    TimestepsConfig,
    TrainConfig,
)
from ddm_lightning.config.load import describe, load_experiment, to_dict, to_yaml
from ddm_lightning.config.validate import blamed, check_experiment

__all__ = [
    "ConditionConfig",
    "Experiment",
    "ExpertConfig",
    "IslandConfig",
    "PartitionConfig",
    "ImagesConfig",
    "PluginConfig",
    "PrepareConfig",
    "RouterConfig",
    "SampleConfig",
    "ShardsConfig",
    "TimestepsConfig",
    "TrainConfig",
    "blamed",
    "check_experiment",
    "describe",
    "load_experiment",
    "to_dict",
    "to_yaml",
]
