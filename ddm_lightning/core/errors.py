"""The one exception that a user's mistake raises, and the line that is said of it."""

from __future__ import annotations

import errno


class UserError(Exception):
    """Bad input: a config, shard, checkpoint, artifact or prompt that cannot be used.

    The message is one line that names the file, the key and the remedy. The command line prints it
    after ``error:`` and exits with 2; nothing is written before it is raised.
    """


def line_of(error: BaseException) -> str | None:
    """The line to say of what a user can do something about; None for what may be the program's own mistake."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)):
        return f"{error.filename}: {error.strerror}; check run_dir, or free the path"
    if isinstance(error, MemoryError) or "to allocate" in str(error):  # torch: "tried to allocate 2.00 GiB"
        return f"the memory is full ({str(error).partition(chr(10))[0]}); use a smaller network or batch"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = error.filename or "the disk of the run folder"  # a write through an open file does not say
        return f"{place}: is full; free some space, then the same command goes on"
    return None
