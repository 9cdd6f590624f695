"""What a person wants to know of a stage, besides that it is done."""

from __future__ import annotations

import numpy as np

from ddm_lightning.config import PrepareConfig
from ddm_lightning.files import read_json
from ddm_lightning.prepare.manifest import OUT_OF_CLUSTER
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.verify import num_samples_of
from ddm_lightning.units import amount


def outcome(stage: str, prepared: Prepared, config: PrepareConfig, num_kept: int) -> str:
    """The end of the line that says so; empty for stages of which there is nothing to tell.

    Args:
        stage: its name.
        prepared: the folder, as the stage left it.
        config: what was asked for.
        num_kept: parts that were encoded before.
    """
    if stage == "encode":
        num_parts = len(prepared.parts)
        kept = f", {num_kept:,} of them kept from before" if num_kept else ""
        return f": {num_parts:,} part{'s' * (num_parts != 1)}{kept}"
    if stage == "index":
        index = prepared.index
        causes = ", ".join(f"{cause}: {count:,}" for cause, count in index["broken"].items())
        left_out = f"; left out: {causes}; see {prepared.broken_file}" if causes else ""
        num_without = index["num_without_caption"]
        without = f", {num_without:,} of them without a caption" if num_without else ""
        odd = "".join(f", {count:,} of them {how}" for how, count in index["odd_shapes"].items())
        return f": {index['num_samples']:,} of {index['num_read']:,} samples{without}{odd}{left_out}"
    if stage == "partition":
        sizes = np.bincount(prepared.clusters, minlength=config.partition.num_clusters)
        return f": {len(sizes)} clusters of {sizes.min():,} to {sizes.max():,} samples"
    if stage == "shards":
        size = sum(path.stat().st_size for path in prepared.shards.rglob("*") if path.is_file())
        others = num_samples_of(prepared.shards.glob(f"*/{OUT_OF_CLUSTER}"))
        mixed = f", {others:,} of them once more for another cluster's expert" if others else ""
        return f": {prepared.num_samples:,} samples{mixed}, {amount(size)}"
    if stage == "upload":
        uploaded = read_json(prepared.uploaded_file, "the record of the upload", "run prepare again")["sha256"]
        size = sum((prepared.shards / name).stat().st_size for name in uploaded)
        return (
            f": {len(uploaded)} files, {amount(size)}, each read back; "
            f"islands stream them with island.shards={config.shards.remote}"
        )
    return ""
