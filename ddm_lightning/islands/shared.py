"""What islands share at a run's URL besides trainings: prepared shards with their manifest, and finished members."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from ddm_lightning.config.load import read_yaml, to_yaml
from ddm_lightning.core import remote
from ddm_lightning.core.errors import DOWNLOADS, UserError
from ddm_lightning.core.files import atomic_folder, atomic_write_text, parse_json, sha256_file, sha256_json
from ddm_lightning.core.weights import check_recorded
from ddm_lightning.ensemble.manifest import assemble
from ddm_lightning.members.meta import REMEDY, WEIGHTS_FILE, base_file, read_meta
from ddm_lightning.members.roles import ROUTER
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import MEMBER_FILE, SIGNATURE, STATEMENT, refuse_changes
from ddm_lightning.members.signatures import PREPARE, accept, check_signature, signature_of
from ddm_lightning.prepare.ledger import Store, publish_shards
from ddm_lightning.shards.manifest import Manifest, manifest_path

_MANIFEST = "prepared/manifest.json"
# Copy of the manifest, sent before the shards, so that only one preparation at a time publishes.
_CLAIM = "publishing.json"
# In a member's folder: hash of the URL and of the ``member.json`` that was last sent there or fetched from there.
_MARK = ".published"


def check_free(run: Run, parts: bool = False) -> None:
    """Refuse a run's URL before hours of work whose result goes there.

    Args:
        run: the run to prepare.
        parts: whether it is prepared with ``--parts``.

    Raises:
        UserError: the URL cannot be written, holds other data, or other machines are preparing the run together.
    """
    if run.url is None:
        return

    probe = f"{run.url}/probe-{uuid.uuid4().hex}"
    root = f"{run.url}/{run.folder.prepared.name}"
    with remote.reaching():
        remote.write(f"{probe}/empty", b"")
        remote.remove(probe)
        names = remote.files(root, recursive=False)
        if "manifest.json" in names:
            _refuse_other_experiment(run)
        elif "parts.json" in names and not parts:
            raise UserError(
                f"key 'remote': {run.url}: holds an unfinished prepare --parts; "
                "finish it on its machines, or set another address"
            )


def _refuse_other_experiment(run: Run) -> None:
    name = run.folder.experiment.name
    with TemporaryDirectory() as scratch:
        remote.get(f"{run.url}/{name}", Path(scratch) / name)
        DOWNLOADS[scratch] = str(run.url)
        recorded: Any = OmegaConf.to_container(read_yaml(Path(scratch) / name))

    refuse_changes(f"{run.url}/{name}", recorded, asdict(run.experiment))


def publish_prepared(run: Run, tick: Callable[[int, int], None]) -> None:
    """Send encoded prompts, the prepared shards, the experiment and last the manifest, unless they are there.

    Args:
        run: its shards are prepared here.
        tick: called with the groups of parts done and in total.

    Raises:
        UserError: the URL cannot be written, or holds other data or a part of them.
    """
    if run.url is None:
        return

    manifest = manifest_path(run.folder.root)
    folder = run.folder
    target = f"{run.url}/{_MANIFEST}"
    root = f"{run.url}/{folder.prepared.name}"
    is_there = False
    with remote.reaching():
        with suppress(FileNotFoundError):
            is_there = remote.read(target) == manifest.read_bytes()
            if not is_there:
                raise UserError(f"key 'remote': {run.url}: holds a run prepared from other data; set another address")

        if not (is_there or remote.create(f"{root}/{_CLAIM}", manifest.read_bytes())):
            raise UserError(
                f"{root}/{_CLAIM}: other data are being published here, or were in part; set another address, or "
                "remove this file if that was given up"
            )

        if signature_of(manifest).exists():
            remote.put(signature_of(manifest), f"{target}.sig")

        sent = remote.files(f"{run.url}/prompts")
        for path in folder.root.glob("prompts/[!.]*"):
            if path.name not in sent:
                remote.put(path, f"{run.url}/prompts/{path.name}")

        if not is_there:
            # The weights that members start from, then the records by which they are found.
            for path in sorted(folder.initial.glob("[!.]*/*")) + sorted(folder.initial.glob("*.json")):
                remote.put(path, f"{run.url}/{path.relative_to(folder.root).as_posix()}")

            store = Store(root, run.manifest.versions)
            publish_shards(folder.prepared, store, run.manifest.index_sha256, tick)
            experiment = replace(run.experiment, remote=None)
            remote.write(f"{run.url}/{folder.experiment.name}", to_yaml(experiment).encode())
            remote.put(manifest, target)


def pull_manifest(run: Run) -> None:
    """Fetch the manifest of the prepared shards, unless this folder has it.

    Raises:
        UserError: the URL cannot be read, or holds nothing, another experiment or other shards.
    """
    path = manifest_path(run.folder.root)
    if run.url is None:
        check_signature(PREPARE, path, run.experiment)
        return

    with TemporaryDirectory() as scratch, remote.reaching():
        manifest = manifest_path(Path(scratch))
        DOWNLOADS[scratch] = run.url
        try:
            remote.get(f"{run.url}/{_MANIFEST}", manifest)
        except FileNotFoundError:
            raise UserError(
                f"key 'remote': {run.url}: holds no prepared run; start with prepare and the same remote, or set "
                "remote=null to use what is here"
            ) from None

        with suppress(FileNotFoundError):
            remote.get(f"{run.url}/{_MANIFEST}.sig", signature_of(manifest))

        check_signature(PREPARE, manifest, run.experiment)
        Manifest.read(Path(scratch))
        _refuse_other_experiment(run)
        if signature_of(manifest).exists():
            remote.get(str(signature_of(manifest)), signature_of(path))

        if not path.exists():
            remote.get(str(manifest), path)
        elif sha256_file(path) != sha256_file(manifest):
            raise UserError(
                f"{path}: differs from the one at {run.url}: the data were prepared twice; remove it, or repeat "
                "prepare on the machine that published"
            )


def is_prepared_elsewhere(run: Run) -> bool:
    """Whether the run's URL holds shards that were prepared on another machine.

    Raises:
        UserError: the URL cannot be read.
    """
    if run.url is None or (run.folder.prepared / "parts.json").exists():
        return False

    with remote.reaching():
        try:
            remote.read(f"{run.url}/{_MANIFEST}")
        except FileNotFoundError:
            return False

    return True


def send_artifact(name: str, run: Run, before: Callable[[], object]) -> None:
    """Send the artifact of a member, unless it has been published.

    Args:
        name: the member.
        run: has its artifact, and a URL.
        before: called before each file.

    Raises:
        OSError: the store cannot be written.
    """
    if not is_published(name, run):
        remote.put_folder(run.folder.artifact(name), f"{run.url}/members/{name}/artifact", MEMBER_FILE, before)
        mark_published(name, run)


def mark_published(name: str, run: Run) -> None:
    """Note that a member's artifact is the one at the run's URL."""
    atomic_write_text(run.folder.member(name) / _MARK, _mark_of(name, run))


def is_published(name: str, run: Run) -> bool:
    """Whether a member's artifact has been published at the run's URL or fetched, and not changed since."""
    with suppress(FileNotFoundError):
        return (run.folder.member(name) / _MARK).read_text(encoding="utf-8") == _mark_of(name, run)

    return False


def _mark_of(name: str, run: Run) -> str:
    return sha256_json([run.url, sha256_file(run.folder.artifact(name) / MEMBER_FILE)])


def pull_artifact(name: str, run: Run) -> None:
    """Fetch the artifact of a member, if it is published; keep one here that was not sent, unless it has fewer steps.

    Raises:
        OSError: the store cannot be read.
        UserError: the artifact is damaged, or its signature is refused.
    """
    url = f"{run.url}/members/{name}/artifact"
    folder = run.folder.artifact(name)
    own = b""
    if run.folder.has_artifact(name):
        own = (folder / MEMBER_FILE).read_bytes()

    try:
        description = remote.read(f"{url}/{MEMBER_FILE}")
    except FileNotFoundError:
        (folder.parent / _MARK).unlink(missing_ok=True)  # perhaps removed there, so it is sent again
        return

    if own != description:
        if own and not is_published(name, run) and _step_of(own) >= _step_of(description):
            return

        try:
            with atomic_folder(folder) as temporary:
                DOWNLOADS[str(temporary)] = url
                (temporary / MEMBER_FILE).write_bytes(description)
                for file in (STATEMENT, SIGNATURE):
                    with suppress(FileNotFoundError):
                        remote.get(f"{url}/{file}", temporary / file)

                remote.get(f"{url}/{WEIGHTS_FILE}", temporary / WEIGHTS_FILE)
                accept(name, temporary, run)
                meta = read_meta(temporary)
                check_recorded(temporary / WEIGHTS_FILE, meta.model_sha256, REMEDY)
                base = base_file(run.folder.root, meta)
                if meta.base_sha256 is not None and not base.exists():
                    remote.get(f"{run.url}/{base.relative_to(run.folder.root).as_posix()}", base)
        except FileNotFoundError:  # removed meanwhile
            return

    mark_published(name, run)


def _step_of(description: bytes) -> int:
    with suppress(ValueError, KeyError, TypeError, OverflowError):
        return int(parse_json(description)["step"])

    return -1


def pull_ensemble(run: Run, member: str | None = None) -> None:
    """Fetch all published artifacts, or that of ``member`` alone, and assemble the ensemble of those that are here.

    Raises:
        UserError: as ``pull_manifest``, or an artifact is damaged or not the experiment's.
    """
    if run.url is None:
        return

    pull_manifest(run)
    with remote.reaching():
        for name in run.names if member is None else [member]:
            pull_artifact(name, run)

    Run.open(run.experiment, create=True)
    if any(run.is_finished(name) for name in run.names if name != ROUTER):
        assemble(run, partial=True)
