import subprocess
import sys

CODE = """
import gc
from ddm_lightning import startup
before = gc.get_threshold()
startup.end_imports()
assert gc.get_freeze_count() == 0, "who did not begin keeps its collector as it is"
startup.begin()
assert gc.get_threshold()[0] > 10 * before[0]
startup.end_imports()
assert gc.get_threshold() == before and gc.get_freeze_count() > 1000
"""


def test_the_collector_waits_for_the_imports_and_is_then_as_before():
    subprocess.run([sys.executable, "-c", CODE], check=True)
