"""Filters of ``prepare``: conditions on columns of the source and on the image, and a list of keys to drop."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from ddm_lightning.config.experiment import PrepareConfig
from ddm_lightning.core.buckets import Size
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.formatting import table

PROPERTIES = ("image_height", "image_width", "min_side", "crop_top", "crop_left")
"""Values that every sample has, whatever its source."""
CAPTIONS_KEY = "prepare.captions"
IN_DROP_KEYS = "in drop_keys"
ENLARGED = "would be enlarged"
"""Filter of ``prepare.images.upscale: false``."""
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
    wanted = dict.fromkeys(config.keep, "prepare.keep")
    for name in conditions_of(config):
        wanted[name] = f"prepare.filters.{name}"
    for name in PROPERTIES:
        wanted.pop(name, None)
    for caption in config.captions:
        wanted[caption.column] = CAPTIONS_KEY

    return wanted


def conditions_of(config: PrepareConfig) -> dict[str, str]:
    """Return the condition of each filtered column; a number alone is the least value."""
    conditions = {}
    for name, condition in config.filters.items():
        if isinstance(condition, str):
            conditions[name] = condition
        elif condition is not None:
            conditions[name] = f">= {condition:g}"

    return conditions


def properties(size: Size, cropped_to: Size | None) -> dict[str, int]:
    """Return size and crop of an image in pixels.

    ``crop_top`` and ``crop_left`` are of the resized image, as in SDXL (Podell et al., arXiv 2307.01952, section 2.2).

    Args:
        size: height and width before resizing.
        cropped_to: the size that it is resized to cover; None if it is not cropped.
    """
    height, width = size
    top = 0
    left = 0
    if cropped_to is not None:
        own_height, own_width = cropped_to
        if own_height * width >= own_width * height:
            left = round((width * own_height / height - own_width) / 2)
        else:
            top = round((height * own_width / width - own_height) / 2)

    return dict(zip(PROPERTIES, (height, width, min(height, width), top, left), strict=True))


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
        self.conditions = conditions_of(config)
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
            holds = _holds(condition, values[name])
            if holds is None:
                return f"no {name}"
            if not holds:
                return f"not {name} {condition}"

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

    text = str(value)
    if isinstance(value, bytes):
        text = value.decode(errors="replace").strip()
    if isinstance(value, bool):
        return compare(text.lower(), word.lower())

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
    rows = []
    for name, count in (*Counter(filtered).most_common(), *rest.items()):
        rows.append((name, f"{count:,}", f"{count / num_read:.2%}"))

    return table(("", "samples", "of all read"), rows, title)
