"""Errors of the system that a user can do something about, in one line."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddm_lightning.core.errors import line_of


def failure(action):
    with pytest.raises((OSError, RuntimeError)) as caught:
        action()
    return caught.value


def test_a_path_that_cannot_be_is_named(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    for path, words in {
        tmp_path / "loop" / "x": "Too many levels of symbolic links; check",
        tmp_path / "file" / "x": "Not a directory; check",
        tmp_path / "nowhere" / "x": "cannot be found or made; check its folder",
        tmp_path / ("x" * 300): "File name too long; check",
    }.items():
        for name in (path, os.fsencode(path)):  # TensorBoard's are bytes
            assert line_of(failure(lambda name=name: open(name, "x"))).startswith(f"{path}: {words}")  # noqa: PTH123, SIM115


def test_a_home_that_nobody_has_is_one_line():
    line = line_of(failure(Path("~nobody-has-this-name/x").expanduser))
    assert line.startswith("Could not determine home directory") and line.endswith("write the path in full")


LIMITED = """
import resource, sys
from ddm_lightning.core.errors import line_of
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    open(sys.argv[1], "wb", buffering=0).write(bytes(2000)) and open(sys.argv[1], "ab", buffering=0).write(bytes(1))
except OSError as error:
    print(line_of(error))
"""


def test_a_limit_on_the_size_of_files_is_one_line(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "file")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "a file: exceeds the size that files may have here (ulimit -f); raise it\n"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("a bug"), KeyError("a bug")])
def test_what_may_be_a_bug_keeps_its_traceback(error):
    assert line_of(error) is None
