"""Built-in sources; importing them registers their names."""

from __future__ import annotations

from ddm_lightning.prepare.sources.blobs import Blobs
from ddm_lightning.prepare.sources.digits import Digits
from ddm_lightning.prepare.sources.earthtiles import EarthTiles
from ddm_lightning.prepare.sources.huggingface import HuggingFace
from ddm_lightning.prepare.sources.imagefolder import ImageFolder
from ddm_lightning.prepare.sources.mds import Mds
from ddm_lightning.prepare.sources.openmoji import OpenMoji
from ddm_lightning.prepare.sources.parquet import Parquet
from ddm_lightning.prepare.sources.webdataset import WebDataset

__all__ = [
    "Blobs",
    "Digits",
    "EarthTiles",
    "HuggingFace",
    "ImageFolder",
    "Mds",
    "OpenMoji",
    "Parquet",
    "WebDataset",
]
