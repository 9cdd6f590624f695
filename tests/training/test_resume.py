"""A member that goes on: killed anywhere, with damaged checkpoints, on an island set otherwise."""

import dataclasses
import json
import shutil
from functools import partial

import pytest
import torch
from sample_log import LOGS_SAMPLES
from shards.mds import WARNINGS
from tiny_runs import TINY, copy_run, read_status
from training.members import MEMBER
from training.short_fits import SHORT, events, fit, member, trained, weights
from training.two_processes import fit_in_rank, in_two_processes

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.training.checkpoint import check_origin, origin_of

pytestmark = WARNINGS


@pytest.fixture
def interrupted(finished, tmp_path):
    """As a member's folder is left by a kill before its last step."""
    run = copy_run(finished, tmp_path / "interrupted", "expert-0")
    shutil.rmtree(member(run, "checkpoints", "step-00000020.ckpt"))
    return run


@pytest.mark.parametrize(
    ("setting", "said", "other"),
    [
        ("devices=2", "devices=2 (was 1)", "noise and rounding"),
        ("accelerator=gpu", 'accelerator="gpu" (was "cpu")', "noise and rounding"),
        ("strategy=fsdp", 'strategy="fsdp" (was "auto")', "rounding"),
        ("precision=bf16-mixed", 'precision="bf16-mixed" (was "32-true")', "rounding"),
        ("ema=host", 'ema="host" (was "device")', "averages"),
        ("micro_batch_size=4", "micro_batch_size=4 (was null)", "rounding"),
        ("attention=sdpa", 'attention="sdpa" (was "auto")', "rounding"),
        ("compile=true", "compile=true (was false)", "rounding"),
        ("activation_checkpointing=true", "activation_checkpointing=true (was false)", "rounding"),
        ("num_threads=2", "num_threads=2 (was 1)", "rounding"),
        ("keep_checkpoints=9", None, None),
    ],
)
def test_settings_that_round_otherwise_are_said(tmp_path, setting, said, other):
    torch.save(origin_of(MEMBER, load_experiment(TINY)), tmp_path / "trainer.pt")

    found = check_origin(tmp_path, origin_of(MEMBER, load_experiment(TINY, [f"island.{setting}"])))

    assert found == (said and f"from here on with island.{said}: the same samples, other {other}")


def test_a_checkpoint_without_a_newer_setting_had_its_default(tmp_path):
    origin = origin_of(MEMBER, load_experiment(TINY))
    del origin["experiment"]["island"]["ema"]
    torch.save(origin, tmp_path / "trainer.pt")
    both = ["island.ema=host", "island.devices=2"]

    assert check_origin(tmp_path, origin_of(MEMBER, load_experiment(TINY))) is None
    assert check_origin(tmp_path, origin_of(MEMBER, load_experiment(TINY, both))).endswith(
        'island.ema="host" (was "device"): the same samples, other noise and rounding and averages'
    )


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


def test_the_checkpoint_of_another_member_is_refused(finished, tiny_run, capsys):
    folder = tiny_run / "members" / "expert-1" / "checkpoints"
    shutil.copytree(member(finished, "checkpoints"), folder)

    assert fit(tiny_run, name="expert-1") == 2

    newest = folder / "step-00000020.ckpt"
    words = "is a checkpoint of expert-0, not of expert-1; move it to that folder, or remove it"

    assert f"error: {newest}: {words}\n" in capsys.readouterr().err
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


def test_steps_lost_by_a_kill_are_repeated(finished, interrupted, capsys):
    before = read_status(interrupted, "expert-0")["seconds"]

    assert fit(interrupted, "island.num_workers=0") == 0

    assert "from here on" not in capsys.readouterr().err, "nothing changed"
    assert read_status(interrupted, "expert-0")["seconds"] > before > 0
    assert weights(interrupted) == weights(finished)

    member(interrupted, "status.json").write_text(
        json.dumps({**read_status(interrupted, "expert-0"), "state": "stopped"})
    )
    assert fit(interrupted) == 0
    assert "expert-0 is finished" in capsys.readouterr().err, "also where another island has finished it"


