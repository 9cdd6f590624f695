"""The plug-ins that one experiment names for ``prepare``, built when they are needed."""

from __future__ import annotations

from functools import cached_property, lru_cache
from importlib.metadata import version

from ddm_lightning.config import PluginConfig, PrepareConfig
from ddm_lightning.core.registry import CAPTION_ENCODERS, FEATURES, IMAGE_ENCODERS, SOURCES
from ddm_lightning.encoders.interfaces import CaptionEncoder, Features, ImageEncoder
from ddm_lightning.prepare.records import Source

_COMMON_PACKAGES = ("ddm_lightning", "torch", "numpy", "pillow", "mosaicml-streaming")


class Plugins:
    """Source, encoders and feature network; each is built once, on first use.

    Raises:
        UserError: at first use, for an unknown name, params that it does not take, or a package that is missing.
    """

    def __init__(self, config: PrepareConfig) -> None:
        self.config = config

    @cached_property
    def source(self) -> Source:
        """The data set."""
        source: Source = SOURCES.build(self.config.source.name, self.config.source.params)
        return source

    @cached_property
    def image_encoder(self) -> ImageEncoder:
        """Pictures to ``x_0``."""
        plugin = self.config.image_encoder
        encoder: ImageEncoder = IMAGE_ENCODERS.build(plugin.name, plugin.params)
        return encoder

    @cached_property
    def caption_encoder(self) -> CaptionEncoder | None:
        """Captions to vectors; None when nothing is conditioned on text."""
        plugin = self.config.caption_encoder
        if plugin is None:
            return None
        encoder: CaptionEncoder = CAPTION_ENCODERS.build(plugin.name, plugin.params)
        return encoder

    @cached_property
    def features(self) -> Features:
        """What is clustered."""
        plugin: PluginConfig = self.config.features
        features: Features = FEATURES.build(plugin.name, plugin.params)
        return features

    def all(self) -> list[Source | ImageEncoder | CaptionEncoder | Features]:
        """Every one; building them checks names, parameters and packages."""
        captions = [] if self.caption_encoder is None else [self.caption_encoder]
        return [self.source, self.image_encoder, *captions, self.features]

    def versions(self) -> dict[str, str]:
        """Versions of the packages that shape the result."""
        packages = {name for plugin in self.all() for name in plugin.packages}
        return {name: version(name) for name in sorted({*_COMMON_PACKAGES, *packages})}

    def provenance(self) -> dict[str, dict[str, str]]:
        """Where each network's weights come from; loads what has to be loaded to tell."""
        named = {
            "image_encoder": self.image_encoder,
            "caption_encoder": self.caption_encoder,
            "features": self.features,
        }
        return {name: plugin.provenance() for name, plugin in named.items() if plugin is not None}


@lru_cache(maxsize=1)
def plugins_of(key: str) -> Plugins:
    """The plug-ins of a configuration in JSON, kept by this process from one job to the next."""
    from ddm_lightning.config.load import prepare_from_json

    return Plugins(prepare_from_json(key))
