"""The first day on a GPU: what its steps notice, and what they print; here in small sizes on a CPU."""

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import smoke_commands
import smoke_gpu
import smoke_networks
import torch
from common import Report
from deadline import within
from smoke_commands import Place, Watched, at_most, megabytes, near, same, shown
from tiny_runs import ROOT
from virtual_cuda import runs as virtual_cuda

from ddm_lightning.core.errors import UserError

NAN = float("nan")
SCRIPT = str(ROOT / "benchmarks" / "smoke_gpu.py")


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path, torch.device("cpu"))


def take(steps, place, monkeypatch, numbers):
    monkeypatch.setattr(smoke_gpu, "STEPS", steps)
    report = Report("", ["", "", "", ""])
    smoke_gpu.take(numbers, place, report)
    return report


@pytest.mark.parametrize(
    ("check", "ok"),
    [
        (near("", 1.02, 1.0, 0.021), True),
        (near("", 0.97, 1.0, 0.021), False),
        (near("", NAN, 1.0, 0.021), False),
        (near("", -1.02, -1.0, 0.021), True),
        (at_most("", 2.0, 2.0), True),
        (at_most("", 2.1, 2.0), False),
        (at_most("", NAN, 2.0), False),
        (same("", 3, 3), True),
        (same("", None, 3), False),
        (shown("", "H100"), True),
    ],
)
def test_a_check_holds_within_its_tolerance_and_never_for_nan(check, ok):
    assert check.ok == ok


def test_steps_print_what_was_expected_beside_what_was_found(place, monkeypatch, capsys):
    steps = {1: ("names", lambda _: iter([shown("GPU", "H100")])), 2: ("sums", lambda _: iter([at_most("s", 0.5, 1)]))}
    report = take(steps, place, monkeypatch, [1, 2])
    out = capsys.readouterr().out
    assert "step 1: names\n  ok      GPU: H100\n" in out
    assert "step 2: sums\n  ok      s: 0.5  (expected: at most 1)\n" in out
    assert report.rows == [["1. GPU", "", "H100", "yes"], ["2. s", "at most 1", "0.5", "yes"]]
    assert report.figures["2. s"] == 0.5


def failing(_):
    raise RuntimeError("called a synchronizing CUDA operation\nmore")
    yield


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda _: iter([same("kernel", "MATH", "FLASH"), shown("later", "")]), "kernel: MATH; expected FLASH"),
        (failing, "called a synchronizing CUDA operation"),
    ],
)
def test_the_first_that_differs_is_the_last(step, words, place, monkeypatch, capsys):
    with pytest.raises(UserError, match=rf"step 1 \(first\).*{words}"):
        take({1: ("first", step), 2: ("second", failing)}, place, monkeypatch, [1, 2])
    out = capsys.readouterr().out
    assert "DIFFERS" in out
    assert not any(word in out for word in ("later", "second"))


@pytest.mark.parametrize(("code", "ends"), [(0, nullcontext()), (1, pytest.raises(SystemExit, match="2"))])
def test_without_a_gpu_the_virtual_one_is_tried(code, ends, monkeypatch, capsys):
    called = []

    def run(words, **_):
        called.append(words)
        return subprocess.CompletedProcess(words, code)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["smoke_gpu.py"])
    with ends:
        smoke_gpu.run(smoke_gpu.main)
    ((*_, folder),) = called
    assert folder.endswith("tests/virtual_cuda")
    assert "torch sees no CUDA device here" in capsys.readouterr().out


def test_a_gpu_that_is_asked_for_must_be_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda: torch sees no CUDA device"):
        smoke_gpu.main(["--device", "cuda"])


@pytest.mark.parametrize("factors", [[1, 1, 1, 1, 1, 1], [1, 1.1, 1, 1, 1, 1], [1, 1, 1, 1, 1, float("inf")]])
def test_a_kernel_that_is_wrong_or_not_finite_in_one_row_differs(factors, place, monkeypatch):
    right, rows = smoke_networks.attention, torch.tensor(factors, dtype=torch.bfloat16)[:, None, None, None]
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
        between.on_train_batch_start(SimpleNamespace(global_step=step), None)
    assert modes == ["default"] * 10 + (["error"] * 9 + ["default"]) * 2


HOLD = """
import os, pathlib, subprocess, sys, time
here = pathlib.Path(sys.argv[1])
def save(name):
    (here / name).touch()
    while not (here / f"seen-{name}").exists():
        time.sleep(0.01)
save("step-1")
held = b"x" * (80 << 20)
save("step-2")
os._exit(0)  # an end that first frees what is held may be seen, too
"""


def test_the_memory_of_a_process_is_seen_before_each_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "holding.py").write_text(HOLD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def look(pid, key):
        found = megabytes(pid, key)
        for name, is_seen in {"step-1": (tmp_path / "step-1").exists(), "step-2": found > 80}.items():
            if is_seen:
                (tmp_path / f"seen-{name}").touch()
        return found

    monkeypatch.setattr(smoke_commands, "megabytes", look)
    child = Watched("holding", str(tmp_path))
    with within(120):
        seen = child.memory(tmp_path)
    child.ended()
    assert 2 <= len(seen) <= 3  # before the first checkpoint, perhaps; before the second; at the end
    assert 80 <= seen[-1] < 140


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
    assert "student: done" in done.stdout.partition("step 11")[2]
