"""The first day on a GPU: what its steps notice, and what they print; here in small sizes on a CPU."""

import os
import subprocess
import sys
from argparse import Namespace

import pytest
import smoke_gpu
import smoke_networks
import torch
from common import Report
from smoke_commands import Place, at_most, near, same, shown
from tiny_runs import ROOT
from virtual_cuda import runs as virtual_cuda

from ddm_lightning.core.errors import UserError

NAN = float("nan")
SCRIPT = str(ROOT / "benchmarks" / "smoke_gpu.py")


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path, torch.device("cpu"))


def sums(_):
    """Sums."""
    yield shown("GPU", "H100")
    yield at_most("s", 0.5, 1)


@pytest.mark.parametrize(
    ("check", "ok"),
    [
        (near("", 1.02, 1.0, 0.021), True),
        (near("", 0.97, 1.0, 0.021), False),
        (near("", NAN, 1.0, 0.021), False),
        (at_most("", 2.1, 2.0), False),
        (at_most("", NAN, 2.0), False),
        (same("", None, 3), False),
        (shown("", "H100"), True),
    ],
)
def test_a_check_holds_within_its_tolerance_and_never_for_nan(check, ok):
    assert check.ok == ok


def differing(_):
    """First."""
    yield same("kernel", "MATH", "FLASH")
    yield shown("later", "")


def failing(_):
    """First."""
    raise RuntimeError("called a synchronizing CUDA operation\nmore")
    yield


def test_a_step_prints_what_was_expected_beside_what_was_found(place, monkeypatch, capsys):
    monkeypatch.setattr(smoke_gpu, "STEPS", {1: sums})
    report = Report("", [""] * 3)

    smoke_gpu.take([1], place, report)

    out = capsys.readouterr().out
    assert "step 1: Sums.\n  ok      GPU: H100\n  ok      s: 0.5  (expected: at most 1)\n" in out
    assert report.rows == [["1. GPU", "", "H100"], ["1. s", "at most 1", "0.5"]]
    assert report.figures["1. s"] == 0.5


@pytest.mark.parametrize(
    ("step", "words"),
    [(differing, r"kernel: MATH  \(expected: FLASH"), (failing, "called a synchronizing CUDA operation")],
)
def test_the_first_that_differs_is_the_last(step, words, place, monkeypatch, capsys):
    monkeypatch.setattr(smoke_gpu, "STEPS", {1: step, 2: sums})

    with pytest.raises(UserError, match=rf"step 1 \(First.\).*{words}"):
        smoke_gpu.take([1, 2], place, Report("", [""] * 3))

    out = capsys.readouterr().out
    assert "DIFFERS" in out
    assert not any(word in out for word in ("later", "Sums"))


def test_a_gpu_that_is_asked_for_must_be_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda: torch sees no CUDA device"):
        smoke_gpu.main(["--device", "cuda"])


@pytest.mark.parametrize("factors", [[1, 1, 1, 1, 1, 1], [1, 1.1, 1, 1, 1, 1], [1, 1, 1, 1, 1, float("inf")]])
def test_a_kernel_that_is_wrong_or_not_finite_in_one_row_differs(factors, place, monkeypatch):
    right = smoke_networks.attention
    rows = torch.tensor(factors, dtype=torch.bfloat16)[:, None, None, None]
    monkeypatch.setattr(smoke_networks, "attention", lambda *qkv, backend: right(*qkv, backend) * rows)
    assert all(check.ok for check in smoke_networks.kernels(place)) == (set(factors) == {1})


def test_a_checkpoint_that_reads_back_otherwise_differs(place, monkeypatch):
    assert all(check.ok for check in smoke_networks.checkpoint(place))
    monkeypatch.setattr(smoke_networks, "read_tensors", lambda *_: None)
    *_, last = smoke_networks.checkpoint(place)
    assert not last.ok


def test_waiting_is_allowed_until_the_curves_have_begun_and_in_steps_that_log(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    between = smoke_networks.Between(on_gpu=True)
    for step in range(smoke_networks.NUM_STEPS):
        between.on_train_batch_start(Namespace(global_step=step), None)
    assert modes == ["default"] * 10 + (["error"] * 9 + ["default"]) * 2


INSTALL = """
import sys
if not any("compile_worker" in word for word in sys.orig_argv):
    import torch
    from virtual_cuda import device
    device.install()
"""


@pytest.mark.long
def test_steps_that_need_no_compiler_on_a_virtual_gpu(tmp_path):
    """All processes that they start get the device by Python's ``sitecustomize``."""
    (tmp_path / "sitecustomize.py").write_text(INSTALL)
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "tests")))}
    words = ["--device", "cuda", "--quick", "--steps", "5", "6", "9", "10"]
    assert "as expected: 4 steps" in virtual_cuda.start([SCRIPT, *words], environment=paths)


@pytest.mark.long
def test_the_other_steps_in_small_on_a_cpu():
    # In a process of its own: what is compiled has no annotations that are checked at each call.
    words = [sys.executable, SCRIPT, "--device", "cpu", "--steps", "1", "2", "3", "4", "7", "8", "9", "11"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as expected: 8 steps" in done.stdout
    assert "ok      evaluate under torchrun" in done.stdout
