"""Checks every plug-in that an experiment names, before anything is written."""

from __future__ import annotations

from ddm_lightning.config import Experiment, PluginConfig
from ddm_lightning.errors import UserError
from ddm_lightning.networks import EXPERTS, ROUTERS
from ddm_lightning.prepare.registry import CAPTION_ENCODERS, FEATURES, IMAGE_ENCODERS, SOURCES
from ddm_lightning.registry import Registry


def check_plugins(experiment: Experiment, source: str) -> None:
    """Refuse an unknown name, or params that a plug-in does not take.

    Args:
        experiment: the resolved experiment.
        source: the file it came from, for the error line.

    Raises:
        UserError: naming ``source`` and the key.
    """
    prepare = experiment.prepare
    network = {"x_shape": None, "condition": None}
    named: list[tuple[str, Registry, PluginConfig | None, dict[str, None]]] = [
        ("prepare.source", SOURCES, prepare.source, {}),
        ("prepare.image_encoder", IMAGE_ENCODERS, prepare.image_encoder, {}),
        ("prepare.caption_encoder", CAPTION_ENCODERS, prepare.caption_encoder, {}),
        ("prepare.features", FEATURES, prepare.features, {}),
        ("expert.network", EXPERTS, experiment.expert.network, network),
        ("router.network", ROUTERS, experiment.router.network, {**network, "num_clusters": None}),
    ]
    for key, registry, plugin, context in named:
        if plugin is None:
            continue
        try:
            registry.check(plugin.name, plugin.params, **context)
        except UserError as error:
            raise UserError(f"{source}: key {key!r}: {error}") from None
