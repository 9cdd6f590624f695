"""A member that goes on: killed anywhere, with damaged checkpoints, on an island set otherwise."""

import contextlib
import dataclasses
import itertools
import json
import shutil
import signal
import subprocess

import pytest
import torch
from deadline import within
from sample_log import LOGS_SAMPLES
from shards.mds import WARNINGS
from tiny_runs import TINY, copy_run, finish, read_status, start
from training.checkpoint_folders import cut
from training.members import MEMBER
from training.short_fits import checkpoints, events, fit, member, weights

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.training.callbacks import RollingCheckpoints
from ddm_lightning.training.checkpoint import check_origin, origin_of

pytestmark = WARNINGS


@pytest.fixture
def interrupted(finished, tmp_path):
    """As a member's folder is left by a kill before its last step."""
    run = copy_run(finished, tmp_path / "interrupted", "expert-0")
    shutil.rmtree(member(run, "checkpoints", "step-00000020.ckpt"))
    return run


def test_resume_reports_changed_settings(interrupted, capsys):
    assert fit(interrupted, "island.micro_batch_size=4", "island.precision=bf16-mixed", "island.num_workers=0") == 0
    said = capsys.readouterr().err
    words = "island.precision=bf16-mixed (was 32-true), island.micro_batch_size=4 (was null)"
    assert f"expert-0: from here on with {words}: the same samples, other rounding\n" in said


@pytest.mark.parametrize(
    ("setting", "before", "other"),
    [
        ("devices=2", "1", "noise and rounding"),
        ("accelerator=gpu", "cpu", "noise and rounding"),
        ("strategy=fsdp", "auto", "rounding"),
        ("precision=bf16-mixed", "32-true", "rounding"),
        ("micro_batch_size=4", "null", "rounding"),
        ("attention=sdpa", "auto", "rounding"),
        ("compile=true", "false", "rounding"),
        ("activation_checkpointing=true", "false", "rounding"),
        ("num_threads=2", "1", "rounding"),
    ],
)
def test_each_setting_that_rounds_otherwise_is_said(tmp_path, setting, before, other):
    torch.save(origin_of(MEMBER, load_experiment(TINY)), tmp_path / "trainer.pt")
    said = check_origin(tmp_path, origin_of(MEMBER, load_experiment(TINY, [f"island.{setting}"])))
    assert said == f"from here on with island.{setting} (was {before}): the same samples, other {other}"


@pytest.mark.parametrize(("schedule", "changed"), [("constant", None), ("cosine", "max_steps")])
def test_a_student_goes_on_with_more_steps_where_its_schedule_does_not_end(tmp_path, schedule, changed):
    before, after = (
        load_experiment(TINY, [f"expert.train.schedule={schedule}", f"distill.max_steps={steps}"]) for steps in (60, 90)
    )
    student = dataclasses.replace(MEMBER, name="student")
    torch.save(origin_of(student, before), tmp_path / "trainer.pt")
    if changed is None:
        assert check_origin(tmp_path, origin_of(student, after)) is None
    else:
        with pytest.raises(UserError, match=rf"was trained with distill\.{changed} = 60, not 90; set it back"):
            check_origin(tmp_path, origin_of(student, after))


def test_milestones_of_an_earlier_start_are_kept_for_good(finished, tmp_path):
    """Also where the island that goes on keeps none: what is left out of a command changes no promise."""
    run = tmp_path / "run"
    shutil.copytree(finished / "prepared", run / "prepared")
    assert fit(run, "island.milestone_every_n_steps=4", "island.keep_checkpoints=1") == 0
    milestones = [f"step-{step:08d}.ckpt" for step in (4, 8, 12, 16, 20)]
    assert checkpoints(run) == milestones
    shutil.rmtree(member(run, "artifact"))
    shutil.rmtree(member(run, "checkpoints", "step-00000020.ckpt"))
    assert fit(run, "island.keep_checkpoints=1") == 0
    assert checkpoints(run) == milestones


