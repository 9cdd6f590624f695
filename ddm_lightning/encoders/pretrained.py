"""Pretrained models on disk: found, checked, hashed and loaded, without running code from their folders.

A model is a folder written by ``save_pretrained`` (``config.json`` and safetensors), or the name of one on the
Hugging Face hub, which is looked up in the local cache first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.checks import one_of, option
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import inside, read_json, sha256_file, sha256_json
from ddm_lightning.core.registry import require
from ddm_lightning.core.weights import read_header
from ddm_lightning.encoders.interfaces import Images

EXTRA = "latents"  # the extra of setup.py that installs the libraries

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_REMEDY = "copy or download the model again"
# On a CPU, 16 images per batch are a third faster than 64: the activations stay in its caches.
_IMAGES_AT_ONCE = {"cpu": 16, "cuda": 256}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class PretrainedParams:
    """Parameters of every ``Pretrained``."""

    subfolder: str | None = None
    """Folder of the model inside ``path``."""
    revision: str | None = None
    """Commit, tag or branch on the hub; folders ignore it."""
    device: str = "cpu"
    """Torch device to compute on."""
    compute_dtype: str | None = option(None, check=one_of(_DTYPES))
    """``float32``, ``bfloat16`` or ``float16``; null for the model's own: see ``Pretrained.dtype_on``."""


class Pretrained:
    """A model of a library: found and checked when built, loaded on first use.

    Args:
        path: folder of the model or of its pipeline, or ``owner/name`` on the Hugging Face hub.
        params: those of ``PretrainedParams``.

    Attributes:
        folder: the model's.
        config: content of ``config.json``.
        weights: the safetensors files, sorted; their headers are complete.
        shapes: name of a weight in the files -> shape.

    Raises:
        UserError: a package, a folder or a file is missing, cut short, pickled, or of another kind.
        RuntimeError: no torch device has this name.
    """

    packages: tuple[str, ...]
    """Distributions whose version affects the result; the first is the library that has the model's class."""
    params: ClassVar[type] = PretrainedParams
    """Dataclass of the ``**params`` of a subclass's constructor, for ``Registry.check``."""
    place: ClassVar[str]
    """Name in error lines, such as ``image encoder 'diffusers-vae'``."""
    stem: ClassVar[str] = "model"
    """File name of the weights before ``.safetensors``."""
    kind_key: ClassVar[str] = "model_type"
    """Key of ``config.json`` that tells the kind of model."""
    kinds: ClassVar[Mapping[str, str]]
    """Accepted kind -> the library's class."""
    module: ClassVar[str | None] = None
    """Module of these classes; None is the library itself."""
    is_safe_in_bfloat16: ClassVar[bool] = False
    """Whether GPUs compute in bfloat16 if no ``compute_dtype`` is given."""

    def __init__(self, path: str, **params: Any) -> None:
        given = PretrainedParams(**params)
        self.compute_dtype = _DTYPES.get(given.compute_dtype or "")
        self.device = torch.device(given.device)
        require(self.place, *self.packages, extra=EXTRA)
        self._path = path
        self._revision = given.revision
        stem = self.stem
        names = ["config.json", f"{stem}.safetensors", f"{stem}.safetensors.index.json", f"{stem}-*-of-*.safetensors"]
        self.folder = self._find(given.subfolder, names, self._read)
        kind = self.config.get(self.kind_key)
        if str(kind) not in self.kinds:
            raise UserError(
                f"{self.folder / 'config.json'}: {self.kind_key} is {kind!r}, but {self.place} takes "
                f"{' or '.join(self.kinds)}; set its parameters 'path' and 'subfolder'"
            )

        self.model_class = self.kinds[str(kind)]
        self._networks = dict[tuple[torch.device, torch.dtype], Any]()

    def provenance(self) -> dict[str, str]:
        """Return the hashes of the weights and of the configuration, and the hub's commit if it is known.

        A single file of weights has its own SHA-256, as shown on the hub.
        """
        if len(self.weights) == 1:
            weights = sha256_file(self.weights[0])
        else:
            weights = sha256_json({path.name: sha256_file(path) for path in self.weights})

        config = {path.name: sha256_file(path) for path in self._config_files()}
        facts = {"weights_sha256": weights, "config_sha256": sha256_json(config)}
        # The hub's cache has one folder per commit.
        commit = re.search(r"/snapshots/([0-9a-f]{40})(?:/|$)", self.folder.as_posix())
        if commit:
            facts["revision"] = commit[1]

        return facts

    def _config_files(self) -> list[Path]:
        return [self.folder / "config.json"]

    def _find(self, subfolder: str | None, names: Sequence[str], check: Callable[[Path], object]) -> Path:
        """Find a folder on disk, in the hub's cache, or on the hub, and download it from there.

        Args:
            subfolder: folder inside the model's ``path``.
            names: files to download from that folder; ``*`` is a wildcard.
            check: raises ``UserError`` when files are missing.
        """

        def checked(root: Path) -> Path:
            folder = inside(root, subfolder, root) if subfolder else root
            check(folder)
            return folder

        local = Path(self._path).expanduser()
        if local.is_dir():
            return checked(local)
        if local.exists() or not _HUB_NAME.fullmatch(self._path):
            raise UserError(f"{self._path}: is no folder, needed by {self.place}; set its parameter 'path'")

        with suppress(UserError):
            return checked(self._snapshot(subfolder, names, only_cached=True))

        return checked(self._snapshot(subfolder, names, only_cached=False))

    def _snapshot(self, subfolder: str | None, names: Sequence[str], only_cached: bool) -> Path:
        from huggingface_hub import errors, snapshot_download

        name = self._path
        prefix = f"{subfolder.strip('/')}/" if subfolder else ""
        try:
            found = snapshot_download(
                name,
                revision=self._revision,
                local_files_only=only_cached,
                allow_patterns=[prefix + pattern for pattern in names],
                ignore_patterns=[f"{prefix}*/*"],  # because "*" stands for slashes too
            )
        except (OSError, errors.HFValidationError) as error:
            raise UserError(
                f"{name}: is not a folder, not in the hub's cache, and cannot be downloaded "
                f"({first_line(error.__cause__ or error)}), needed by {self.place}; "
                f"set its parameter 'path' to a folder, or download it with a network: hf download {name}"
            ) from None

        return Path(found)

    def _read(self, folder: Path) -> None:
        self.config = read_json(
            folder / "config.json", "the model's configuration", "set 'path' to a model's folder", link=True
        )
        self.weights = _weight_files(folder, self.stem)
        self.shapes = {}
        for file in self.weights:
            for name, weight in read_header(file, _REMEDY, link=True).items():
                self.shapes[name] = tuple(weight.shape)

    def _load(self, **settings: Any) -> Any:
        """Load the model from the folder: safetensors only, no network, no weight missing, no progress bar."""
        with loading(self.folder, self.place):
            import_module(self.packages[0]).utils.logging.disable_progress_bar()
            classes = import_module(self.module or self.packages[0])
            network, info = getattr(classes, self.model_class).from_pretrained(
                self.folder, use_safetensors=True, local_files_only=True, output_loading_info=True, **settings
            )
            missing = info["missing_keys"]
            if missing:  # libraries fill them with random numbers
                raise ValueError(f"{len(missing)} weights are missing, among them {min(missing)}")

        return network.eval().requires_grad_(False)

    def _network(self, device: torch.device, dtype: torch.dtype | None = None) -> Any:
        """Return the model on a device, loaded once for each type of its numbers (None: ``dtype_on``)."""
        dtype = dtype or self.dtype_on(device)
        if (device, dtype) not in self._networks:
            self._networks[device, dtype] = on_device(self._load(dtype=dtype), device)

        return self._networks[device, dtype]

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """Return the given ``compute_dtype``; else bfloat16 where it is safe and the GPU has it, or float32."""
        if self.compute_dtype is not None:
            return self.compute_dtype

        if self.is_safe_in_bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16  # which GPUs have from Ampere on

        return torch.float32

    def _found_device(self, or_cpu: bool = False) -> torch.device:
        """Return the device; if the machine lacks it, return the CPU or raise ``UserError``."""
        if self.device.type != "cuda" or (self.device.index or 0) < torch.cuda.device_count():
            return self.device
        if or_cpu:
            return torch.device("cpu")

        raise UserError(f"{self.place}: this machine has no {str(self.device)!r}; set its parameter 'device'")


