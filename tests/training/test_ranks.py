"""One of two ranks fails while a checkpoint is written; ranks that other programs start."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from deadline import within
from shards.mds import WARNINGS
from tiny_runs import RANK_VARIABLES, TINY, ended_on_failure, finish, launch, read_status

from ddm_lightning.cli.parser import main
from ddm_lightning.members.run_folder import lock_member

SETTINGS = (
    "member=expert-0",
    "expert.train.max_steps=20",
    "island.accelerator=cpu",
    "island.devices=2",
    "island.log_every_n_steps=5",
    "island.validate_every_n_steps=100",
    "island.checkpoint_every_n_steps=5",
)
TRAINS_SECONDS = 240
"""On a busy machine; in half of a minute on a quiet one."""

pytestmark = WARNINGS


FAILING = (str(Path(__file__).with_name("failing_rank.py")),)


def start(run, *more, program=("-m", "ddm_lightning"), **variables):
    # A group of its own, as a terminal's commands have.
    given = ["fit", "-c", str(TINY), f"run_dir={run}", *SETTINGS, *more]
    return launch(*given, program=program, new_session=True, **variables)


def fit_and_fail(run, strategy, rank, how, code):
    """What it says of a failure at its second checkpoint, after which nothing is left running."""
    process = start(run, f"island.strategy={strategy}", program=FAILING, FAILS=f"{rank} {how} 10")
    # It ends with the last of the ranks, all of which write to it.
    return finish(process, code, TRAINS_SECONDS)[1]


def checkpoints(run):
    return [path.name for path in sorted((run / "members/expert-0/checkpoints").glob("step-*"))]


def resume(run):
    said = finish(start(run, "island.strategy=fsdp"), 0, TRAINS_SECONDS)[1]

    assert said.count("expert-0: resumes at step 5\n") == 1
    assert read_status(run, "expert-0")["state"] == "done"
    assert not list((run / "members/expert-0/checkpoints").glob(".tmp*"))


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "rank"), [("fsdp", 1), ("ddp", 0)])
def test_a_full_disk_of_one_rank_is_reported_once_and_ends_both(tiny_run, strategy, rank):
    said = fit_and_fail(tiny_run, strategy, rank, "full", code=2)
    path = tiny_run / "members/expert-0/checkpoints/step-00000010.ckpt"

    assert said.splitlines()[4:] == [f"error: {path}: is full; free some space, then run the same command again"]
    assert read_status(tiny_run, "expert-0")["state"] == "failed"
    assert checkpoints(tiny_run) == ["step-00000005.ckpt"]


@pytest.mark.long
def test_a_mistake_in_one_rank_is_shown_with_its_place(tiny_run):
    said = fit_and_fail(tiny_run, "fsdp", 1, "bug", code=1)

    assert said.rstrip().endswith("ValueError: a mistake in step-00000010.ckpt")
    assert said.count("in bug\n") == 1
    assert "RuntimeError: rank 1: Traceback" in said
    assert checkpoints(tiny_run) == ["step-00000005.ckpt"]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_at_a_checkpoint_ends_the_other_and_the_one_before_is_resumed(tiny_run, rank):
    said = fit_and_fail(tiny_run, "fsdp", rank, "killed", code=2)
    line = f"error: rank {rank} of 2 was ended by SIGKILL; the same command resumes at the newest checkpoint"

    assert said.splitlines()[4:] == [line]
    assert checkpoints(tiny_run) == ["step-00000005.ckpt"]

    resume(tiny_run)


@pytest.mark.long
def test_a_signal_while_rank_one_is_late_stops_both_at_the_same_step(tiny_run, tmp_path):
    late = tmp_path / "late"
    told = tmp_path / "told"
    told.mkdir()
    variables = {"FAILS": "1 late-steps 0", "LATE": str(late), "TMPDIR": str(told)}
    process = start(tiny_run, "island.strategy=fsdp", program=FAILING, **variables)
    with ended_on_failure(process), within(TRAINS_SECONDS):
        while not (late.exists() and list(told.rglob("state"))):  # rank zero waits for the other, and listens
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGTERM)  # as Ctrl-C, and Lightning would listen to it
        time.sleep(0.5)
        late.unlink()

    said = finish(process, 130, TRAINS_SECONDS)[1]

    # Ranks agree every ten steps.
    assert said.splitlines()[4:] == ["expert-0: stopped at step 10; the same command resumes it"]
    assert checkpoints(tiny_run) == ["step-00000005.ckpt", "step-00000010.ckpt"]


@pytest.mark.long
def test_a_rank_without_memory_for_sample_images_ends_both(tiny_run):
    """The other waits in an all-gather."""
    settings = "island.strategy=fsdp", "island.validate_every_n_steps=10"
    said = finish(start(tiny_run, *settings, program=FAILING, FAILS="1 images 0"), 2, TRAINS_SECONDS)[1]
    said, _, error = said.partition("error: ")

    assert error.startswith("out of memory (tried to allocate 2 GiB); ")
    assert error.count("\n") == 1 and "Traceback" not in said
    assert checkpoints(tiny_run) == ["step-00000005.ckpt", "step-00000010.ckpt"]


def artifact(run):
    return (run / "members/expert-0/artifact/model.safetensors").read_bytes()


@pytest.mark.long
def test_ranks_start_inside_a_slurm_job_and_under_torchrun(tiny_run, tmp_path):
    """Two tasks were asked for, as ``sbatch --ntasks=2`` does, and the command is run once."""
    other = tmp_path / "other"
    shutil.copytree(tiny_run / "prepared", other / "prepared")
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "5", "SLURM_PROCID": "0"}
    nodes = {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    out, _ = finish(start(tiny_run, "island.strategy=fsdp", **job, **nodes), 0, TRAINS_SECONDS)

    assert out.count("artifact: ") == 1

    out, _ = by_torchrun(other, "island.strategy=fsdp")
    assert out.count("artifact: ") == 1
    assert artifact(other) == artifact(tiny_run)


def by_torchrun(run, *more, code=0, program=("-m", "ddm_lightning"), **variables):
    """What is printed by two ranks that a torchrun of the user's starts."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return finish(start(run, *more, program=(*torchrun, *program), **variables), code, TRAINS_SECONDS)