def test_the_checkpoint_of_another_member_is_refused(finished, tmp_path, capsys):
    run = copy_run(finished, tmp_path / "run", "expert-0")
    member(run, "checkpoints").rename(tmp_path / "checkpoints")
    shutil.rmtree(run / "members")
    (run / "members" / "expert-1").mkdir(parents=True)
    (tmp_path / "checkpoints").rename(run / "members" / "expert-1" / "checkpoints")
    assert fit(run, name="expert-1") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    newest = run / "members" / "expert-1" / "checkpoints" / "step-00000020.ckpt"
    words = "is a checkpoint of expert-0, not of expert-1; move it to that folder, or remove it"
    assert line == f"error: {newest}: {words}"
    assert newest.exists()


def test_copied_checkpoints_resume_elsewhere_but_not_under_another_experiment(finished, interrupted, tmp_path, capsys):
    run = tmp_path / "elsewhere"
    shutil.copytree(interrupted / "prepared", run / "prepared")
    shutil.copytree(member(interrupted, "checkpoints"), member(run, "checkpoints"))
    changes = ["expert.train.learning_rate=1e-4", "expert.train.schedule=cosine"]
    assert fit(run, *changes) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    newest = member(run, "checkpoints", "step-00000018.ckpt")
    words = (
        "the experiment changed since this was written: expert.train.learning_rate (was 0.002), "
        'expert.train.schedule (was "constant")'
    )
    assert line.startswith(f"error: {newest}: {words}; set those keys back")
    assert fit(run, *changes, "island.shards=/nowhere") == 2
    assert not (run / "experiment.yaml").exists()  # the corrected settings are not refused for those
    assert fit(run) == 0
    assert (run / "experiment.yaml").exists()
    assert "expert-0: resumes at step 18" in capsys.readouterr().err
    assert weights(run) == weights(finished)


def test_a_member_that_was_stopped_here_and_finished_elsewhere_is_finished(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    status = read_status(run, "expert-0")
    member(run, "status.json").write_text(json.dumps({**status, "state": "stopped"}))
    assert fit(run) == 0
    assert "expert-0 is finished" in capsys.readouterr().err


def test_steps_lost_by_a_kill_are_repeated(finished, interrupted, capsys):
    before = read_status(interrupted, "expert-0")["seconds"]
    assert fit(interrupted) == 0
    assert "from here on" not in capsys.readouterr().err, "nothing changed"
    assert read_status(interrupted, "expert-0")["seconds"] > before > 0
    assert weights(interrupted) == weights(finished)


def test_a_resume_at_a_checkpoint_by_minutes_is_exact(finished, tmp_path, monkeypatch):
    """As if every fourth step were late; it is asked once per step."""
    steps = itertools.count(1)
    monkeypatch.setattr(RollingCheckpoints, "is_late", lambda _: next(steps) % 4 == 0)
    run = tmp_path / "run"
    shutil.copytree(finished / "prepared", run / "prepared")
    assert fit(run, "island.checkpoint_every_n_minutes=5", "island.keep_checkpoints=9") == 0
    assert checkpoints(run) == [f"step-{step:08d}.ckpt" for step in (4, 8, 12, 16, 20)]
    assert weights(run) == weights(finished)
    shutil.rmtree(member(run, "artifact"))
    shutil.rmtree(member(run, "checkpoints", "step-00000020.ckpt"))
    assert fit(run) == 0
    assert weights(run) == weights(finished)


def test_a_finished_member_trains_on_as_if_it_had_never_ended(finished, tmp_path, capsys):
    longer, run, straight = "expert.train.max_steps=31", tmp_path / "run", tmp_path / "straight"
    shutil.copytree(finished, run)
    (run / "members/expert-0/ema/artifact").mkdir(parents=True)  # as the command ema keeps one of 20 steps
    shutil.copytree(finished / "prepared", straight / "prepared")
    assert fit(run, longer) == 0
    assert "expert-0: resumes at step 20" in capsys.readouterr().err
    assert fit(straight, longer) == 0
    assert weights(run) == weights(straight) != weights(finished)
    assert (read_status(run, "expert-0")["max_steps"], read_status(run, "expert-0")["step"]) == (31, 31)
    assert not (run / "members/expert-0/ema/artifact").exists()
    assert fit(run) == 2, "fewer steps are another training"
    assert "expert.train.max_steps (was 31)" in capsys.readouterr().err


def test_a_finished_member_without_checkpoints_is_not_trained_on(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(member(run, "checkpoints"))
    assert fit(run, "expert.train.max_steps=31") == 2
    assert "has step = 20 in member.json, and the experiment asks for 31" in capsys.readouterr().err
    assert weights(run) == weights(finished)


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "stops"), [(24, 3), (40, 1)])
def test_a_resume_around_the_end_of_an_epoch_skips_and_repeats_nothing(tiny_prepared, tmp_path, batch_size, stops):
    """Validations at the same steps, too; one is due at the end of the first epoch."""
    num_samples = json.loads((tiny_prepared / "manifest.json").read_text())["clusters"][0]["train"]
    epoch = num_samples // (batch_size // 2)
    settings = [
        f"expert.train.global_batch_size={batch_size}",
        f"expert.train.max_steps={2 * epoch + 1}",
        "island.checkpoint_every_n_steps=1",
        "island.keep_checkpoints=100",
        f"island.validate_every_n_steps={epoch}",
        LOGS_SAMPLES,
    ]

    def steps_of(run):
        return member(run, "sample_ids.txt").read_text().splitlines()

    straight = tmp_path / "straight"
    shutil.copytree(tiny_prepared, straight / "prepared")
    assert fit(straight, *settings) == 0
    assert len(steps_of(straight)) == 2 * epoch + 1
    first_epoch = " ".join(line.partition(": ")[2] for line in steps_of(straight)[:epoch]).split()
    assert len(set(first_epoch)) == len(first_epoch) == epoch * batch_size // 2
    for at in (epoch, epoch - 1, 2 * epoch)[:stops]:
        run = copy_run(straight, tmp_path / str(at), "expert-0")
        for path in member(run, "checkpoints").iterdir():
            if int(path.stem[5:]) > at:
                shutil.rmtree(path)
        member(run, "sample_ids.txt").unlink()
        assert fit(run, *settings) == 0
        assert steps_of(run) == steps_of(straight)[at:]
        assert weights(run) == weights(straight)
        shown = events(run)
        assert [event.step for event in shown.Scalars("1_watch/held_out/loss")] == [epoch, 2 * epoch, 2 * epoch + 1]


