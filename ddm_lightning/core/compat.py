"""Imports of packages that cannot, or need not, be imported whole.

torchmetrics (hence Lightning), clean-fid and Streaming import torchvision whenever it is installed.
On a machine with a CPU torch, pip may install a torchvision built for CUDA. Its extension ``_C`` cannot
be loaded, and ``import torchvision`` fails with ``RuntimeError: operator torchvision::nms does not
exist``, because it registers shape functions for missing operators. Declaring these operators without
an implementation is enough, as nothing in this package calls them.

Lightning needs two classes of torchmetrics, and this package a few modules of Streaming. Both packages import
everything they have at once, and with it scipy, scikit-learn, pandas, transformers and torchvision: four seconds.
After ``import_light`` they do so only when something asks for more.

Importing this module imports only the standard library.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.library import Library

# torch forgets the operators of a Library that is garbage collected.
_declared: list[Library] = []

# Schema of torchvision.ops.nms. Shape functions are registered by name, so it serves the other operators (qnms), too.
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def ensure_torchvision_importable() -> None:
    """Make ``import torchvision`` work, whoever imports it later. Importing ``ddm_lightning`` calls this.

    It imports nothing itself. A torchvision with a fitting extension is not changed. Otherwise
    ``torchvision.transforms`` and ``torchvision.models`` work, while ``torchvision.ops.nms`` and ``torchvision.io``
    raise as in any torchvision without its extension. Repeated calls do nothing.
    """
    if _BeforeTorchvision not in sys.meta_path:
        sys.meta_path.insert(0, _BeforeTorchvision)


class _BeforeTorchvision:
    """A finder that finds nothing, but notices that torchvision is about to be imported."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name != "torchvision" or _declared:
            return

        spec = PathFinder.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent
            if not _extension_loads(folder):
                _declare_operators(folder / "_meta_registrations.py")


def hush_xformers() -> None:
    """Let xformers, which diffusers imports, not warn in six lines that a torch without CUDA cannot use it."""
    logging.getLogger("xformers").addFilter(lambda _: sys.modules["torch"].version.cuda is not None)


class _DeferredPackage(ModuleType):
    """A package whose ``__init__`` runs at the first use of a name that is none of its modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")  # asked of every module
        if importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")

        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def defer_torchmetrics() -> None:
    """Let Lightning start without the parts of torchmetrics that it does not use; call it before importing it."""
    names = {"Metric": "metric", "MetricCollection": "collections", "__version__": "__about__"}
    import_light("torchmetrics", first="torchmetrics.utilities", names=names)


def import_light(*packages: str, first: str, names: Mapping[str, str] | None = None) -> None:
    """Import a module of a package without what the package itself imports.

    Nothing is taken away: ``torchmetrics.Accuracy`` and ``streaming.StreamingDataset`` import the rest when used. A
    package that is imported already stays as it is, and one of another version, with other modules, is left to be
    imported whole.

    Args:
        packages: the package, then its subpackages whose ``__init__`` must not run either.
        first: the module to import.
        names: names that other packages take from the package, each with the module in it that defines the name.
    """
    package = packages[0]
    if package in sys.modules:
        return

    try:
        for name in packages:
            spec = importlib.util.find_spec(name)
            assert spec is not None  # setup.py requires it
            deferred = importlib.util.module_from_spec(spec)
            deferred.__class__ = _DeferredPackage
            deferred.__dict__["_logger"] = logging.getLogger(name)  # the modules of torchmetrics take it from there
            sys.modules[name] = deferred

        importlib.import_module(first)
        for name, place in (names or {}).items():
            module = importlib.import_module(f"{package}.{place}")
            setattr(sys.modules[package], name, getattr(module, name))
    except (ImportError, AttributeError):
        for name in list(sys.modules):
            if name.partition(".")[0] == package:
                del sys.modules[name]


def _extension_loads(folder: Path) -> bool:
    """Try to load ``_C``, or ``_C_stable`` from 0.29 on, of the torchvision in ``folder``: it defines the operators.

    Try this first: declaring an operator twice ends the process.
    """
    import torch

    for candidate in sorted(folder.glob("_C*.*")):
        try:
            torch.ops.load_library(str(candidate))
        except OSError:
            continue

        return True

    return False


def _declare_operators(registrations: Path) -> None:
    """Declare each operator for which the file ``registrations`` registers a shape function."""
    import torch

    code = registrations.read_text(encoding="utf-8")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in sorted({*re.findall(r"""register_fake\(\s*["']torchvision::(\w+)["']""", code)}):
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + _SCHEMA)

    _declared.append(library)
