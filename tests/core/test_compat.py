import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddm_lightning.core import compat

ROOT = Path(__file__).parents[2]


def run(code, *options):
    """``code`` in a fresh interpreter, which has imported nothing yet."""
    code = f"import gc; gc.disable()  # imports are a third faster without\n{code}"
    return subprocess.run([sys.executable, *options, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("name", ["_C.so", "_C_stable.so"])  # the second one from 0.29 on
def test_a_torchvision_that_fits_is_left_alone(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "_meta_registrations.py").write_text('register_fake("torchvision::never_declared_here")\n')
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(compat, "_declared", [])
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(compat.PathFinder, "find_spec", lambda _: spec)
    assert compat._BeforeTorchvision.find_spec("torchvision") is None
    assert loaded == [str(tmp_path / name)]
    assert not hasattr(torch.ops.torchvision, "never_declared_here")


def test_only_operators_that_do_not_exist_are_declared(tmp_path, monkeypatch):
    registrations = tmp_path / "_meta_registrations.py"
    registrations.write_text(
        '@torch.library.register_fake("torchvision::first_of_a_test")\ndef a(): ...\n'
        "@torch.library.register_fake(\n    'torchvision::second_of_a_test'\n)\ndef b(): ...\n"
        '@register_meta("third_of_a_test")\ndef c(): ...\n'
    )
    declared = []
    monkeypatch.setattr(compat, "_declared", declared)
    compat._declare_operators(registrations)
    compat._declare_operators(registrations)  # A second declaration of one operator would raise.
    assert hasattr(torch.ops.torchvision, "first_of_a_test")
    assert hasattr(torch.ops.torchvision, "second_of_a_test")
    assert not hasattr(torch.ops.torchvision, "third_of_a_test")
    assert len(declared) == 2


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_used_and_all_of_it_stays_usable():
    """Encoders by workers of data loaders, networks by readers of artifacts, members by what starts them, training."""
    code = """
import sys
def loaded(*names):
    print([name for name in names if name in sys.modules], flush=True)

from ddm_lightning.core import compat
compat.import_light("streaming", "streaming.base", first="streaming.base.of_another_version")
assert "streaming" not in sys.modules

import ddm_lightning.encoders
loaded("diffusers", "transformers", "huggingface_hub")
from ddm_lightning.core.registry import EXPERTS, ROUTERS
EXPERTS.get("dit"), EXPERTS.get("mmdit"), ROUTERS.get("router-dit")
loaded("streaming", "xformers", "torchvision")
import ddm_lightning.islands.local, ddm_lightning.members.preflight
loaded("lightning")

import ddm_lightning.training.fit
loaded("scipy", "sklearn", "pandas", "transformers", "torchvision")
import lightning, streaming, torchmetrics
from streaming.base import MDSWriter
print(streaming.__version__ > "0", issubclass(streaming.StreamingDataset, object), MDSWriter.__name__)
print(torchmetrics.__version__ > "1", torchmetrics.Metric.__name__, torchmetrics.aggregation.__name__)

import torch, torchvision  # importable because ddm_lightning was imported before
from torchvision.transforms.v2 import functional
assert functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4)
print("importable", flush=True)
torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
"""
    done = run(code)
    used = ["True True MDSWriter", "True Metric torchmetrics.aggregation", "importable"]
    assert [line for line in done.stdout.splitlines() if line] == [*["[]"] * 4, *used], done.stderr
    # Where this machine's torchvision fits its torch, the operators are there.
    assert done.returncode == 0 or "Couldn't load custom C++ ops" in done.stderr
