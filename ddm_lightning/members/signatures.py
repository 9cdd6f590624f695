"""Signatures of what islands hand over: elliptic-curve keys and bundles of OpenSSF's ``model-signing``.

The signature of an artifact covers its whole folder, with ``signed.json`` in it: that names the experiment and counts
the versions of the member, so that an older artifact is not taken for the newest. The private key stays at its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.config.load import fingerprint
from ddm_lightning.config.merge import init_of, island_of
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError, first_line, redacted
from ddm_lightning.core.files import atomic_write, atomic_write_json, sha256_file, sha256_json
from ddm_lightning.core.registry import require
from ddm_lightning.members.meta import REMEDY, read_meta
from ddm_lightning.members.roles import role_of, section_of
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import MEMBER_FILE, SIGNATURE, STATEMENT
from ddm_lightning.shards.manifest import manifest_path

PREPARE = "prepare"
"""Who signs the prepared manifest."""

ACCEPTED_FILE = "accepted.json"
"""In a member's folder, never published: the newest version that was accepted here."""
_REMEDY = "get it and its signature again from where it was made"


@dataclass(frozen=True)
class _Statement:
    """What a signed artifact says besides its description."""

    experiment: checks.Sha256
    """Fingerprint of its settings."""
    version: checks.Size
    """Number of the member's artifact, from 1."""


@dataclass(frozen=True)
class _Accepted:
    """The newest artifact that was accepted here."""

    step: checks.Count = 0
    version: checks.Count = 0
    content: str = ""
    """Hash of its signature and description, and of the trusted keys."""


def signature_of(path: Path) -> Path:
    """Path of the signature of a file, or of an artifact's folder."""
    if path.is_dir():
        return path / SIGNATURE

    return path.with_name(f"{path.name}.sig")


def check_keys(name: str, run: Run) -> None:
    """Check the keys for a member, or for ``PREPARE``, before work begins that would be lost without them.

    Raises:
        UserError: a key is missing or unusable, can be read by others or would be published, or the package is missing;
            or keys are trusted, and weights that the member starts from, which nobody signs, have no recorded hash.
    """
    _signer(name, run)
    if _trusted(name, run.experiment) and name != PREPARE:
        initial = init_of(section_of(name, run.experiment))
        if initial is not None and initial.sha256 is None:
            raise UserError(
                f"key '{role_of(name).section}.init_from': nobody signs these weights, and island.trusted_keys is set; "
                f"prepare a new run with their hash: {{source: {redacted(initial.source)}, sha256: …}} "
                "(in initial/*.json of a run you trust, or by sha256sum)"
            )


def sign_artifact(folder: Path, name: str, run: Run) -> None:
    """Sign the new artifact of a member in ``folder``, which will replace its present one; nothing without a key.

    Raises:
        UserError: as ``check_keys``.
    """
    if (config := _signer(name, run)) is not None:
        earlier = run.folder.artifact(name)
        if (earlier / STATEMENT).exists():
            version = _statement(earlier).version
        else:
            version = 0

        atomic_write_json(folder / STATEMENT, asdict(_Statement(fingerprint(run.experiment), version + 1)))
        config.sign(folder, folder / SIGNATURE)


def sign_manifest(run: Run) -> None:
    """Sign the prepared manifest; nothing without a key.

    Raises:
        UserError: as ``check_keys``.
    """
    manifest = manifest_path(run.folder.root)
    if (config := _signer(PREPARE, run)) is not None:
        atomic_write(signature_of(manifest), lambda temporary: config.sign(manifest, temporary))


def accept(name: str, folder: Path, run: Run) -> None:
    """Check the signature of a member's artifact before it is used, if keys are trusted, and remember its version.

    Raises:
        UserError: it is not signed, or not by a key trusted for the member; it has changed; or it belongs to another
            member or experiment, or is older than one that was accepted here.
    """
    if not (keys := _trusted(name, run.experiment)):
        return

    record = run.folder.member(name) / ACCEPTED_FILE
    last = _Accepted()
    if record.exists():
        last = checks.read_record(record, _Accepted, "the record of accepted artifacts", "remove it")

    parts = (folder / SIGNATURE, folder / MEMBER_FILE, *keys)
    content = sha256_json([sha256_file(part) for part in parts if part.exists()])
    if content == last.content:
        return  # weights, which are gigabytes, are hashed again when they are loaded

    verify(folder, keys)
    meta = read_meta(folder)
    statement = _statement(folder)
    problem = None
    if meta.member != name:
        problem = f"is signed as {meta.member}, not as {name}"
    elif statement.experiment != fingerprint(run.experiment):
        problem = "is signed for an experiment with other settings"
    elif (meta.step, statement.version) < (last.step, last.version):
        problem = (
            f"is older (step {meta.step}, version {statement.version}) than the one accepted before "
            f"(step {last.step}, version {last.version}; to go back on purpose, remove {record})"
        )

    if problem is not None:
        raise UserError(f"{folder}: {problem}; {REMEDY}")

    atomic_write_json(record, asdict(_Accepted(meta.step, statement.version, content)))


