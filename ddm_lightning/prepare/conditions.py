"""Whether a source has what the experiment is conditioned on, asked before anything is written."""

from __future__ import annotations

import re
from typing import Any

from ddm_lightning.core.errors import UserError
from ddm_lightning.members.preflight import missing_condition
from ddm_lightning.prepare.plugins import Plugins
from ddm_lightning.prepare.records import Record, count_samples

_SPLIT = re.compile("train(ing)?|val(id|idation)?|dev|test(ing)?", re.IGNORECASE)


def check_classes(condition: str, plugins: Plugins) -> None:
    """Refuse classes as the condition for a source that has none, or only splits.

    Raises:
        UserError: there are no classes.
    """
    if condition != "class":
        return

    source = plugins.source
    names = getattr(source, "class_names", None) or ()
    are_splits = names and all(map(_SPLIT.fullmatch, names))
    if source.num_classes < 2 or are_splits:
        raise UserError(
            f"key 'condition.kind' = 'class': source {plugins.config.source.name!r} has no classes, only "
            f"{', '.join(names) or 'images'}; use text or none, or give the folder of the classes"
        )


def check_samples(condition: str, plugins: Plugins) -> None:
    """Look for a caption, or for two classes, if the condition needs them.

    Raises:
        UserError: there are none.
    """
    if condition == "none":
        return

    seen = set[Any]()
    num_read = 0
    for found in plugins.look():
        num_read += 1
        if isinstance(found, Record):
            seen.add(found.label if condition == "class" else found.caption)
        if len(seen - {""}) > (condition == "class"):
            return

    # Sorted by class, the first thousand of a larger source may have one.
    if seen and (condition != "class" or num_read == count_samples(plugins.parts)):
        raise missing_condition(condition, num_read)
