import os
import platform
import subprocess
import sys

import pytest

from ddm_lightning.core import processes

CODE = """
import gc
from ddm_lightning.core import processes
before = gc.get_threshold()
processes.end_imports()
assert gc.get_freeze_count() == 0, "who did not begin keeps its collector as it is"
processes.begin()
assert gc.get_threshold()[0] > 10 * before[0]
processes.end_imports()
assert gc.get_threshold() == before and gc.get_freeze_count() > 1000
"""


STOPPED = """
import os, signal, sys
from ddm_lightning.core import processes
processes.stop_as_by_ctrl_c()
try:
    os.kill(os.getpid(), int(sys.argv[1]))
    signal.pause()
except KeyboardInterrupt:
    raise SystemExit(7)
"""


@pytest.mark.parametrize("number", processes.STOP_SIGNALS)
def test_a_stop_while_a_fit_starts_is_as_one_by_ctrl_c(number):
    assert subprocess.run([sys.executable, "-c", STOPPED, str(int(number))], check=False, timeout=60).returncode == 7


def test_the_collector_waits_for_the_imports_and_is_then_as_before():
    subprocess.run([sys.executable, "-c", CODE], check=True)


FAULTS = """
import resource, sys
from ddm_lightning.core import processes
if sys.argv[1] == "kept":
    processes.keep_heap()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [bytearray(4 << 20) for _ in range(16)]  # as a step's activations: all at once, then none
    del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults() + faults())
"""


def faults(*arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS, *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return int(done.stdout.splitlines()[-1])


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's heap")


@glibc
def test_a_heap_that_is_kept_is_not_faulted_in_again():
    assert faults("kept") < 100
    assert faults("given back") > 10_000
