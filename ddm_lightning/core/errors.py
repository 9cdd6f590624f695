"""The exception for errors the user can fix, and their one-line messages."""

from __future__ import annotations

import errno
import os
import re
import sys
from urllib.parse import quote, unquote

DOWNLOADS: dict[str, str] = {}
"""URL of each temporary folder that holds a download; messages name the URL, without a password."""

# User, password and host of a URL.
_LOGIN = r"://([^/:@\s]*):([^/\s]*)@([^/:\s]*)"


_OF_PATHLIB = ("Could not determine home directory", "Symlink loop from")


class UserError(Exception):
    """Bad input, such as a config, shard, checkpoint, artifact or prompt.

    The message is one line with the file, the key and the remedy. The command line prints it after
    ``error:`` and exits with 2. Raise it before anything is written.
    """

    def __str__(self) -> str:
        return _with_urls(super().__str__())


def line_of(error: BaseException) -> str | None:
    """One-line message for an error the user can fix; None for a possible bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return _line_of_file(error)

    if isinstance(error, MemoryError) or "to allocate" in str(error):  # torch: "tried to allocate 2.00 GiB"
        problem, _, _ = str(error).partition("\n")
        return (
            f"out of memory ({problem}); "
            "set island.micro_batch_size to train with less, sample.resident_experts to sample, or lower "
            "prepare.num_processes or prepare.partition.fit_fraction to prepare"
        )

    if isinstance(error, RuntimeError) and str(error).startswith(_OF_PATHLIB):
        return f"{first_line(error)}; write the path in full"

    return None


def _line_of_file(error: OSError) -> str | None:
    # TensorBoard's names are bytes; there is none if writing to an open file failed.
    place = error.filename
    if isinstance(place, bytes):
        place = place.decode(errors="replace")

    names_path = isinstance(error, (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError))
    if names_path or error.errno in (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP):
        return f"{place}: {error.strerror}; check its permissions, or give another folder (run_dir, --out)"
    if isinstance(error, FileNotFoundError):
        return f"{place or error}: cannot be found or made; check its folder, then run the same command again"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{place or 'the disk of the run folder'}: is full; free some space, then run the same command again"
    if error.errno == errno.EFBIG:
        return f"{place or 'a file'}: exceeds the size that files may have here (ulimit -f); raise it"

    return None


def first_line(error: BaseException) -> str:
    """First line of an error's message, at most 500 characters; its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]


def say(line: str) -> None:
    """Print one line on stderr, at once: beside results, which go to stdout."""
    print(_with_urls(line), file=sys.stderr, flush=True)


def note(line: str) -> None:
    """Say that the program has worked around something."""
    say(f"note: {line}")


def redacted(url: str) -> str:
    """Return a URL, or a line with URLs, without passwords."""
    return re.sub(r"(://[^/:@\s]*):[^/\s]*@", r"\1:***@", url)


def hide_passwords(text: str) -> str:
    """Remove passwords from URLs in ``text``, before they are written anywhere.

    This process and its children find them by ``with_password``.
    """
    for user, password, host in re.findall(_LOGIN, text):
        os.environ[_password_variable(user, host)] = unquote(password)

    return re.sub(_LOGIN, r"://\1@\3", text)


def with_password(url: str) -> str:
    """Add the password of the environment variable ``DDM_PASSWORD_USER_HOST`` to a URL with a user and without one."""
    login = re.match(r"\w+://([^/:@]+)@([^/:]*)", url)
    if login is None:
        return url

    password = os.environ.get(_password_variable(*login.groups()))
    if password is None:
        return url

    return url.replace("@", f":{quote(password, safe='')}@", 1)


def _password_variable(user: str, host: str) -> str:
    return "DDM_PASSWORD_" + re.sub(r"\W", "_", f"{user}_{host}").upper()


def _with_urls(line: str) -> str:
    for folder, url in DOWNLOADS.items():
        line = line.replace(folder, url)

    return redacted(line)
