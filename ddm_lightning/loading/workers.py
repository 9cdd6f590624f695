"""What both back ends' DataLoaders have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


def as_it_is(batch: Any) -> Any:
    """What a DataLoader does to a batch that is one already."""
    return batch


@contextlib.contextmanager
def workers_end_with_an_error(loader: DataLoader) -> Iterator[None]:
    """End the persistent workers at once when the block raises.

    Otherwise the error's traceback keeps them until the garbage collector comes round, which then waits for them
    for seconds.
    """
    try:
        yield
    except Exception:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()  # type: ignore[attr-defined]  # there are no workers without it
            loader._iterator = None
        raise
