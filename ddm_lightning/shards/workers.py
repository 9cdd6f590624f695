"""Data-loading processes."""

from __future__ import annotations

from ddm_lightning.core.processes import on_orphaned


def end_with_parent(parent: int, _worker: int) -> None:
    """Tie a data-loading process to its parent; a ``worker_init_fn`` after ``partial(end_with_parent, parent)``.

    An orphan that waits for a shard would hold the member's lock for ever.
    """
    on_orphaned(parent)
