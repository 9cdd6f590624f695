"""Make torchvision importable if its compiled extension does not fit the installed torch.

torchmetrics (hence Lightning), clean-fid and Streaming import torchvision whenever it is installed.
On a machine with a CPU torch, pip may install a torchvision built for CUDA. Its extension ``_C`` cannot
be loaded, and ``import torchvision`` fails with ``RuntimeError: operator torchvision::nms does not
exist``, because it registers shape functions for missing operators. Declaring these operators without
an implementation is enough, as nothing in this package calls them.

Importing this module imports only the standard library.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.library import Library

# torch forgets the operators of a Library that is garbage collected.
_declared: list[Library] = []

# Schema of torchvision.ops.nms. Shape functions are registered by name, so it does for the other operators (qnms), too.
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def ensure_torchvision_importable() -> bool:
    """Make ``import torchvision`` work; call it before Lightning, torchmetrics or Streaming is imported.

    A torchvision with a fitting extension is not changed. Otherwise ``torchvision.transforms`` and
    ``torchvision.models`` work, while ``torchvision.ops.nms`` and ``torchvision.io`` raise as in any
    torchvision without its extension. Repeated calls do nothing.

    Returns:
        Whether torchvision is installed and can now be imported.
    """
    if "torchvision" in sys.modules or _declared:
        return True
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent
    if not _extension_loads(folder):
        _declare_operators(folder / "_meta_registrations.py")
    return True


def _extension_loads(folder: Path) -> bool:
    """Try to load ``_C`` of the torchvision in ``folder``, which defines the operators itself.

    Try this first: declaring an operator twice is an error.
    """
    import torch

    for candidate in sorted(folder.glob("_C.*")):
        try:
            torch.ops.load_library(str(candidate))
        except OSError:
            continue
        return True
    return False


def _declare_operators(registrations: Path) -> None:
    """Declare each operator for which the file ``registrations`` registers a shape function."""
    import torch

    if not registrations.is_file():
        return
    code = registrations.read_text(encoding="utf-8")
    names = set(re.findall(r"""register_fake\(\s*["']torchvision::(\w+)["']""", code))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in sorted(names):
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + _SCHEMA)
    _declared.append(library)
