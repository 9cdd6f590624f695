"""What both back ends' DataLoaders have in common."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

from torch.utils.data import DataLoader


def as_it_is(batch: Any) -> Any:
    """What a DataLoader does to a batch that is one already."""
    return batch


def end_with_parent(parent: int, _worker: int) -> None:
    """End this process within a second of its parent's death, whatever it waits for.

    A worker that waits for a shard or at one of Streaming's barriers looks for nothing else, and would hold the
    member's lock for ever.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


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