@pytest.mark.long
def test_ranks_of_torchrun_agree_on_the_checkpoint(tiny_run):
    """The second would have found them before the first had looked at them."""
    alone = [*SETTINGS, "island.devices=1", "island.keep_checkpoints=2"]

    assert main(["fit", "-c", str(TINY), f"run_dir={tiny_run}", *alone]) == 0

    shutil.rmtree(tiny_run / "members/expert-0/artifact")
    paths = sorted((tiny_run / "members/expert-0/checkpoints").glob("step-*"))
    whole = [(path / "trainer.pt").read_bytes() for path in paths]
    for path, content in zip(paths, whole, strict=True):
        (path / "trainer.pt").write_bytes(content + b"x")

    late = {"program": FAILING, "FAILS": "0 late-damage 0"}
    _, err = by_torchrun(tiny_run, "island.strategy=ddp", code=1, **late)

    assert "step-00000020.ckpt: damaged checkpoint" in err and "none before it is whole; restore one" in err

    (paths[0] / "trainer.pt").write_bytes(whole[0])
    out, err = by_torchrun(tiny_run, "island.strategy=ddp", **late)

    assert "step-00000020.ckpt: damaged checkpoint" in err and "expert-0: resumes at step 15\n" in err
    assert out.count("artifact: ") == 1
    assert paths[1].with_suffix(".damaged").is_dir()
    assert read_status(tiny_run, "expert-0")["state"] == "done"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, "4 processes of fit were started, as by torchrun, but"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, "1 processes of fit"),
        (
            {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"},
            "start fit only once",
        ),
    ],
)
def test_another_number_of_ranks_than_devices_is_refused(tiny_run, monkeypatch, capsys, variables, words):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)

    assert main(["fit", "-c", str(TINY), f"run_dir={tiny_run}", *SETTINGS]) == 2

    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert words in line
    assert not (tiny_run / "members").exists()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_before_the_first_step_ends_all_ranks_at_once(tiny_run, number):
    process = start(tiny_run, "island.strategy=ddp")
    with ended_on_failure(process), within(TRAINS_SECONDS):
        while read_status(tiny_run, "expert-0").get("state") != "starting":
            time.sleep(0.01)
        process.send_signal(number)

    _, said = finish(process, 130, TRAINS_SECONDS)

    assert said.splitlines()[4:] == ["interrupted; run the same command again to resume"]


@pytest.mark.long
def test_no_rank_outlives_the_agent(tiny_run):
    process = start(tiny_run, "island.strategy=ddp", "expert.train.max_steps=100000")
    with ended_on_failure(process), within(TRAINS_SECONDS):
        while read_status(tiny_run, "expert-0").get("state") != "training":
            time.sleep(0.02)

    lists = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/children")]
    ranks = " ".join(lists).split()
    process.kill()

    assert len(ranks) == 2

    with within(60):
        while any(is_alive(rank) for rank in ranks):
            time.sleep(0.05)

    process.communicate()


def is_alive(pid):
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.long
def test_a_mistake_of_the_user_is_one_line_and_ends_both(tiny_run):
    folder = tiny_run / "members/expert-0"
    folder.mkdir(parents=True)
    with lock_member(folder):
        said = finish(start(tiny_run, "island.strategy=ddp"), 2, TRAINS_SECONDS)[1]

    (line,) = said.splitlines()

    assert line.startswith(f"error: {folder}/.lock: expert-0 is in use by another process")


@pytest.mark.slow
def test_a_pod_that_an_operator_numbers_trains_its_member_alone(tiny_run):
    pod = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456", "SLURM_PROCID": "3"}
    finish(start(tiny_run, "island.devices=1", **pod), 0, TRAINS_SECONDS)

    assert artifact(tiny_run)
    assert read_status(tiny_run, "expert-0")["state"] == "done"
    assert list((tiny_run / "members/expert-0/tensorboard").glob("events*"))


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (
            ["fit"],
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"},
            "2 processes of fit were started, as by torchrun; ",
        ),
        (["fit", *SETTINGS], {}, "not MASTER_ADDR and MASTER_PORT"),
        (["evaluate"], {"MASTER_ADDR": "", "MASTER_PORT": "1"}, "not MASTER_ADDR and MASTER_PORT"),
        (["evaluate"], {"MASTER_ADDR": "a", "MASTER_PORT": "x"}, "not MASTER_ADDR and MASTER_PORT"),
        (["plan"], {}, None),
    ],
)
def test_ranks_that_cannot_meet_or_train_several_members_are_refused(
    tiny_run, monkeypatch, capsys, arguments, variables, words
):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)

    code = main([arguments[0], "-c", str(TINY), f"run_dir={tiny_run}", *arguments[1:]])

    if words is None:
        assert code == 0, "a command of one process does not ask where ranks meet"
    else:
        assert code == 2
        assert words in capsys.readouterr().err

    assert not (tiny_run / "members").exists()
