"""Islands that share nothing but a store: a network namespace and a folder each."""

import random
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from islands.namespaces import islands
from islands.watching import steps_of, weights
from shards import servers
from shards.mds import WARNINGS
from tiny_runs import MEMBERS, STEPS, finish, read_status, settings, start

from ddm_lightning.cli.parser import main
from ddm_lightning.core import remote

pytestmark = [*WARNINGS, pytest.mark.slow]
QUICK = ("island.publish_every_n_minutes=0.001", "island.checkpoint_every_n_steps=5")
REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


@contextmanager
def s3(tmp_path, monkeypatch, address):
    """moto's S3 on loopback, and at ``address`` for the islands: its URL, and its port there and on loopback."""
    with servers.s3(tmp_path / "there", tmp_path, monkeypatch) as (url, line):
        door = servers.Line(line.port, address)
        monkeypatch.setenv("S3_ENDPOINT_URL", f"http://{address}:{door.port}")
        yield url, door.port, line.port
        door.close()


@contextmanager
def sftp(tmp_path, monkeypatch, address):
    """The same of an SSH server."""
    with servers.sftp(tmp_path / "there", tmp_path, monkeypatch) as (url, line):
        door, known = servers.Line(line.port, address), tmp_path / "known"
        known.write_text(known.read_text().replace(f"[127.0.0.1]:{line.port}", f"[{address}]:{door.port}"))
        yield url.replace(f"127.0.0.1:{line.port}", f"{address}:{door.port}"), door.port, line.port
        door.close()


@pytest.fixture(params=["s3"])
def isolated(request, tmp_path, monkeypatch, quick_prepare):
    """The tiny experiment, published at a store; its URL, and what goes before a command to run it on an island.

    The islands reach the store, and nothing else.
    """
    (tmp_path / "there").mkdir()
    with (
        islands(2) as (address, within),
        globals()[request.param](tmp_path, monkeypatch, address) as (url, port, port_on_loopback),
    ):
        for island in within:
            routes = subprocess.run([*island, "ip", "route"], capture_output=True, text=True, check=True)
            assert [line.split()[0] for line in routes.stdout.splitlines()] == [address]
            reached = [
                reaches(island, *at) for at in ((address, port), ("127.0.0.1", port_on_loopback), ("1.1.1.1", 53))
            ]
            assert reached == [True, False, False]
        assert not reaches(within[0], f"{address.rpartition('.')[0]}.2", port)
        assert main(["prepare", *settings(tmp_path / "home"), f"remote={url}"]) == 0
        yield url, within
    remote.disconnect()


def reaches(island, address, port):
    return (
        subprocess.run([*island, sys.executable, "-c", REACH, address, str(port)], capture_output=True).returncode == 0
    )


def test_members_that_reach_the_store_alone_give_the_same_bits(isolated, finished_run, tmp_path):
    url, within = isolated
    on = {"expert-0": within[0], "expert-1": within[1], "router": within[0]}
    members = [start("fit", tmp_path / name, f"remote={url}", f"member={name}", within=on[name]) for name in MEMBERS]
    for name, member in zip(MEMBERS, members, strict=True):
        finish(member)
        assert weights(tmp_path / name, name) == weights(finished_run, name)


@pytest.mark.long
@pytest.mark.parametrize("isolated", ["s3", "sftp"], indirect=True)
def test_a_member_killed_with_its_folder_at_random_moments_goes_on_elsewhere(
    isolated, finished_run, tmp_path, monkeypatch
):
    url, within = isolated
    monkeypatch.setenv("STEP_SECONDS", "0.3")
    neighbour = start("fit", tmp_path / "neighbour", f"remote={url}", "member=expert-1", *QUICK, within=within[1])
    chance, begin = random.Random(0), 0
    for kill, target in enumerate(sorted(chance.sample(range(5, 55), 3))):
        folder = tmp_path / f"place-{kill}"
        island = within[kill % 2]
        member = start("fit", folder, f"remote={url}", "member=expert-0", *QUICK, within=island)
        while read_status(folder, "expert-0").get("step", 0) < max(target, begin + 1):
            assert member.poll() is None, member.communicate()
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 1))
        member.kill()
        member.wait()
        taken = steps_of(folder)
        assert set(taken) <= {*range(STEPS["expert-0"])} and taken[-1] >= begin
        shutil.rmtree(folder)
        published = newest_published(url)
        assert begin <= published <= taken[-1] + 1
        begin = published
    _, said = finish(start("fit", tmp_path / "last", f"remote={url}", "member=expert-0", *QUICK, within=within[0]))
    assert f"takes over the checkpoint of step {begin} from {url}" in said
    assert steps_of(tmp_path / "last")[begin - STEPS["expert-0"] :] == [*range(begin, STEPS["expert-0"])]
    finish(neighbour)
    assert weights(tmp_path / "last", "expert-0") == weights(finished_run, "expert-0")
    assert weights(tmp_path / "neighbour", "expert-1") == weights(finished_run, "expert-1")


def newest_published(url):
    """Step of the newest whole checkpoint of the first expert."""
    names = remote.files(f"{url}/members/expert-0/checkpoints")
    return max((int(name[5:13]) for name in names if name.endswith("/files.json")), default=0)