def test_a_kill_between_the_last_step_and_the_artifact_costs_nothing(finished, tmp_path, capsys):
    run = copy_run(finished, tmp_path / "run", "expert-0")
    member(run, "status.json").unlink()
    assert fit(run) == 0
    assert "expert-0: resumes at step 20" in capsys.readouterr().err
    assert weights(run) == weights(finished)
    meta = json.loads(member(run, "artifact", "member.json").read_text())
    assert (meta["step"], meta["num_samples"]) == (20, 160)


def test_a_truncated_checkpoint_falls_back_to_the_one_before_and_says_so(finished, interrupted, capsys):
    newest = member(interrupted, "checkpoints", "step-00000018.ckpt")
    cut(newest)
    assert fit(interrupted) == 0
    said = capsys.readouterr().err
    assert f"{newest}: damaged checkpoint (" in said
    assert "falling back to the one before it" in said
    assert "expert-0: resumes at step 12" in said
    assert weights(interrupted) == weights(finished)
    assert "step-00000018.damaged" in checkpoints(interrupted)
    # What the curves had of the steps that are taken again is gone.
    shown = events(interrupted)
    assert [event.step for event in shown.Scalars("1_watch/train/loss")] == [5, 10, 15, 20]


def until(is_true, process):
    """Wait for something that the process is going to do."""
    with within(300):
        while not is_true():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
                raise AssertionError(process.communicate())


@pytest.mark.slow
def test_a_signal_before_the_first_step_stops_cleanly(finished_run, tmp_path):
    run = copy_run(finished_run, tmp_path / "run", "expert-0")
    shutil.rmtree(member(run))
    process = start("fit", run, "member=expert-0")
    until(lambda: read_status(run, "expert-0").get("state") == "starting", process)
    process.send_signal(signal.SIGUSR1)
    _, said = finish(process, code=130)
    assert "the same command resumes it" in said
    assert read_status(run, "expert-0")["state"] == "stopped"
