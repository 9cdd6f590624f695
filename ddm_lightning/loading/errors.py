"""What both back ends raise when shards cannot be read."""

from __future__ import annotations

from ddm_lightning.errors import UserError


class ShardError(UserError):
    """Shards that cannot be read; one line, also when it comes out of a worker process."""

    def __init__(self, message: str) -> None:
        # DataLoader raises a worker's exception again with the worker's traceback for a message: the last
        # line of it is what was raised there.
        last = message.rstrip().rpartition("\n")[2]
        super().__init__(last.removeprefix(f"{__name__}.{type(self).__name__}: "))


def unreadable(cause: str) -> ShardError:
    """The error of a run that cannot go on because of ``cause``, a line that names the shard."""
    return ShardError(f"a shard cannot be read: {cause}; mend or fetch it, then the same command resumes")
