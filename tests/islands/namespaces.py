"""Islands that share no network: Linux network namespaces whose only route is to one address of this machine."""

import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def islands(number):
    """Make network namespaces; the address that they reach, and what goes before a command to run it in each of them.

    Skips the test where that is not allowed.
    """
    if shutil.which("ip") is None or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("needs root, and ip of iproute2, to make network namespaces")
    # Other tests may run at the same time.
    network = f"10.{128 + os.getpid() // 256 % 128}.{os.getpid() % 256}"
    sleepers = []
    try:
        for one in range(1, number + 1):
            sleepers.append(subprocess.Popen(["unshare", "--net", "sleep", "infinity"]))
            _connect(sleepers[-1].pid, f"veth{os.getpid()}-{one}", f"{network}.0", f"{network}.{one}")
        yield f"{network}.0", [_within(sleeper.pid) for sleeper in sleepers]
    finally:
        for sleeper in sleepers:  # its devices end with a namespace
            sleeper.kill()
            sleeper.wait()


def _connect(pid, device, here, there):
    here_namespace = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{pid}/ns/net").readlink() == here_namespace:
        time.sleep(0.01)
    within = _within(pid)
    for command in (
        ["ip", "link", "add", device, "type", "veth", "peer", "name", "island", "netns", str(pid)],
        ["ip", "address", "add", here, "peer", there, "dev", device],
        ["ip", "link", "set", device, "up"],
        [*within, "ip", "address", "add", there, "peer", here, "dev", "island"],
        [*within, "ip", "link", "set", "island", "up"],
        [*within, "ip", "link", "set", "lo", "up"],
    ):
        subprocess.run(command, check=True)


def _within(pid):
    return ["nsenter", "--target", str(pid), "--net"]
