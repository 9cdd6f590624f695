"""Members on SLURM that lose their node, are preempted or meet their time limit end with the same bits."""

import json
import shutil
import subprocess
import sys
import time

import pytest
from islands.watching import weights
from sample_log import LOGS_SAMPLES, python_path
from tiny_runs import MEMBERS, ROOT, TINY, finish, read_status, start

from ddm_lightning.cli.parser import main

pytestmark = [pytest.mark.slow, pytest.mark.slurm]
SETTINGS = (
    LOGS_SAMPLES,
    "expert.train.max_steps=200",
    "router.train.max_steps=200",
    "island.checkpoint_every_n_steps=1000",
    "launch.slurm={cpus_per_device: 1, notice_seconds: 5}",
)


def slurm(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def wait_for(condition, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, slurm("squeue", "--long")
        time.sleep(0.5)


def test_a_member_on_two_nodes_is_requeued_and_ends_with_the_bits_of_one_node(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'data'}:{python_path()}")
    # The nodes of this cluster are one machine, which does not know their names.
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    run, store = tmp_path / "run", tmp_path / "store"
    own = ["-c", str(TINY), f"run_dir={run}", f"remote={store}", *SETTINGS]
    assert main(["prepare", *own]) == 0
    monkeypatch.setenv("STEP_SECONDS", "0.3")
    two = "islands={expert-0: {nodes: 2}}"
    assert main(["launch", *own, two, "--on", "slurm", "--only", "expert-0"]) == 0
    wait_for(lambda: read_status(run, "expert-0").get("step", 0) > 0)
    handle = json.loads((run / "launched.json").read_text())["expert-0"][1]
    assert slurm("squeue", "--noheader", "--jobs", handle, "--format=%D") == "2"
    slurm("scancel", "--signal=USR2", handle)
    monkeypatch.delenv("STEP_SECONDS")
    for name in ("plain", "tasks"):
        shutil.copytree(run / "prepared", tmp_path / name / "prepared")
    finish(start("fit", tmp_path / "plain", *SETTINGS, "member=expert-0", "island.devices=2"))
    command = [
        sys.executable,
        "-m",
        "ddm_lightning",
        "fit",
        "-c",
        str(TINY),
        f"run_dir={tmp_path / 'tasks'}",
        *SETTINGS,
    ]
    slurm("srun", "--ntasks=2", "--nodes=1", "--overcommit", *command, "member=expert-0", "island.nodes=2")
    wait_for((store / "members/expert-0/artifact/member.json").exists)
    assert "Restarts=1" in slurm("scontrol", "show", "job", handle)
    assert weights(store) == weights(tmp_path / "tasks") == weights(tmp_path / "plain")


def test_requeued_members_resume_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'data'}:{python_path()}")
    run, store = tmp_path / "run", tmp_path / "store"
    own = ["-c", str(TINY), f"run_dir={run}", f"remote={store}", *SETTINGS]
    assert main(["prepare", *own]) == 0
    monkeypatch.setenv("STEP_SECONDS", "0.3")  # a minute and no member is through
    assert main(["launch", *own, "--on", "slurm", "--only", "expert-0,expert-1"]) == 0
    assert main(["launch", *own, "--on", "slurm", "--only", "router", "launch.slurm.minutes=1"]) == 0
    handles = {name: handle for name, (_, handle) in json.loads((run / "launched.json").read_text()).items()}

    shutil.copytree(run / "prepared", tmp_path / "plain" / "prepared")
    with monkeypatch.context() as quick:
        quick.delenv("STEP_SECONDS")
        plain = start("fit", tmp_path / "plain", *SETTINGS)

    wait_for(lambda: all(read_status(run, name).get("step", 0) > 0 for name in MEMBERS))
    node = slurm("squeue", "--noheader", "--jobs", handles["expert-0"], "--format=%N")
    # It returns to service by itself, sometimes within milliseconds, and SLURM refuses to resume a node that is up.
    slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    slurm("scancel", "--signal=USR2", handles["expert-1"])

    finish(plain)
    wait_for(lambda: all((store / "members" / name / "artifact/member.json").exists() for name in MEMBERS))
    for handle in handles.values():  # the router has met its time limit
        assert "Restarts=0" not in slurm("scontrol", "show", "job", handle)
    for name in MEMBERS:
        assert weights(store, name) == weights(tmp_path / "plain", name)
    assert main(["sample", *own, f"run_dir={tmp_path / 'elsewhere'}"]) == 0
    assert (tmp_path / "elsewhere/samples/top-1.png").exists()
