"""Index of the usable samples: not broken, finite, and with a unique key."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt64

from ddm_lightning.core.columns import Strings
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write, atomic_write_json
from ddm_lightning.prepare.encode import RECORDS, check_broken
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.records import Broken

Dropped = dict[int, dict[int, str]]
"""Cause by row, by number of the part."""


def write_index(prepared: Prepared, groups: Collection[str], max_bad_fraction: float, captions_used: bool) -> None:
    """Write ``index.json`` (samples, counts by cause, dropped rows) and ``broken.jsonl`` (each broken sample).

    Args:
        prepared: folder with encoded parts.
        groups: groups of columns in use. Failures in others, left by an earlier configuration, are ignored.
        max_bad_fraction: largest allowed fraction of broken samples.
        captions_used: whether a sample with an unreadable caption is broken; else its caption is empty.

    Raises:
        UserError: too many samples are broken, none is left, or parts differ in image size.
    """
    states = [state[RECORDS] for state in prepared.states]
    sizes = {state["picture_size"]: number for number, state in enumerate(states) if state["picture_size"]}
    if len(sizes) > 1:
        several = ", ".join(f"{size} pixels in {prepared.parts[number].name!r}" for size, number in sizes.items())
        raise UserError(f"the source has images of several sizes ({several}); set prepare.pictures.size")
    dropped: Dropped = {}
    for number, state in enumerate(prepared.states):
        unfit = {row: cause for name in groups for row, cause in state[name].get("unfit", {}).items()}
        if captions_used:
            unfit |= state[RECORDS].get("unread_captions", {})
        if unfit:
            dropped[number] = {int(row): cause for row, cause in unfit.items()}
    _drop_duplicates(prepared, dropped)

    counts, odd_shapes = Counter[str](), Counter[str]()
    for state in states:
        counts.update(state["broken"])
        odd_shapes.update(state.get("odd_shapes", {}))
    counts.update(cause for rows in dropped.values() for cause in rows.values())
    num_read = sum(state["num_read"] for state in states)
    num_samples = sum(state["num_rows"] for state in states) - sum(map(len, dropped.values()))

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in _broken(prepared, dropped))

    atomic_write(prepared.broken_file, write)
    check_broken(counts, num_read, max_bad_fraction, prepared.broken_file, enough=1)
    if num_samples == 0:
        raise UserError("the source has no usable samples; fix prepare.source")
    found = {
        "num_read": num_read,
        "num_samples": num_samples,
        "num_without_caption": _num_without_caption(prepared, dropped),
        "picture_size": next(iter(sizes)),
        "odd_shapes": odd_shapes,
        "broken": dict(sorted(counts.items())),
        "dropped": {str(number): sorted(rows) for number, rows in sorted(dropped.items())},
    }
    atomic_write_json(prepared.index_file, found)


def _num_without_caption(prepared: Prepared, dropped: Dropped) -> int:
    num_empty = 0
    for number in prepared.full_parts:
        sizes = Strings(prepared.part_folder(number) / RECORDS, "captions").num_bytes()
        num_empty += int(np.count_nonzero(np.delete(sizes, list(dropped.get(number, {}))) == 0))
    return num_empty


def _drop_duplicates(prepared: Prepared, dropped: Dropped) -> None:
    """Drop all but the first usable sample of each key."""
    if not prepared.full_parts:
        return
    rows = prepared.rows(RECORDS, "key_hash", unusable=True)
    hashes: UInt64[np.ndarray, "n"] = rows[:]
    start_of = dict(zip(prepared.full_parts, rows.starts.tolist(), strict=False))
    fit = np.ones(len(hashes), bool)
    for number, unfit in dropped.items():
        fit[start_of[number] + np.array(list(unfit))] = False
    places = np.flatnonzero(fit)
    order = places[hashes[places].argsort(kind="stable")]
    same = hashes[order[1:]] == hashes[order[:-1]]
    # Compare the keys behind equal hashes: 64 bits may collide.
    places = np.unique(np.concatenate([order[1:][same], order[:-1][same]]))
    first_of: dict[tuple[int, str], int] = {}
    for place, key in zip(places.tolist(), prepared.texts("keys", unusable=True).take(places), strict=True):
        if first_of.setdefault((int(hashes[place]), key), place) != place:
            number = prepared.full_parts[int(np.searchsorted(rows.starts, place, side="right")) - 1]
            dropped.setdefault(number, {})[place - start_of[number]] = "duplicate key"


def _broken(prepared: Prepared, dropped: Dropped) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(prepared.parts):
        folder = prepared.part_folder(number) / RECORDS
        with (folder / "broken.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield {"part": part.name, **json.loads(line)}
        if number in dropped:
            rows = sorted(dropped[number])
            for row, key in zip(rows, Strings(folder, "keys")[np.array(rows)], strict=True):
                yield {"part": part.name, **asdict(Broken(key, dropped[number][row]))}
