"""From a source of pictures to one folder of shards a cluster.

``prepare`` runs the stages source, features, captions, partition, shards and report. Sources, image
encoders, caption encoders and feature networks are plug-ins, found by name.
"""

from __future__ import annotations

# Imported for their names in the registries.
from ddm_lightning.prepare import encoders, sources
from ddm_lightning.prepare.manifest import HELD_OUT, TRAIN, Manifest, shard_folder
from ddm_lightning.prepare.records import Record
from ddm_lightning.prepare.stages import prepare
from ddm_lightning.prepare.verify import verify_shards

__all__ = [
    "HELD_OUT",
    "TRAIN",
    "Manifest",
    "Record",
    "encoders",
    "prepare",
    "shard_folder",
    "sources",
    "verify_shards",
]
