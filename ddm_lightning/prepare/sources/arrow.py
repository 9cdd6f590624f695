"""Tables of Arrow, which Parquet files and saved Hugging Face data sets are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ddm_lightning.core.errors import UserError
from ddm_lightning.prepare.records import Broken, Record
from ddm_lightning.prepare.sources.columns import Columns, Labels

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE = 32
"""Rows turned into Python objects at a time: pictures of some megabytes must not pile up."""


def labels_of(
    schema: pyarrow.Schema, column: str | None, num_classes: int | None, class_names: list[str] | None
) -> Labels:
    """The classes: as the user says, or else as Hugging Face's ``ClassLabel`` in the schema says.

    Raises:
        UserError: nobody says how many classes there are.
    """
    if column is None or num_classes is not None or class_names is not None:
        return Labels(column, num_classes, class_names)
    feature = _features(schema).get(column)
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        raise UserError(
            "key 'prepare.source.params.label_column': the files do not say which classes there are; "
            "add num_classes or class_names"
        )
    return Labels(column, None, feature["names"])


def check_schema(schema: pyarrow.Schema, columns: Columns, place: str) -> None:
    """Refuse a table without the columns, or whose picture column holds no pictures.

    Raises:
        UserError: naming the param and the columns that are there.
    """
    import pyarrow.types as types

    columns.check(schema.names, place)
    kind = schema.field(columns.image).type
    tests = (types.is_binary, types.is_large_binary, types.is_string, types.is_large_string, types.is_struct)
    if not any(test(kind) for test in (*tests, types.is_fixed_size_binary)):
        raise UserError(
            f"key 'prepare.source.params.image_column': {columns.image!r} of {place} holds {kind}; "
            f"pictures are bytes, {{bytes, path}} or paths"
        )


def records(
    batches: Iterator[pyarrow.RecordBatch],
    first_row: int,
    num_rows: int | None,
    file: str,
    columns: Columns,
    labels: Labels,
    fetch: Callable[[str], bytes],
    raise_failure: Callable[[], None],
) -> Iterator[Record | Broken]:
    """Rows as records; those that cannot be read because the file is damaged are ``Broken``, each of them.

    Args:
        first_row: number in the file of the first row that ``batches`` give.
        num_rows: rows that ``batches`` should give in all; None when only reading tells.
        raise_failure: raises what stopped the reading, if it was not the file's content.

    Raises:
        UserError: the file cannot be fetched to its end.
    """
    import pyarrow

    row = first_row
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                for values in batch.slice(start, ROWS_AT_ONCE).select(columns.names).to_pylist():
                    yield columns.record(values, f"{file}:{row}", labels, fetch)
                    row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise_failure()
        detail = " ".join(str(error).split())
        last = row + 1 if num_rows is None else first_row + num_rows
        for lost in range(row, last):
            yield Broken(f"{file}:{lost}", "damaged table", detail)


def _features(schema: pyarrow.Schema) -> dict:
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}
