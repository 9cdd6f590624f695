"""Filters of ``prepare``: conditions on columns of the source and on the image, and a list of keys to drop."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from rich.table import Table

from ddm_lightning.config.experiment import ImagesConfig, PrepareConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.formatting import table

PROPERTIES = ("image_height", "image_width", "min_side", "crop_top", "crop_left")
"""Values that every sample has, whatever its source."""
CAPTIONS_KEY = "prepare.captions"
IN_DROP_KEYS = "in drop_keys"
_OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def extra_columns(config: PrepareConfig) -> dict[str, str]:
    """Return the further columns to read, each with the key that asks for it."""
    filtered = {}
    for name, text in config.filters.items():
        if text is not None:
            filtered[name] = f"prepare.filters.{name}"

    wanted = dict.fromkeys(config.keep, "prepare.keep") | filtered
    wanted = {name: key for name, key in wanted.items() if name not in PROPERTIES}
    return wanted | {caption.column: CAPTIONS_KEY for caption in config.captions}


def properties(image: UInt8[np.ndarray, "h w 3"], images: ImagesConfig) -> dict[str, int]:
    """Return size and crop of an image in pixels.

    ``crop_top`` and ``crop_left`` are of the resized image, as in SDXL (Podell et al., arXiv 2307.01952, section 2.2).
    """
    height, width = image.shape[:2]
    shorter = min(height, width)
    size = images.size
    crops = size is not None and images.aspect == "crop"
    top, left = (round((side * size / shorter - size) / 2) if size and crops else 0 for side in (height, width))
    return dict(zip(PROPERTIES, (height, width, shorter, top, left), strict=True))


def number_in(value: Any) -> float:
    """Return the number in a cell, which may be a text; NaN if there is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


class Filters:
    """The configured filters.

    Raises:
        UserError: the file of ``prepare.drop_keys`` cannot be read.
    """

    def __init__(self, config: PrepareConfig) -> None:
        given = {}
        for name, text in config.filters.items():
            if text is not None:
                given[name] = text

        self.conditions = {name: text if isinstance(text, str) else f">= {text:g}" for name, text in given.items()}
        """Condition by column."""
        self.inputs: list[Any] = [self.conditions]
        """What the filters are made from, as JSON; the file by its hash."""
        self._dropped = frozenset[str]()
        if config.drop_keys is not None:
            path = Path(config.drop_keys).expanduser()
            try:
                self._dropped = frozenset(path.read_text(encoding="utf-8-sig").splitlines())
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"key 'prepare.drop_keys': {path} cannot be read ({error}); change the path") from None

            self.inputs.append(sha256_file(path))

    def __bool__(self) -> bool:
        return len(self.inputs) > 1 or bool(self.conditions)

    def cause(self, key: str, values: Mapping[str, Any]) -> str | None:
        """Return the first filter that takes a sample out, in words; None to keep the sample."""
        if key in self._dropped:
            return IN_DROP_KEYS

        for name, condition in self.conditions.items():
            if (holds := _holds(condition, values[name])) is not True:
                if holds is False:
                    return f"not {name} {condition}"

                return f"no {name}"

        return None


def _holds(condition: str, value: Any) -> bool | None:
    """Whether a value fulfils a condition; None if there is no such value to compare."""
    found = re.fullmatch(r"([<>=!]=?)\s*(.*)", condition)
    assert found is not None  # checked with the experiment
    compare = _OPERATORS[found[1]]
    word = found[2].strip("\"' ")
    limit = number_in(word)
    if not math.isnan(limit):
        number = number_in(value)
        if math.isnan(number):
            return None

        return compare(number, limit)

    if value is None:
        return None

    if isinstance(value, bytes):
        text = value.decode(errors="replace").strip()
    else:
        text = str(value)

    if isinstance(value, bool):
        return compare(*(one.lower() for one in (text, word)))

    return compare(text, word)


def filter_table(num_read: int, filtered: Mapping[str, int], num_broken: int, title: str) -> Table:
    """Format the number of samples that each filter takes out, and the rest.

    Args:
        num_read: samples read.
        filtered: samples taken out by each filter.
        num_broken: broken samples.
        title: of the table.
    """
    rest = {"broken": num_broken, "kept": num_read - sum(filtered.values()) - num_broken, "read": num_read}
    counts = (*Counter(filtered).most_common(), *rest.items())
    rows = [(name, f"{count:,}", f"{count / num_read:.2%}") for name, count in counts]
    return table(("", "samples", "of all read"), rows, title)