def on_device(network: Any, device: torch.device) -> Any:
    """Move an image network to a device; on a GPU in channels-last format, which tensor cores prefer."""
    if device.type == "cuda":
        return network.to(device, memory_format=torch.channels_last)

    return network.to(device)


def _weight_files(folder: Path, stem: str) -> list[Path]:
    whole = folder / f"{stem}.safetensors"
    if whole.is_file():
        return [whole]

    parts = sorted(folder.glob(f"{stem}-*-of-?????.safetensors"))
    if not parts or len(parts) != int(parts[0].stem[-5:]):
        raise UserError(
            f"{whole}: weights are missing (pickled ones in *.bin are not loaded, because they can run code); "
            f"{_REMEDY}, in a version with safetensors or by save_pretrained(safe_serialization=True)"
        )

    return parts


@contextmanager
def loading(folder: Path, place: str) -> Iterator[None]:
    """Silence a library's advice while it is imported and loads files, and turn its errors into one line.

    Raises:
        UserError: naming ``folder`` and ``place``.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing narrower)
        raise UserError(f"{folder}: cannot be loaded by {place} ({first_line(error)}); {_REMEDY}") from None
    finally:
        logging.disable(disabled)


def encode_in_batches(
    images: Images,
    encode: Callable[[Float[Tensor, "m 3 h w"]], Tensor],
    row_shape: Sequence[int],
    device: torch.device,
    batch_size: int | None = None,
    dtype: str = "float32",
) -> np.ndarray:
    """Apply ``encode`` to batches of pixels, float32 from 0 to 255 on ``device``; return rows of ``row_shape``."""
    batch_size = batch_size or _IMAGES_AT_ONCE.get(device.type, _IMAGES_AT_ONCE["cuda"])
    out = np.empty((len(images), *row_shape), dtype)
    for start in range(0, len(images), batch_size):
        block = np.array(images[start : start + batch_size])
        # Channels last in memory, like the array.
        pixels = torch.from_numpy(block).permute(0, 3, 1, 2).to(device).float()
        with np.errstate(over="ignore"):  # prepare refuses infinite numbers
            out[start : start + len(block)] = encode(pixels).float().cpu().numpy()

    return out
