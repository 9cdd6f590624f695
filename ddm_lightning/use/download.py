"""Download ensembles from URLs."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from ddm_lightning.core import remote
from ddm_lightning.core.errors import DOWNLOADS, UserError
from ddm_lightning.core.files import inside
from ddm_lightning.ensemble.manifest import read_document
from ddm_lightning.members.meta import base_file, read_meta
from ddm_lightning.members.run_folder import MEMBER_FILE, RunFolder
from ddm_lightning.members.signatures import signature_of
from ddm_lightning.shards.manifest import manifest_path
from ddm_lightning.use.saved import ARTIFACT_FILES


def fetched(address: str | Path) -> Path:
    """Folder of an ensemble: ``address`` itself, or a download of the URL, kept until the program ends.

    Downloads ``ensemble.json``, then only the artifacts that it lists and the files of a run that sampling needs.

    Raises:
        UserError: the URL cannot be read, the folder does not exist, or a path leaves it.
    """
    url = str(address).rstrip("/")
    if remote.is_url(url):
        return _download(url)

    local = Path(address).expanduser()
    if not local.is_dir():
        raise UserError(f"{url}: is not a folder here; give one, or a URL (on the Hugging Face hub: hf://owner/name)")

    return local


def _download(url: str) -> Path:
    run = RunFolder(Path(tempfile.mkdtemp(prefix="ddm_lightning-")).resolve())
    DOWNLOADS[str(run.root)] = url
    atexit.register(shutil.rmtree, run.root, ignore_errors=True)

    def fetch(path: Path) -> None:
        """Fetch a file, unless it does not exist."""
        with suppress(FileNotFoundError):
            remote.get(f"{url}/{path.relative_to(run.root).as_posix()}", path)

    with remote.reaching(f"{url} cannot be read"):
        fetch(run.ensemble)
        document = read_document(run.ensemble)
        for entry in document.members:
            folder = inside(run.root, entry.path, run.ensemble)
            for name in ARTIFACT_FILES:
                fetch(folder / name)

            if (folder / MEMBER_FILE).exists():
                meta = read_meta(folder)
                base = base_file(run.root, meta)
                if meta.base_sha256 is not None and not base.exists():
                    fetch(base)

        if document.about is None:
            manifest = manifest_path(run.root)
            for path in (run.experiment, manifest, signature_of(manifest)):
                fetch(path)

    return run.root
