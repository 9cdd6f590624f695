"""Pretrained models on disk: found, checked, hashed and loaded, without running code from their folders.

A model is a folder written by ``save_pretrained`` (``config.json`` and safetensors), or the name of one on the
Hugging Face hub, which is looked up in the local cache first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ddm_lightning.core.compat import ensure_torchvision_importable
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import inside, read_json, sha256_file, sha256_json
from ddm_lightning.core.registry import require
from ddm_lightning.core.weights import read_header

EXTRA = "latents"  # the extra of setup.py that installs the libraries

_Found = TypeVar("_Found")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_REMEDY = "copy or download the model again"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk; the headers of its files are complete."""

    folder: Path
    config: Mapping[str, Any]
    """Content of ``config.json``."""
    weights: tuple[Path, ...]
    """Its safetensors files, sorted."""
    shapes: Mapping[str, tuple[int, ...]]
    """Weight's name in the files -> shape."""

    def provenance(self, others: Sequence[Path] = ()) -> dict[str, str]:
        """Hash the weights, and ``config.json`` with ``others``; add the hub's commit if it is known.

        A single file of weights has its own SHA-256, as shown on the hub.
        """
        hashes = {path.name: sha256_file(path) for path in self.weights}
        weights = next(iter(hashes.values())) if len(hashes) == 1 else sha256_json(hashes)
        config = {path.name: sha256_file(path) for path in (self.folder / "config.json", *others)}
        found = {"weights_sha256": weights, "config_sha256": sha256_json(config)}
        # The hub's cache has one folder per commit.
        commit = re.search(r"/snapshots/([0-9a-f]{40})(?:/|$)", self.folder.as_posix())
        return {**found, "revision": commit.group(1)} if commit else found


class Pretrained:
    """A model of a library: found and checked when built, loaded on first use.

    Args:
        path: folder of the model or of its pipeline, or ``owner/name`` on the Hugging Face hub.
        subfolder: folder of the model inside ``path``.
        revision: commit, tag or branch on the hub.
        device: torch device to compute on.
        compute_dtype: ``float32``, ``bfloat16`` or ``float16``.

    Raises:
        UserError: a package, a folder or a file is missing, cut short, or of another kind.
        ValueError: a parameter is outside its choices.
    """

    packages: tuple[str, ...]
    place: ClassVar[str]
    """Name in error lines."""
    loaded_as: ClassVar[str]
    """The library's model, in error lines."""
    stem: ClassVar[str] = "model"
    kinds: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Key of ``config.json`` -> accepted values."""

    def __init__(self, path: str, subfolder: str | None, revision: str | None, device: str, compute_dtype: str) -> None:
        if compute_dtype not in _DTYPES:
            raise ValueError(f"compute_dtype = {compute_dtype!r} must be one of {', '.join(_DTYPES)}")
        self.compute_dtype = _DTYPES[compute_dtype]
        try:
            self.device = torch.device(device)
        except RuntimeError:
            raise ValueError(f"device = {device!r} must be cpu, cuda, cuda:1 or the like") from None
        require(self.place, *self.packages, extra=EXTRA)
        self.model = find_model(self.place, path, subfolder, revision, self.stem, self.kinds)

    def provenance(self) -> dict[str, str]:
        """Return the hashes of weights and configuration, and the hub's commit."""
        return self.model.provenance()

    def _load(self, library: str, kind: str, **settings: Any) -> Any:
        """Load ``library.kind`` from the folder: safetensors only, no network, no weight missing."""
        with loading(self.model.folder, self.loaded_as):
            network, info = getattr(import_module(library), kind).from_pretrained(
                self.model.folder, use_safetensors=True, local_files_only=True, output_loading_info=True, **settings
            )
            if missing := info["missing_keys"]:  # libraries fill them with random numbers
                raise ValueError(f"{len(missing)} weights are missing, among them {min(missing)}")
        return network.eval().requires_grad_(False)

    def _require_device(self) -> None:
        if not is_there(self.device):
            raise UserError(f"{self.place}: this machine has no {str(self.device)!r}; set its parameter 'device'")

    def _device_or_cpu(self) -> torch.device:
        return self.device if is_there(self.device) else torch.device("cpu")


