"""Two devices that train one member together: ``island.devices=2`` on two processes of this machine's CPU."""

import contextlib
import json
import shutil
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch
from deadline import within
from tiny_runs import finish, read_status, start
from training.checkpoint_folders import state_by_parameter

from ddm_lightning.members.load import load_network

STEPS = 40
SETTINGS = (
    "member=expert-0",
    f"expert.train.max_steps={STEPS}",
    "island.devices=2",
    "island.log_every_n_steps=2",
    "island.validate_every_n_steps=25",
    "island.checkpoint_every_n_steps=7",
)
COMPACT = ["island.precision=bf16-true", "expert.train.optimizer=adamw-8bit", "island.ema=host"]

pytestmark = [pytest.mark.slow, pytest.mark.long]


def new_run(finished_run, folder):
    shutil.copytree(finished_run / "prepared", folder / "prepared")
    return folder


def fit(run, strategy, *more):
    return start("fit", run, *SETTINGS, f"island.strategy={strategy}", *more)


def state_of(run):
    return load_network(run / "members/expert-0/artifact")[1].state_dict()


def until_step(run, step, process):
    with within(300):
        while read_status(run, "expert-0").get("step", -1) < step:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
                raise AssertionError(process.communicate())


@pytest.fixture(scope="module")
def pair(finished_run, tmp_path_factory):
    """One member by FSDP2, let alone and then interrupted, and by DDP."""
    root = tmp_path_factory.mktemp("devices")
    seen = SimpleNamespace(fsdp=new_run(finished_run, root / "fsdp"), ddp=new_run(finished_run, root / "ddp"))
    seen.fsdp_said = finish(fit(seen.fsdp, "fsdp"))
    seen.ddp_said = finish(fit(seen.ddp, "ddp"))
    return seen


@pytest.mark.parametrize("more", [["island.precision=bf16-mixed"], COMPACT], ids=["mixed", "compact"])
def test_sharded_experts_train_in_bfloat16_validate_and_draw(finished_run, tmp_path, more):
    """Weights are gathered in bfloat16 alone, and images are drawn by a callback."""
    run = new_run(finished_run, tmp_path / "half")
    settings = (*more, "expert.train.max_steps=6", "island.validate_every_n_steps=3")
    finish(fit(run, "fsdp", *settings, "island.micro_batch_size=3"))
    status = read_status(run, "expert-0")
    assert (status["state"], status["validated_step"]) == ("done", 6)


def rank_ids(run, rank):
    return ids_by_step(run / f"members/expert-0/sample_ids-{rank}.txt")


def ids_by_step(path):
    lines = path.read_text().splitlines()
    return {int(step): [int(i) for i in ids.split()] for step, _, ids in (line.partition(": ") for line in lines)}


def test_ranks_stream_different_samples(pair):
    for run in (pair.fsdp, pair.ddp):
        first, second = rank_ids(run, 0), rank_ids(run, 1)
        assert list(first) == list(second) == list(range(STEPS))
        for step in range(STEPS):
            assert len(first[step]) == len(second[step]) == 4
            assert not set(first[step]) & set(second[step])
    assert rank_ids(pair.fsdp, 1) == rank_ids(pair.ddp, 1)


