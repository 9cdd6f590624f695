"""Parts of a source whose samples are numbered: blocks of one size."""

from __future__ import annotations

from ddm_lightning.prepare.records import Part

BLOCK_SIZE = 512


def block_parts(num_samples: int, fingerprint: str, prefix: str = "block") -> list[Part]:
    """Samples 0 to ``num_samples`` - 1 in blocks, the last one shorter.

    A block is named ``<prefix>-<number of its first sample>``, whatever else there is, so that a set that grows at
    its end keeps the parts it had. ``fingerprint`` is of all samples alike, such as a version.
    """
    parts = []
    for start in range(0, num_samples, BLOCK_SIZE):
        stop = min(start + BLOCK_SIZE, num_samples)
        where = {"start": start, "stop": stop}
        parts.append(Part(f"{prefix}-{start:09}", f"{fingerprint}; samples {start} to {stop}", stop - start, where))
    return parts


def block_of(part: Part) -> range:
    """The numbers of the samples in a part of ``block_parts``."""
    return range(part.where["start"], part.where["stop"])
