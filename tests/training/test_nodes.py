"""A member on two nodes: two starts of ``fit`` on this machine, each with ranks and maybe a disk of its own.

They meet on loopback. The reference is one node with as many ranks.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from deadline import within
from safetensors.torch import load_file
from sample_log import LOGS_SAMPLES
from shards.mds import WARNINGS
from tiny_runs import RANK_VARIABLES, TINY, finish, launch, prepared, read_status
from training.short_fits import events

from ddm_lightning.cli.parser import main

SETTINGS = (
    "member=expert-0",
    "expert.train.max_steps=30",
    "island.accelerator=cpu",
    "island.nodes=2",
    "island.log_every_n_steps=5",
    "island.validate_every_n_steps=15",
    "island.checkpoint_every_n_steps=5",
)
TWO = ("island.devices=2",)
TRAINS_SECONDS = 240
RESUMES = "the same command resumes at the newest checkpoint"

pytestmark = WARNINGS


def fit(run, *more, within=(), **variables):
    return launch("fit", "-c", str(TINY), f"run_dir={run}", *SETTINGS, *more, within=within, **variables)


def on_two_nodes(runs, *more, **variables):
    """Start both; ``runs`` are their run folders."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", **variables}
    return [fit(run, *more, NODE_RANK=str(node), **meeting) for node, run in enumerate(runs)]


def ends(nodes, code=0):
    """What both have printed after their set-up."""
    try:
        return [finish(node, code, TRAINS_SECONDS) for node in nodes]
    finally:
        for node in nodes:
            node.kill()


def weights(run):
    return load_file(run / "members/expert-0/artifact/model.safetensors")


def assert_close(run, other, tolerance):
    ours = weights(run)
    expected = weights(other)

    assert ours.keys() == expected.keys()

    for name, value in expected.items():
        assert (ours[name] - value).abs().max() <= tolerance, name

    for name in ("1_watch/train/loss", "1_watch/held_out/loss"):
        found, wanted = ([event.value for event in events(one).Scalars(name)] for one in (run, other))
        assert found == pytest.approx(wanted, rel=1e-4 if tolerance else 0), name


def copies(run, folder, num):
    """Run folders that share the prepared shards of ``run`` and nothing else."""
    for number in range(num):
        shutil.copytree(run / "prepared", folder / f"copy-{number}" / "prepared")
    return [folder / f"copy-{number}" for number in range(num)]


def children(process):
    """Process ids of the ranks."""
    lists = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/children")]
    return sorted(int(pid) for pid in " ".join(lists).split())


def in_training(run):
    with within(TRAINS_SECONDS):
        while read_status(run, "expert-0").get("step", 0) < 5:
            time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_ddp_on_two_nodes_is_that_of_one(tiny_run, tmp_path, devices):
    (one,) = copies(tiny_run, tmp_path, 1)
    (out, said), (nothing, _) = ends(on_two_nodes([tiny_run, tiny_run], f"island.devices={devices}"))

    assert f"DDP over 2 nodes x {devices} devices: " in said
    assert out.count("artifact: ") == 1 and not nothing

    finish(fit(one, "island.nodes=1", f"island.devices={2 * devices}"), 0, TRAINS_SECONDS)
    assert_close(tiny_run, one, 0.0)


@pytest.mark.long
def test_hsdp_on_nodes_that_share_no_disk_stops_and_resumes(tiny_run, tmp_path):
    """Weights are sharded within a node. The stop comes from the second, which has neither checkpoints nor artifact."""
    first, second, whole = copies(tiny_run, tmp_path, 3)
    hsdp = (*TWO, "island.strategy=fsdp")
    nodes = on_two_nodes([first, second], *hsdp, LOGS_SAMPLES, STEP_SECONDS="0.2")
    in_training(first)
    nodes[1].send_signal(signal.SIGTERM)
    said = ends(nodes, 130)[0][1]
    step = read_status(first, "expert-0")["step"]

    assert 0 < step < 30
    assert f"expert-0: stopped at step {step}; the same command resumes it" in said
    assert not list(second.glob("members/expert-0/checkpoints/*"))

    said = ends(on_two_nodes([first, second], *hsdp))[0][1]
    assert f"expert-0: resumes at step {step}\n" in said
    assert not list(second.glob("members/expert-0/checkpoints/*"))
    assert not (second / "members/expert-0/artifact").exists()

    finish(fit(whole, "island.nodes=1", "island.devices=4", "island.strategy=fsdp"), 0, TRAINS_SECONDS)
    assert_close(first, whole, 1e-4)
    out, _ = ends(on_two_nodes([first, second], *hsdp))[0]  # the second does not know that it is finished

    assert out.count("artifact: ") == 1