def test_sharded_and_replicated_training_end_in_the_same_weights(pair):
    """Data, noise and first weights are equal, so that what sharding does to gradients and averages is what differs."""
    torch.testing.assert_close(state_of(pair.fsdp), state_of(pair.ddp), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_devices_speak_with_one_voice(pair, strategy):
    out, err = getattr(pair, f"{strategy}_said")
    assert out.count("artifact: ") == 1
    assert err.count("M parameters") == 1
    assert {"fsdp": "FSDP2 over 2 devices", "ddp": "DDP over 2 devices"}[strategy] in err
    status = read_status(getattr(pair, strategy), "expert-0")
    assert (status["state"], status["step"]) == ("done", STEPS)
    assert "held_out/loss" in status["metrics"]


def test_one_signal_stops_both_and_they_resume_to_the_same_bits(pair, finished_run, tmp_path):
    run = new_run(finished_run, tmp_path / "run")
    process = fit(run, "fsdp")
    until_step(run, 10, process)
    process.send_signal(signal.SIGTERM)
    _, err = finish(process, code=130)
    stopped_at = read_status(run, "expert-0")["step"]
    assert err.count(f"expert-0: stopped at step {stopped_at}; the same command resumes it") == 1
    assert 10 <= stopped_at < STEPS
    assert sorted((run / "members/expert-0/checkpoints").iterdir())[-1].name == f"step-{stopped_at:08d}.ckpt"

    _, err = finish(fit(run, "fsdp"))
    assert err.count(f"expert-0: resumes at step {stopped_at}\n") == 1
    name = "members/expert-0/artifact/model.safetensors"
    assert (run / name).read_bytes() == (pair.fsdp / name).read_bytes()
    assert rank_ids(run, 0) == rank_ids(pair.fsdp, 0)
    assert rank_ids(run, 1) == rank_ids(pair.fsdp, 1)


def saved(run, step):
    """The optimizer's state of a checkpoint: of each parameter by name, and its groups."""
    path = run / f"members/expert-0/checkpoints/step-{step:08d}.ckpt"
    rest = torch.load(path / "trainer.pt", weights_only=True)
    assert rest["global_step"] == step
    return SimpleNamespace(state=state_by_parameter(path), groups=rest["groups"])


def test_two_ranks_then_one_then_two_train_one_member(pair, finished_run, tmp_path):
    """No sample is lost, none comes twice, and every moment and average goes on from where the others left it."""
    run, num_steps = new_run(finished_run, tmp_path / "run"), 23 * 7
    more = (
        f"expert.train.max_steps={num_steps}",
        "expert.train.ema_widths=[0.1]",
        "expert.train.ema_snapshots=4",
        "island.keep_checkpoints=99",
    )
    stops = [0]
    for ranks in ("fsdp", "single"):
        process = fit(run, ranks, *more, f"island.devices={1 if ranks == 'single' else 2}")
        until_step(run, stops[-1] + 12, process)
        process.send_signal(signal.SIGTERM)
        _, err = finish(process, code=130)
        stops.append(read_status(run, "expert-0")["step"])
        assert f"stopped at step {stops[-1]}" in err
    _, err = finish(fit(run, "fsdp", *more))
    assert f"resumes at step {stops[-1]}\n" in err
    _, first_stop, second_stop = stops
    assert 12 <= first_stop < second_stop < num_steps

    by_two = [rank_ids(run, rank) for rank in (0, 1)]
    by_one = ids_by_step(run / "members/expert-0/sample_ids.txt")
    assert list(by_one) == list(range(first_stop, second_stop))
    assert list(by_two[0]) == list(by_two[1]) == [*range(first_stop), *range(second_stop, num_steps)]
    steps = [by_one[n] if n in by_one else by_two[0][n] + by_two[1][n] for n in range(num_steps)]
    for step in range(STEPS):  # the order is that of two ranks all the way
        assert set(steps[step]) == set(rank_ids(pair.fsdp, 0)[step] + rank_ids(pair.fsdp, 1)[step])
    manifest = json.loads((run / "prepared/manifest.json").read_text())
    per_epoch = manifest["clusters"][0]["train"] // 8
    for first in range(0, num_steps - per_epoch + 1, per_epoch):
        epoch = [i for step in steps[first : first + per_epoch] for i in step]
        assert len(set(epoch)) == len(epoch) == 8 * per_epoch

    for stop in (first_stop, second_stop):
        before, after = saved(run, stop).state, saved(run, 7 * (stop // 7 + 1)).state
        assert before.keys() == after.keys()
        for name, state in before.items():
            for key in ("exp_avg_sq", "ema", "ema_0.1"):
                one, other = state[key].flatten().double(), after[name][key].flatten().double()
                # Of another parameter, or of none, they would not be alike; the second moment moves by 1/1000 a step.
                assert float(one @ other / (one.norm() * other.norm()).clamp_min(1e-30)) > 0.8, (name, key)
    last = saved(run, num_steps)
    assert {group["ema_steps"] for group in last.groups} == {num_steps}
    assert {int(state["step"]) for state in last.state.values()} == {num_steps}


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-shard-grad-op", "ddp"])
def test_a_step_in_parts_is_the_step(pair, finished_run, tmp_path, strategy):
    """Four samples a rank, three at most at once: the same samples and noise, and the sum of the same gradients."""
    run = new_run(finished_run, tmp_path / "run")
    finish(fit(run, strategy, "island.micro_batch_size=3"))
    whole = getattr(pair, strategy.partition("-")[0])
    assert rank_ids(run, 1) == rank_ids(whole, 1)
    torch.testing.assert_close(state_of(run), state_of(whole), rtol=1e-3, atol=1e-4)
