"""Pretrained models on disk: found, checked, hashed and loaded; none of it runs code from their folders.

A model is a folder as ``save_pretrained`` writes it (``config.json`` and safetensors), or the name of one on the
Hugging Face hub, which is looked up in the local cache first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ddm_lightning.core.compat import ensure_torchvision_importable
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import inside, read_json, sha256_file, sha256_json
from ddm_lightning.core.weights import read_header

EXTRA = "latents"  # of setup.py, installs the libraries

_Found = TypeVar("_Found")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk whose files are whole, as far as their headers tell."""

    folder: Path
    config: Mapping[str, Any]
    """What ``config.json`` says."""
    weights: tuple[Path, ...]
    """Its safetensors files, sorted."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each weight, by its name in the files."""

    def provenance(self, others: Sequence[Path] = ()) -> dict[str, str]:
        """Hashes of the weights and of ``config.json`` and ``others``, and the hub's commit where one is known.

        A single file of weights has its own SHA-256, which is the one that the hub shows.
        """
        hashes = {path.name: sha256_file(path) for path in self.weights}
        weights = next(iter(hashes.values())) if len(hashes) == 1 else sha256_json(hashes)
        config = {path.name: sha256_file(path) for path in (self.folder / "config.json", *others)}
        found = {"weights_sha256": weights, "config_sha256": sha256_json(config)}
        # The hub's cache keeps each commit in a folder of that name.
        commit = re.search(r"/snapshots/([0-9a-f]{40})(?:/|$)", self.folder.as_posix())
        return {**found, "revision": commit.group(1)} if commit else found


def find_model(
    place: str, path: str, subfolder: str | None, revision: str | None, stem: str, kinds: Mapping[str, Sequence[str]]
) -> ModelFolder:
    """The folder of a model, downloaded if it is named on the hub and not in its cache.

    Args:
        place: what asks for it, for error lines ("image encoder 'diffusers-vae'").
        path: a folder, or ``owner/name`` on the hub.
        subfolder: where in it the model lies.
        revision: commit, tag or branch on the hub; None is its main branch.
        stem: name of the weights' file before ``.safetensors``.
        kinds: key of ``config.json`` -> values that will do.

    Raises:
        UserError: missing, cut short, pickled, or another kind of model.
        ValueError: a revision of a folder.
    """
    names = ("config.json", f"{stem}.safetensors", f"{stem}.safetensors.index.json", f"{stem}-*-of-*.safetensors")
    model = locate(place, path, subfolder, revision, names, lambda folder: _read(folder, stem))
    for key, values in kinds.items():
        if model.config.get(key) not in values:
            raise UserError(
                f"{model.folder / 'config.json'}: {key} is {model.config.get(key)!r}, but {place} takes "
                f"{' or '.join(values)}; set its parameters 'path' and 'subfolder'"
            )
    return model


