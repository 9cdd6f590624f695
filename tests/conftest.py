"""What holds for every test: one thread, shapes checked at run time, quick tests first."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

# Before torch is imported: two OpenMP threads on two shared cores are slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from ddm_lightning.core.compat import defer_torchmetrics, ensure_torchvision_importable

ensure_torchvision_importable()
defer_torchmetrics()

import pytest
import torch
from hypothesis import settings
from jaxtyping import config, install_import_hook

# Before anything imports them, so that every annotation in them is checked at each call.
install_import_hook(
    ["ddm_lightning.flow", "ddm_lightning.networks", "ddm_lightning.ensemble"], "runtime_types.check_types"
)

from tiny_runs import RANK_VARIABLES
from tiny_runs import bucket_finished as bucket_finished
from tiny_runs import bucket_prepared as bucket_prepared
from tiny_runs import bucket_run as bucket_run
from tiny_runs import finished_run as finished_run
from tiny_runs import long_run as long_run
from tiny_runs import quick_prepare as quick_prepare
from tiny_runs import tiny_prepared as tiny_prepared
from tiny_runs import tiny_run as tiny_run

# The same examples each time, and however slow the machine is that others share.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")
torch.set_num_threads(1)
# Of what is written here, nothing has to survive a power failure.
os.fsync = lambda _: None
for ignored, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        # So shells start what runs in their background or by nohup, and all programs started here would be deaf, too.
        signal.signal(ignored, handler)


def pytest_configure(config):
    """Let workers of pytest-xdist take files in the order of the tests, not by their number."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Skip what this machine cannot run, and put ``slow`` tests last; first where workers share the files.

    These then end within a few seconds of one another.
    """
    without_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(without_gpu)
    shared = "PYTEST_XDIST_WORKER" in os.environ
    items.sort(key=lambda item: (item.get_closest_marker("slow") is not None) != shared)


@pytest.fixture(autouse=True)
def _own_environment():
    """What training tells Streaming about ranks must not reach the next test, nor a process that it starts."""
    for name in RANK_VARIABLES:  # a fixture of the whole module may have left them
        os.environ.pop(name, None)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def slurm_cluster():
    """SLURM, started here if there is none and root allows; it stays for other tests: ``slurm.sh stop`` ends it."""
    script = Path(__file__).parent / "islands" / "slurm.sh"
    if os.getuid() != 0:
        if shutil.which("sinfo") and subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0:
            return
        pytest.skip(f"needs SLURM; as root: {script} start")
    done = subprocess.run([script, "start"], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"{script} start: {done.stderr.strip()}")


@pytest.fixture(autouse=True)
def _slurm_where_marked(request):
    if request.node.get_closest_marker("slurm"):
        request.getfixturevalue("slurm_cluster")


@pytest.fixture(autouse=True)
def _no_heap_of_open_files():
    """Streaming keeps the shared memory of every dataset open until the process ends, and these tests make hundreds.

    Here it is closed when its dataset is gone.
    """
    memory = sys.modules.get("streaming.base.shared.memory")
    if memory is not None:
        memory.atexit = SimpleNamespace(register=_close_when_gone)
    yield
    if len([*Path("/dev/fd").iterdir()]) > 300:
        gc.collect()


def _close_when_gone(cleanup):
    shared = cleanup.__self__
    weakref.finalize(shared, _close, shared.created_shms, shared.opened_shms)


def _close(created, opened):
    for memory in (*created, *opened):
        if memory.buf is not None:
            memory.close()
            if memory in created:
                with suppress(FileNotFoundError):
                    memory.unlink()


@pytest.fixture(autouse=True)
def torch_settings():
    """Settings of the whole process, which some tests change as for a GPU."""
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.set_num_threads(1)


@pytest.fixture
def unchecked_types():
    """For a test that hands in a wrong shape or type to see what the code itself says of it."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