def test_a_finished_member_trains_on_as_if_it_had_never_ended(finished, tiny_run, tmp_path, capsys):
    longer = "expert.train.max_steps=31"
    run = shutil.copytree(finished, tmp_path / "longer")
    (run / "members/expert-0/ema/artifact").mkdir(parents=True)  # as the command ema keeps one of 20 steps

    assert fit(run, longer) == 0
    assert "expert-0: resumes at step 20" in capsys.readouterr().err
    assert fit(tiny_run, longer) == 0

    assert weights(run) == weights(tiny_run) != weights(finished)

    status = read_status(run, "expert-0")
    assert (status["max_steps"], status["step"]) == (31, 31)
    assert not (run / "members/expert-0/ema/artifact").exists()
    assert fit(run) == 2, "fewer steps are another training"
    assert "expert.train.max_steps (was 31)" in capsys.readouterr().err

    # A kill between the last step and the artifact costs nothing.
    shutil.rmtree(member(run, "artifact"))
    member(run, "status.json").unlink()

    assert fit(run, longer) == 0
    assert "expert-0: resumes at step 31" in capsys.readouterr().err
    assert weights(run) == weights(tiny_run)

    meta = json.loads(member(run, "artifact", "member.json").read_text())
    assert (meta["step"], meta["num_samples"]) == (31, 248)


def test_a_finished_member_without_checkpoints_is_not_trained_on(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(member(run, "checkpoints"))

    assert fit(run, "expert.train.max_steps=31") == 2
    assert "has step = 20 in member.json, and the experiment asks for 31" in capsys.readouterr().err
    assert weights(run) == weights(finished)


LESS = ("expert.train.optimizer=adamw-8bit", "island.precision=bf16-true", "island.ema=host")


def interrupt(run, *steps):
    """Leave the folder as a kill does before ``steps``, each with a checkpoint."""
    for step in steps:
        shutil.rmtree(member(run, "checkpoints", f"step-{step:08d}.ckpt"))

    shutil.rmtree(member(run, "artifact"))


def test_in_less_memory_too_it_resumes_to_the_bit_and_may_change_its_island(finished, tmp_path, capsys):
    straight = trained(finished / "prepared", tmp_path, *LESS)
    wanted = weights(straight)
    interrupt(straight, 18, 20)
    capsys.readouterr()

    assert fit(straight, *LESS) == 0
    assert "from here on" not in capsys.readouterr().err
    assert weights(straight) == wanted != weights(finished)

    one = ["-c", str(TINY), f"run_dir={straight}", *SHORT, *LESS, "sample.member=expert-0", "--num=1"]

    assert main(["sample", *one, f"--out={tmp_path / 'one.png'}"]) == 0
    assert (tmp_path / "one.png").exists()

    capsys.readouterr()
    assert fit(straight, LESS[0], "expert.train.max_steps=22") == 0

    words = 'island.precision="32-true" (was "bf16-true"), island.ema="device" (was "host")'
    assert f"from here on with {words}: the same samples, other rounding and averages" in capsys.readouterr().err
    assert fit(straight, *LESS[1:], "expert.train.max_steps=24") == 2
    assert 'expert.train.optimizer (was "adamw-8bit"); set those keys back' in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_in_less_memory_resume_to_the_bit_between_averages_and_one_goes_on(tiny_prepared, tmp_path, capsys):
    """The last matrix has three rows, for two ranks. Averages take in steps 1 and 10, and the kill is between them."""
    run = tmp_path / "run"
    shutil.copytree(tiny_prepared, run / "prepared")
    settings = (
        *(
            *LESS,
            "expert.network.params.patch_size=1",
            "expert.train.max_steps=12",
            "island.checkpoint_every_n_steps=7",
        ),
        *("expert.train.ema_widths=[0.1]", "expert.train.ema_snapshots=2", "island.accelerator=cpu"),
    )
    two = (*settings, "island.devices=2", "island.strategy=fsdp")

    assert in_two_processes(partial(fit_in_rank, run, two)) == {0: 0, 1: 0}

    files = [member(run, "artifact", "model.safetensors"), *member(run, "ema").glob("*.safetensors")]
    wanted = [path.read_bytes() for path in files]
    interrupt(run, 12)

    assert in_two_processes(partial(fit_in_rank, run, two)) == {0: 0, 1: 0}
    assert len(files) == 3 and [path.read_bytes() for path in files] == wanted
    assert fit(run, *settings, "expert.train.max_steps=13") == 0
    assert "island.devices=1 (was 2)" in capsys.readouterr().err


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
