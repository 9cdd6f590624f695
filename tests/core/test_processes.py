import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from deadline import within

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
number = int(sys.argv[1])
signal.signal(number, signal.SIG_DFL)  # whoever started this may ignore it
processes.stop_as_by_ctrl_c()
try:
    os.kill(os.getpid(), number)
    signal.pause()
except KeyboardInterrupt:
    raise SystemExit(7)
"""


@pytest.mark.parametrize("number", processes.STOP_SIGNALS)
def test_a_stop_while_a_fit_starts_is_as_one_by_ctrl_c(number):
    assert subprocess.run([sys.executable, "-c", STOPPED, str(int(number))], check=False, timeout=60).returncode == 7


HEEDS = """
import os, signal, sys, time
from ddm_lightning.core import processes
number = []
with processes.on_stop_signal(lambda received, _: number.append(received)):
    open(sys.argv[1], "x").close()
    while not number:
        time.sleep(0.01)
    print("stopping", flush=True)  # to a terminal that is gone, it may be
open(sys.argv[1], "w").write(str(number))
"""


def started(path):
    with within(60):
        while not path.exists():
            time.sleep(0.01)


def test_a_closed_terminal_is_a_request_to_stop(tmp_path):
    told, command = tmp_path / "told", [sys.executable, "-c", HEEDS, str(tmp_path / "told")]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
        os.execv(sys.executable, command)
    started(told)

    os.close(terminal)
    with within(60):
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert told.read_text() == f"[{int(signal.SIGHUP)}]"


def test_nohup_ignores_a_closed_terminal(tmp_path):
    told, command = tmp_path / "told", ["nohup", sys.executable, "-c", HEEDS, str(tmp_path / "told")]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started(told)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert told.read_text() == f"[{int(signal.SIGTERM)}]"


def test_the_collector_waits_for_the_imports_and_is_then_as_before():
    subprocess.run([sys.executable, "-c", CODE], check=True)


THREAD = """
import errno, sys, threading
from ddm_lightning.core import processes
processes.begin()
def fail(error):
    raise error
for error in (OSError(errno.ENOSPC, "No space left", "curves"), ValueError("a bug")):
    thread = threading.Thread(target=fail, args=(error,))
    thread.start()
    thread.join()
"""


def test_a_thread_that_meets_a_full_disk_says_so_in_one_line():
    said = subprocess.run([sys.executable, "-c", THREAD], capture_output=True, text=True, check=True).stderr
    first, *rest = said.splitlines()
    assert first == "note: curves: is full; free some space, then run the same command again"
    assert rest[0].startswith("Exception in thread") and rest[-1] == "ValueError: a bug"
