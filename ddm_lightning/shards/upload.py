"""Upload finished shards to a URL: each file is uploaded, read back and compared; ``index.json`` goes last.

A folder with an index is therefore complete, and an interrupted upload resumes with the folders that have none.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from pathlib import Path

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file

_INDEX = "index.json"
_ATTEMPTS = 3


def upload_shards(shards: Path, url: str, tick: Callable[[int, int], None]) -> dict[str, str]:
    """Make ``url`` hold the files of ``shards``.

    Args:
        shards: folder with ``cluster-{k}/{split}/``.
        url: the folder to fill.
        tick: called with the bytes done and the bytes in total.

    Returns:
        The SHA-256 of each file, as read back.

    Raises:
        UserError: ``url`` holds other data, or a file arrives damaged three times.
        OSError: it cannot be written to.
    """
    names = [path.relative_to(shards).as_posix() for path in shards.rglob("*") if path.is_file()]
    # Within a folder the index goes last.
    names.sort(key=lambda name: (posixpath.dirname(name), posixpath.basename(name) == _INDEX, name))
    hashes = {name: sha256_file(shards / name) for name in names}
    sizes = {name: (shards / name).stat().st_size for name in names}
    done = 0
    try:
        complete = _complete_folders(url.rstrip("/"), hashes)
        for name in names:
            if posixpath.dirname(name) not in complete:
                _put(shards / name, f"{url.rstrip('/')}/{name}", hashes[name])
            done += sizes[name]
            tick(done, sum(sizes.values()))
    finally:
        remote.disconnect()
    return hashes


def _complete_folders(url: str, hashes: Mapping[str, str]) -> set[str]:
    """Return the folders that are uploaded already; refuse any other data."""
    present = remote.files(url)
    others = sorted(present.keys() - hashes.keys())
    indices = [name for name in hashes if posixpath.basename(name) == _INDEX and name in present]
    others += [name for name in indices if remote.sha256(f"{url}/{name}") != hashes[name]]
    if others:
        raise UserError(f"key 'remote': {remote.shown(url)}: holds other data ({others[0]}); set another address")
    return {posixpath.dirname(name) for name in indices}


def _put(path: Path, url: str, digest: str) -> None:
    for _ in range(_ATTEMPTS):
        remote.put(path, url)
        if remote.sha256(url) == digest:
            return
    raise UserError(
        f"{remote.shown(url)} arrived damaged {_ATTEMPTS} times; check the storage, then repeat the command"
    )