def find_model(
    place: str, path: str, subfolder: str | None, revision: str | None, stem: str, kinds: Mapping[str, Sequence[str]]
) -> ModelFolder:
    """Find the folder of a model; download it if it is named on the hub and not in the cache.

    Args:
        place: begins error lines ("image encoder 'diffusers-vae'").
        path: a folder, or ``owner/name`` on the hub.
        subfolder: folder of the model inside ``path``.
        revision: commit, tag or branch on the hub; None is its main branch.
        stem: file name of the weights before ``.safetensors``.
        kinds: key of ``config.json`` -> accepted values.

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
    """Return ``check(folder)`` for the folder ``path``/``subfolder`` on disk, in the hub's cache or on the hub.

    Args:
        place: for error lines.
        path: a folder, or ``owner/name`` on the hub.
        subfolder: a folder in it.
        revision: on the hub.
        names: files to download from that folder; ``*`` is a wildcard.
        check: raises ``UserError`` when files are missing.

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
        return check(_snapshot(place, path, subfolder, revision, names, only_cached=True))
    except UserError:
        return check(_snapshot(place, path, subfolder, revision, names, only_cached=False))


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
            f"{place}; set its parameter 'path' to a folder, or download it with a network: hf download {name}"
        ) from None
    root = Path(folder)
    return inside(root, subfolder, root) if subfolder else root


def _read(folder: Path, stem: str) -> ModelFolder:
    config = read_json(folder / "config.json", "the model's configuration", "set 'path' to a model's folder", link=True)
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'}: is no JSON object; {_REMEDY}")
    paths = _weight_files(folder, stem)
    headers = [read_header(path, _REMEDY, link=True) for path in paths]
    shapes = {key: tuple(weight.shape) for header in headers for key, weight in header.items()}
    return ModelFolder(folder, config, tuple(paths), shapes)


def _weight_files(folder: Path, stem: str) -> list[Path]:
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    paths = [single]
    if index.is_file() and not single.is_file():
        try:
            names = set(read_json(index, "the list of weights", _REMEDY, link=True)["weight_map"].values())
            paths = sorted(inside(folder, name, index) for name in names)
        except (TypeError, KeyError, AttributeError):
            raise UserError(f"{index}: has no weight_map of file names; {_REMEDY}") from None
    for path in paths:
        if not path.is_file():
            if pickled := sorted(folder.glob("*.bin")):
                raise UserError(
                    f"{pickled[0]}: weights are pickled, which can run code, and were not loaded; use a version of the "
                    f"model with {path.name}, or write one with save_pretrained(safe_serialization=True)"
                )
            raise UserError(f"{path}: the weights are missing; {_REMEDY}")
    return paths


@contextmanager
def loading(folder: Path, what: str) -> Iterator[None]:
    """Silence a library's advice while it is imported and loads a model, and turn its errors into one line.

    Raises:
        UserError: naming ``folder`` and ``what``, the library's model.
    """
    ensure_torchvision_importable()
    loggers = map(logging.getLogger, ("transformers", "diffusers", "timm", "xformers"))
    levels = {logger: logger.level for logger in loggers}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        yield
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing narrower)
        reason = _first_line(error)
        raise UserError(f"{folder}: cannot be loaded as {what} ({reason}); {_REMEDY}") from None
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def is_there(device: torch.device) -> bool:
    """Whether this machine has ``device``."""
    return device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()


def image_batches(
    images: UInt8[np.ndarray, "n h w 3"], batch_size: int, device: torch.device
) -> Iterator[tuple[slice, Float[Tensor, "m 3 h w"]]]:
    """Yield the rows of each batch and its pixels on ``device``, float32 from 0 to 255."""
    for start in range(0, len(images), batch_size):
        rows = slice(start, min(start + batch_size, len(images)))
        # Channels last in memory, like the array.
        yield rows, torch.from_numpy(np.array(images[rows])).permute(0, 3, 1, 2).to(device).float()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # "Error(s) in loading state_dict for X:" needs the line after it.
    return (" ".join(lines[:2]) if lines and lines[0].endswith(":") else lines[0] if lines else type(error).__name__)[
        :300
    ]
