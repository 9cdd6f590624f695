"""What both back ends' DataLoaders have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from ddm_lightning.core.processes import on_orphaned


def as_it_is(batch: Any) -> Any:
    """What a DataLoader does to a batch that is one already."""
    return batch


def end_with_parent(parent: int, _worker: int) -> None:
    """Tie a data-loading process to its parent; a ``worker_init_fn`` after ``partial(end_with_parent, parent)``.

    An orphan that waits for a shard or at one of Streaming's barriers would hold the member's lock for ever.
    """
    on_orphaned(parent)


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