def check_signature(name: str, path: Path, experiment: Experiment) -> None:
    """Check the signature of a member's artifact, or of the manifest of ``PREPARE``, if keys are trusted.

    Unlike ``accept``, it needs no run: the folder may be part of a saved ensemble.

    Raises:
        UserError: it is not signed, or not by a key trusted for ``name``, or has changed.
    """
    if keys := _trusted(name, experiment):
        verify(path, keys)


def verify(path: Path, keys: Sequence[Path]) -> None:
    """Check that a file or folder is as one of the owners of ``keys`` signed it.

    Args:
        path: the file or folder; beside or in it is a bundle of ``model-signing``.
        keys: public keys.

    Raises:
        UserError: it is not, or there is no signature, or the package is missing.
    """
    require("key 'island.trusted_keys'", "model_signing", extra="signing")
    from model_signing.verifying import Config

    signature = signature_of(path)
    if not signature.is_file():
        raise UserError(f"{path}: is not signed ({signature.name} is missing); {_REMEDY}")

    problems = []
    for key in keys:
        try:
            return Config().use_elliptic_key_verifier(public_key=key).verify(path, signature)
        except Exception as error:  # noqa: BLE001  # a forged bundle makes the library raise anything
            problems.append(f"{key}: {first_line(error)}")

    raise UserError(f"{path}: its signature is refused ({'; '.join(problems)}); {_REMEDY}")


def _statement(folder: Path) -> _Statement:
    return checks.read_record(folder / STATEMENT, _Statement, "the statement of a signed artifact", REMEDY)


def _trusted(name: str, experiment: Experiment) -> list[Path]:
    """Public keys of which one must have signed what ``name`` hands over; none if no key is trusted for anything."""
    keys = experiment.island.trusted_keys
    found: Any = next((keys[key] for key in (name, name.partition("-")[0], "all") if key in keys), [])
    paths = []
    for path in found if isinstance(found, list) else [found]:
        paths.append(Path(str(path)).expanduser())

    if keys and not paths:
        raise UserError(f"key 'island.trusted_keys' has no key for {name}; add {name}: FILE or all: FILE")
    if missing := [path for path in paths if not path.is_file()]:
        raise UserError(f"key 'island.trusted_keys': {missing[0]}: there is no such file; copy the public key there")

    return paths


def _signer(name: str, run: Run) -> Any:
    """The library's settings to sign with the island's key; None if it has none."""
    if name == PREPARE:
        island = run.experiment.island
    else:
        island = island_of(name, run.experiment)

    if island.signing_key is None:
        return None

    require("key 'island.signing_key'", "model_signing", extra="signing")
    from model_signing import hashing, signing

    path = Path(island.signing_key).expanduser()
    problem = None
    if not path.is_file():
        problem = "there is no such file; make one with openssl genpkey, or set null"
    elif path.stat().st_mode & 0o077:
        problem = "others may read this private key; run chmod 600 on it"
    elif path.resolve().is_relative_to(run.folder.root.resolve()):
        problem = "lies in the run folder, which is published; move it"

    if problem is not None:
        raise UserError(f"key 'island.signing_key': {path}: {problem}")

    try:
        config = signing.Config().use_elliptic_key_signer(private_key=path)
    except Exception as error:
        raise UserError(
            f"key 'island.signing_key': {path}: is not an unencrypted private key of the curve P-256, P-384 or P-521 "
            f"({first_line(error)}); make one with openssl genpkey"
        ) from error

    return config.set_hashing_config(hashing.Config().set_ignored_paths(paths=[SIGNATURE]))
