"""A picture of the clusters: one row each, with some of its samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from ddm_lightning.pictures import labelled_grid, save_png

_COLUMNS = 18
_CELL_PIXELS = 72


def save_cluster_grid(
    path: Path,
    images: UInt8[np.ndarray, "n h w 3"],
    clusters: Int[np.ndarray, "n"],
    num_clusters: int,
    *,
    title: str,
    attribution: str,
    seed: int,
) -> None:
    """Write a PNG with a row of pictures a cluster, drawn at random, labelled with its size and share."""
    rows = []
    for cluster in range(num_clusters):
        members = np.flatnonzero(clusters == cluster)
        shown = np.random.default_rng([seed, cluster]).permutation(members)[:_COLUMNS]
        label = f"cluster {cluster} · {len(members):,} ({len(members) / len(clusters):.1%})"
        rows.append((label, [np.asarray(images[i]) for i in shown]))
    scale = max(1, round(_CELL_PIXELS / images.shape[1]))
    save_png(path, labelled_grid(rows, scale, title, footer=attribution))
