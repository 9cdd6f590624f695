"""A plug-in in an experiment file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class PluginConfig:
    """A plug-in by name."""

    name: str = MISSING
    """Name under which the plug-in is registered."""
    params: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments, checked against its signature."""
