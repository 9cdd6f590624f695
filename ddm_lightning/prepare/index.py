"""Which samples can be used: not the broken ones, nor those that encode to nonsense, nor a key's second bearer."""

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
from ddm_lightning.prepare.encode import RECORDS
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.records import Broken

# Before as many samples were read, a few broken ones are no fraction to stop at.
_ENOUGH = 1000


def write_index(prepared: Prepared, groups: Collection[str], max_bad_fraction: float, captions_used: bool) -> None:
    """``index.json`` (samples, counts by cause, rows left out) and ``broken.jsonl`` (each broken sample).

    Args:
        prepared: whose parts are encoded.
        groups: the groups of columns in use; what failed in another, left by an earlier configuration, is no matter.
        max_bad_fraction: how large a part of the samples may be broken.
        captions_used: whether a sample whose caption cannot be read is broken, or has none.

    Raises:
        UserError: too many samples are broken, none is left, or pictures differ in size from part to part.
    """
    sizes = {state[RECORDS]["picture_size"]: number for number, state in enumerate(prepared.states)}
    sizes.pop(0, None)  # of parts without a picture
    if len(sizes) > 1:
        several = ", ".join(f"{size} pixels in {prepared.parts[number].name!r}" for size, number in sizes.items())
        raise UserError(f"the source has pictures of several sizes ({several}); set prepare.pictures.size")
    dropped: dict[int, dict[int, str]] = {}
    for number, state in enumerate(prepared.states):
        unfit = {row: cause for name in groups for row, cause in state[name].get("unfit", {}).items()}
        if captions_used:
            unfit |= state[RECORDS].get("unread_captions", {})
        if unfit:
            dropped[number] = {int(row): cause for row, cause in unfit.items()}
    _drop_duplicates(prepared, dropped)

    counts: Counter[str] = Counter()
    odd_shapes: Counter[str] = Counter()
    for state in prepared.states:
        counts.update(state[RECORDS]["broken"])
        odd_shapes.update(state[RECORDS].get("odd_shapes", {}))
    counts.update(cause for rows in dropped.values() for cause in rows.values())
    num_read = sum(state[RECORDS]["num_read"] for state in prepared.states)
    num_samples = sum(state[RECORDS]["num_rows"] for state in prepared.states) - sum(map(len, dropped.values()))

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as lines:
            for entry in _broken(prepared, dropped):
                lines.write(json.dumps(entry, ensure_ascii=False) + "\n")

    atomic_write(prepared.broken_file, write)
    check_broken(dict(counts), num_read, max_bad_fraction, prepared.broken_file, enough=1)
    if num_samples == 0:
        raise UserError("the source yields no samples; mend prepare.source")
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


def _num_without_caption(prepared: Prepared, dropped: dict[int, dict[int, str]]) -> int:
    number_of = 0
    for number in prepared.full_parts:
        sizes = Strings(prepared.part_folder(number) / RECORDS, "captions").num_bytes()
        number_of += int(np.count_nonzero(np.delete(sizes, list(dropped.get(number, {}))) == 0))
    return number_of


def check_broken(
    counts: dict[str, int], num_read: int, max_bad_fraction: float, listed: Path, enough: int = _ENOUGH
) -> None:
    """Refuse to go on when too many samples are broken.

    Args:
        counts: broken samples by cause.
        num_read: samples read, broken ones included.
        max_bad_fraction: how large a part of them may be broken.
        listed: file in which broken samples are listed, a JSON object a line.
        enough: samples that have to be read before the fraction counts.

    Raises:
        UserError: too many are broken; the line counts them by cause.
    """
    num_broken = sum(counts.values())
    if num_read >= enough and num_broken > max_bad_fraction * num_read:
        causes = ", ".join(f"{cause}: {count}" for cause, count in sorted(counts.items(), key=lambda item: -item[1]))
        raise UserError(
            f"{listed}: {num_broken} of {num_read} samples cannot be used ({causes}), more than "
            f"prepare.max_bad_fraction = {max_bad_fraction:g} allows; mend the source or raise it{_first(listed)}"
        )


def _first(listed: Path) -> str:
    """The first broken sample, as an example."""
    with listed.open(encoding="utf-8") as lines:
        found = json.loads(next(lines, "{}"))
    detail = f" ({found['detail']})" if found.get("detail") else ""
    return f". For example {found['key']!r}: {found['cause']}{detail}" if found else ""


def _drop_duplicates(prepared: Prepared, dropped: dict[int, dict[int, str]]) -> None:
    """Of samples with one key the first that can be used stays."""
    if not prepared.full_parts:
        return
    rows = prepared.all_rows(RECORDS, "key_hash")
    hashes: UInt64[np.ndarray, "n"] = rows[:]
    start_of = dict(zip(prepared.full_parts, rows.starts.tolist(), strict=False))
    fit = np.ones(len(hashes), bool)
    for number, unfit in dropped.items():
        fit[start_of[number] + np.array(list(unfit))] = False
    places = np.flatnonzero(fit)
    order = places[hashes[places].argsort(kind="stable")]
    same = hashes[order[1:]] == hashes[order[:-1]]
    # Equal hashes are looked at key by key: 64 bits may meet by chance.
    places = np.unique(np.concatenate([order[1:][same], order[:-1][same]]))
    keys = prepared.all_texts("keys").take(places)
    first_of: dict[tuple[int, str], int] = {}
    for place, key in zip(places.tolist(), keys, strict=True):
        if first_of.setdefault((int(hashes[place]), key), place) != place:
            number = prepared.full_parts[int(np.searchsorted(rows.starts, place, side="right")) - 1]
            dropped.setdefault(number, {})[place - start_of[number]] = "duplicate key"


def _broken(prepared: Prepared, dropped: dict[int, dict[int, str]]) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(prepared.parts):
        folder = prepared.part_folder(number) / RECORDS
        with (folder / "broken.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield {"part": part.name, **json.loads(line)}
        if number in dropped:
            rows = sorted(dropped[number])
            for row, key in zip(rows, Strings(folder, "keys")[np.array(rows)], strict=True):
                yield {"part": part.name, **asdict(Broken(key, dropped[number][row]))}
