"""A real disk that fills up: a tmpfs of some kilobytes."""

import subprocess

import pytest


def mount(*arguments):
    return subprocess.run(["mount", *arguments], capture_output=True, timeout=20, check=False).returncode == 0


@pytest.fixture
def small_disk(request, tmp_path):
    """An empty disk of ``request.param``, such as ``600k``."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mount("-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)):
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=20)
