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


IGNORED = """
import signal
from ddm_lightning.core import processes
processes.begin()
raise SystemExit(sum(signal.getsignal(number) == signal.SIG_IGN for number in processes.STOP_SIGNALS))
"""


def test_ranks_that_are_starting_leave_signals_to_the_first_one():
    for variables, number in (({}, 0), ({processes.STARTED_BY: "1:/nowhere"}, len(processes.STOP_SIGNALS))):
        environment = {name: value for name, value in os.environ.items() if name != processes.STARTED_BY}
        done = subprocess.run([sys.executable, "-c", IGNORED], env={**environment, **variables}, check=False)
        assert done.returncode == number


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


HELD_BACK = """
import os, signal, subprocess, sys
from ddm_lightning.core import processes

CHILD = (
    "import os, signal; from ddm_lightning.core import processes\\n"
    "for number in processes.STOP_SIGNALS: os.kill(os.getpid(), number)\\n"
    "processes.begin(); raise SystemExit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
)
found = []
for number in processes.STOP_SIGNALS:
    signal.signal(number, lambda number, _: found.append(number))
with processes.held_back():
    child = subprocess.Popen([sys.executable, "-c", CHILD], env={**os.environ, processes.STARTED_BY: "1:/nowhere"})
    for number in processes.STOP_SIGNALS:
        os.kill(os.getpid(), number)
    assert found == []
assert sorted(found) == sorted(processes.STOP_SIGNALS)
raise SystemExit(child.wait())
"""


def test_a_stop_while_a_rank_starts_is_for_the_first_one():
    assert subprocess.run([sys.executable, "-c", HELD_BACK], check=False, timeout=60).returncode == 0


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