@pytest.fixture
def networks():
    """Commands that run others in two network namespaces with one cable between them; 10.9.8.1 is the first."""
    names = [f"ddm-{os.getpid()}-{number}" for number in range(2)]

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, check=True)

    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("needs root and iproute2")

    with ExitStack() as after:
        for name in names:
            ip("netns", "add", name)
            after.callback(ip, "netns", "del", name)
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "cable", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.9.8.{number}/24", "dev", "cable")
            for device in ("cable", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield [("ip", "netns", "exec", name) for name in names]


@pytest.mark.long
def test_nodes_in_two_networks_need_only_the_way_to_each_other(tiny_run, tmp_path, networks):
    runs = copies(tiny_run, tmp_path, 2)
    meeting = {"MASTER_ADDR": "10.9.8.1", "GLOO_SOCKET_IFNAME": "cable"}
    nodes = [
        fit(run, *TWO, within=within, NODE_RANK=str(node), **meeting)
        for node, (run, within) in enumerate(zip(runs, networks, strict=True))
    ]

    assert "node 0 of 2: meets the others at 10.9.8.1:29500\n" in ends(nodes)[0][1]

    finish(fit(tiny_run, "island.nodes=1", "island.devices=4"), 0, TRAINS_SECONDS)
    assert_close(runs[0], tiny_run, 0.0)


@pytest.mark.long
def test_a_rank_killed_on_the_second_node_ends_both(tiny_run):
    nodes = on_two_nodes([tiny_run, tiny_run], *TWO, LOGS_SAMPLES, STEP_SECONDS="0.2")
    in_training(tiny_run)
    os.kill(children(nodes[1])[1], signal.SIGKILL)
    with within(60):
        first, second = (said.splitlines()[-1] for _, said in ends(nodes, 2))

    line = f"rank 3 of 4 was ended by SIGKILL; {RESUMES}"

    assert (first, second) == (f"error: node 1: {line}", f"error: {line}")


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 1])
def test_a_lost_node_ends_the_other(tiny_run, node):
    nodes = on_two_nodes([tiny_run, tiny_run], *TWO, LOGS_SAMPLES, STEP_SECONDS="0.2")
    in_training(tiny_run)
    nodes[node].kill()
    nodes[node].communicate()
    with within(60):
        _, said = ends([nodes[1 - node]], 2)[0]

    assert said.splitlines()[-1] == f"error: {'another node' if node else 'node 0'} is gone; {RESUMES}"


@pytest.mark.long
def test_the_first_node_publishes_what_another_pair_goes_on_with(tiny_run, tmp_path):
    """Of four machines without a common disk; the first two lose theirs."""
    store = f"remote=file://{tmp_path / 'store'}"
    home = tmp_path / "home"
    whole = tmp_path / "whole"
    prepared(home, store, SETTINGS[1])  # the experiment is published, too
    quick = (*TWO, store, "island.publish_every_n_minutes=0.001")
    nodes = on_two_nodes([tmp_path / "a", tmp_path / "b"], *quick, LOGS_SAMPLES, STEP_SECONDS="0.2")
    published = tmp_path / "store/members/expert-0/checkpoints"
    with within(TRAINS_SECONDS):
        while not list(published.glob("*/files.json")):
            time.sleep(0.05)

    for node in nodes:
        node.kill()
        node.communicate()

    for name in ("a", "b"):
        shutil.rmtree(tmp_path / name)

    (_, said), _ = ends(on_two_nodes([tmp_path / "c", tmp_path / "d"], *quick))

    assert "takes over the checkpoint of step " in said
    assert (tmp_path / "store/members/expert-0/artifact/member.json").exists()
    assert (tmp_path / "d/members/expert-0/cache/node-1/store").is_dir()

    shutil.copytree(home / "prepared", whole / "prepared")
    finish(fit(whole, "island.nodes=1", "island.devices=4"), 0, TRAINS_SECONDS)
    # In the first step after a resume, DDP has other buckets and sums the gradients of four ranks in another order.
    # Adam scales that up where a gradient is zero but for rounding, as of the bias of attention's keys.
    assert_close(tmp_path / "c", whole, 1e-4)


@pytest.mark.parametrize(
    ("more", "variables", "words"),
    [
        ([], {}, "key 'island.nodes' = 2: which node is this? Start fit on each with srun"),
        ([], {"NODE_RANK": "2", "MASTER_ADDR": "localhost"}, "which node is this?"),
        ([], {"SLURM_STEP_NUM_TASKS": "4"}, "key 'island.nodes' = 2: srun started 4 tasks; start one per node: "),
        (["member=expert-0,expert-1"], {}, "key 'island.nodes' = 2: start fit on each node with member=expert-0 alone"),
        (["island.nodes=3"], {}, "'island.devices' = 1: times nodes = 3 must divide the 8 samples per"),
        (["island.nodes=0"], {}, "key 'island.nodes' = 0"),
    ],
)
def test_bad_input_is_one_line(tiny_run, monkeypatch, capsys, more, variables, words):
    for name in (*RANK_VARIABLES, "NODE_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)

    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert main(["fit", "-c", str(TINY), f"run_dir={tiny_run}", *SETTINGS, *more]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not (tiny_run / "members").exists()