def locate(
    place: str,
    path: str,
    subfolder: str | None,
    revision: str | None,
    names: Sequence[str],
    check: Callable[[Path], _Found],
) -> _Found:
    """What ``check`` makes of the folder ``path``/``subfolder``, on disk, in the hub's cache or on the hub.

    Args:
        place: what asks for it, for error lines.
        path: a folder, or ``owner/name`` on the hub.
        subfolder: a folder in it.
        revision: on the hub.
        names: what to download of that folder; ``*`` stands for any characters.
        check: called with the folder; raises ``UserError`` when files are missing.

    Raises:
        UserError: there is no such folder, here or on the hub, or ``check`` refuses it.
        ValueError: a revision of a folder.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        if revision is not None:
            raise ValueError(f"revision {revision!r} is for names on the hub, but {path!r} is a folder")
        return check(inside(local, subfolder, local) if subfolder else local)
    if local.exists() or not _HUB_NAME.fullmatch(path):
        problem = "is a file, not a folder that save_pretrained wrote" if local.exists() else "is missing"
        raise UserError(f"{path}: {problem}, needed by {place}; set its parameter 'path'")
    try:
        cached = check(_snapshot(place, path, subfolder, revision, names, only_cached=True))
    except UserError:
        return check(_snapshot(place, path, subfolder, revision, names, only_cached=False))
    return cached


def _snapshot(
    place: str, name: str, subfolder: str | None, revision: str | None, names: Sequence[str], only_cached: bool
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=[prefix + pattern for pattern in names],
            ignore_patterns=[f"{prefix}*/*"],  # because "*" stands for slashes too
            local_files_only=only_cached,
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        cause = error.__cause__ or error
        known = isinstance(cause, (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled))
        reason = _first_line(cause) if known else f"{type(cause).__name__}: is there a network?"
        raise UserError(
            f"{name}: no folder of this name, not in the hub's cache, and cannot be downloaded ({reason}), needed by "
            f"{place}; set its parameter 'path' to a folder, or fetch it where there is a network: "
            f"hf download {name}"
        ) from None
    root = Path(folder)
    return inside(root, subfolder, root) if subfolder else root


def _read(folder: Path, stem: str) -> ModelFolder:
    remedy = "copy or download the model again"
    config = read_json(folder / "config.json", "the model's configuration", "set 'path' to a model's folder", link=True)
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'}: is no JSON object; {remedy}")
    paths = _weight_files(folder, stem, remedy)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        shapes |= {key: tuple(weight.shape) for key, weight in read_header(path, remedy, link=True).items()}
    return ModelFolder(folder, config, tuple(paths), shapes)


def _weight_files(folder: Path, stem: str, remedy: str) -> list[Path]:
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if index.is_file() and not single.is_file():
        listed = read_json(index, "the list of weights", remedy, link=True)
        files = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
            raise UserError(f"{index}: has no weight_map of file names; {remedy}")
        paths = sorted({inside(folder, name, index) for name in files.values()})
    else:
        paths = [single]
    for path in paths:
        if not path.is_file():
            pickled = next(iter(sorted(folder.glob("*.bin"))), None)
            if pickled is not None:
                raise UserError(
                    f"{pickled}: weights are pickled, which can run code, and were not loaded; take a version of the "
                    f"model with {path.name}, or write one with save_pretrained(safe_serialization=True)"
                )
            raise UserError(f"{path}: the weights are missing; {remedy}")
    return paths


@contextmanager
def loading(folder: Path, what: str) -> Iterator[None]:
    """Around a library's import and loading: its advice is kept quiet, and its errors become one line.

    Raises:
        UserError: naming ``folder`` and ``what`` it was to be loaded as.
    """
    ensure_torchvision_importable()
    loggers = [logging.getLogger(name) for name in ("transformers", "diffusers", "timm", "xformers")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing narrower)
        reason = _first_line(error)
        raise UserError(f"{folder}: cannot be loaded as {what} ({reason}); copy or download the model again") from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def refuse_missing(missing: Sequence[str]) -> None:
    """Weights that the files lack: libraries would draw them at random and go on; call it inside ``loading``.

    Raises:
        ValueError: naming the first.
    """
    if missing:
        raise ValueError(f"{len(missing)} weights are missing, among them {min(missing)}")


def compute_type(name: str) -> torch.dtype:
    """The type in which a model computes.

    Raises:
        ValueError: not one of ``float32``, ``bfloat16``, ``float16``.
    """
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in types:
        raise ValueError(f"compute_dtype = {name!r} must be one of {', '.join(types)}")
    return types[name]


def parse_device(name: str) -> torch.device:
    """A torch device by name, there or not.

    Raises:
        ValueError: no such kind.
    """
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"device = {name!r} must be cpu, cuda, cuda:1 or the like") from None


def is_there(device: torch.device) -> bool:
    """Whether this machine has ``device``."""
    return device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()


def refuse_absent(device: torch.device, place: str) -> None:
    """Say no to a device that this machine lacks, rather than compute a hundred times more slowly.

    Raises:
        UserError: naming it.
    """
    if not is_there(device):
        raise UserError(f"{place}: this machine has no {str(device)!r}; set its parameter 'device'")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # "Error(s) in loading state_dict for X:" says nothing without the line below it.
    return (" ".join(lines[:2]) if lines and lines[0].endswith(":") else lines[0] if lines else type(error).__name__)[
        :300
    ]
