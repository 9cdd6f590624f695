"""The command ``ema``: widths of the average compared, and one handed over, after the training."""

import json
import shutil

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from shards.mds import WARNINGS
from tiny_runs import TINY

from ddm_lightning.cli.parser import main
from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.files import sha256_file
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble
from ddm_lightning.evaluation import ema_choice
from ddm_lightning.members.artifact import read_artifact
from ddm_lightning.members.run import Run
from ddm_lightning.training.ema import snapshot_steps

pytestmark = WARNINGS

SHORT = (
    "expert.train.max_steps=40",
    "expert.train.ema_widths=[0.1,0.2]",
    "expert.train.ema_snapshots=4",
    "router.train.max_steps=8",
    "router.train.ema_widths=[0.15]",
    "island.log_every_n_steps=20",
    "island.validate_every_n_steps=40",
    "island.checkpoint_every_n_steps=15",
)


def command(name, run, *more, member="expert-0"):
    return main([name, "-c", str(TINY), f"run_dir={run}", *([f"member={member}"] if member else []), *SHORT, *more])


@pytest.fixture(scope="module")
def trained(tiny_prepared, tmp_path_factory):
    run = tmp_path_factory.mktemp("trained")
    shutil.copytree(tiny_prepared, run / "prepared")
    for member in ("expert-0", "router"):
        assert command("fit", run, member=member) == 0

    return run


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def snapshots(run, member="expert-0"):
    return sorted(path.name for path in (run / "members" / member / "ema").glob("*.safetensors"))


def test_snapshots_lie_at_equal_distances_up_to_the_last_step(trained):
    assert snapshots(trained) == [
        f"width-{width}-step-{step:08d}.safetensors" for width in ("0.1", "0.2") for step in (10, 20, 30, 40)
    ]
    assert snapshots(trained, "router") == [f"width-0.15-step-{step:08d}.safetensors" for step in range(1, 9)]
    assert snapshot_steps(TrainConfig(7, 4, ema_snapshots=3)) == [2, 5, 7]
    assert snapshot_steps(TrainConfig(2, 4, ema_snapshots=16)) == [1, 2]


@pytest.mark.parametrize("last_step", [15, 30])
def test_a_resumed_training_writes_the_same_snapshots_and_a_width_can_be_chosen(trained, run, last_step):
    """After a kill that leaves checkpoints up to ``last_step``, and snapshots of up to 10 steps or all."""
    member = run / "members/expert-0"
    shutil.rmtree(member / "artifact")
    for path in member.glob("checkpoints/*"):
        if int(path.stem.rpartition("-")[2]) > last_step:
            shutil.rmtree(path)

    if last_step == 15:
        for path in member.glob("ema/width-*-step-000000[234]0.safetensors"):
            path.unlink()

    assert command("fit", run) == 0

    assert snapshots(run) == snapshots(trained)
    for name in snapshots(run):
        assert sha256_file(member / "ema" / name) == sha256_file(trained / "members/expert-0/ema" / name)

    assert command("ema", run, "--width", "0.15") == 0


def losses_of(lines):
    """The figure in each row of the table."""
    rows = [line.replace("lowest", "").split() for line in lines if "of the artifact" in line or " width 0." in line]
    return [float(row[-1]) for row in rows]


def test_the_table_marks_the_lowest_loss_and_has_a_routers_accuracy():
    figures = {"width 0.1": {"held_out/loss": 0.3}, "width 0.2": {"held_out/loss": 0.25}, "width 0.25": {}}
    of_router = {"width 0.1": {"held_out/cross_entropy": 0.5, "held_out/accuracy": 0.75}}

    found = [[*map(str, column.cells)] for column in ema_choice.widths_table(figures).columns]
    assert found == [list(figures), ["0.30000", "0.25000", "inf"], ["", "lowest", ""]]
    found = [[*map(str, column.cells)] for column in ema_choice.widths_table(of_router).columns]
    assert found == [["width 0.1"], ["0.50000"], ["0.7500"], ["lowest"]]


def test_widths_are_compared_by_held_out_loss_and_change_nothing(run, capsys):
    before = sha256_file(run / "members/expert-0/artifact/model.safetensors")
    capsys.readouterr()
    assert command("ema", run, "--width", "0.1", "--width", "0.13") == 0
    lines = capsys.readouterr().out.splitlines()
    meta, _ = read_artifact(run / "members/expert-0/artifact")
    losses = losses_of(lines)
    assert len(losses) == 3
    assert losses[0] == pytest.approx(meta.metrics["held_out/loss"], abs=2e-5)
    assert sum("lowest" in line for line in lines) == 1
    assert "--use WIDTH" in lines[-1]
    assert sha256_file(run / "members/expert-0/artifact/model.safetensors") == before


@pytest.mark.parametrize("member", ["expert-0", "router"])
def test_the_figures_of_a_width_do_not_depend_on_those_before_it(run, member):
    experiment = load_experiment(TINY, [f"run_dir={run}", *SHORT])
    widths = ema_choice.EmaWidths(member, Run(experiment))
    together = widths.compare([0.14, 0.16])
    assert together["width 0.16"] == widths.compare([0.16])["width 0.16"] != together["width 0.14"]
    if member == "router":
        assert any(name.startswith("held_out/temperature") for name in together["width 0.16"])


def test_widths_that_the_snapshots_can_make_are_compared_by_default(run, monkeypatch):
    """Snapshots of 0.1 and 0.2 make both and any width between them, but none that is far narrower or wider."""
    monkeypatch.setattr(ema_choice.EmaWidths, "_averaged", lambda self, _: self.weights)
    widths = ema_choice.EmaWidths("expert-0", Run(load_experiment(TINY, [f"run_dir={run}", *SHORT])))
    found = [float(name.partition(" ")[2]) for name in widths.compare(None) if name.startswith("width")]
    assert found == [0.1, 0.15, 0.2]


def test_what_was_kept_of_a_shorter_training_is_gone(run):
    assert command("ema", run, "--use", "0.1") == 0
    assert command("fit", run, "expert.train.max_steps=44") == 0
    after = sha256_file(run / "members/expert-0/artifact/member.json")
    assert command("ema", run, "--use", "original", "expert.train.max_steps=44") == 0
    assert sha256_file(run / "members/expert-0/artifact/member.json") == after
    assert read_artifact(run / "members/expert-0/artifact")[0].step == 44


def test_widths_are_compared_in_the_islands_precision(run, capsys):
    tables = []
    for precision in ("32-true", "bf16-mixed"):
        assert command("ema", run, "--width", "0.15", f"island.precision={precision}") == 0
        tables.append(capsys.readouterr().out.partition("next:")[0])

    assert tables[0] != tables[1]


def test_a_width_is_used_and_undone(run, capsys):
    """Its weights are those of its last snapshot, and its loss is what an artifact of them has."""
    artifact = run / "members/expert-0/artifact"
    files = ("model.safetensors", "member.json")
    before = {name: sha256_file(artifact / name) for name in files}
    status = (run / "members/expert-0/status.json").read_bytes()
    stored = load_file(run / "members/expert-0/ema/width-0.2-step-00000040.safetensors")
    assert command("ema", run, "--use", "0.2") == 0
    chosen, weights = read_artifact(artifact)
    assert weights.keys() == stored.keys()
    for name, value in stored.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)

    assert chosen.metrics["ema_width"] == 0.2

    capsys.readouterr()
    assert command("ema", run, "--width", "0.2") == 0
    out = capsys.readouterr().out
    assert "of the artifact (width 0.2)" in out
    of_artifact, of_width = losses_of(out.splitlines())
    assert of_artifact == of_width == pytest.approx(chosen.metrics["held_out/loss"], abs=1e-5)

    assert command("ema", run, "--use", "0.1") == 0  # not the first choice: the training's artifact stays
    assert command("ema", run, "--use", "original") == 0
    assert {name: sha256_file(artifact / name) for name in files} == before
    assert (run / "members/expert-0/status.json").read_bytes() == status


def test_a_width_has_held_out_figures_of_the_last_step_wherever_the_training_validated(run):
    path = run / "members/expert-0/artifact/member.json"
    document = json.loads(path.read_text())
    document["metrics"]["held_out/step"] = 25.0
    path.write_text(json.dumps(document))
    assert command("ema", run, "--use", "0.1") == 0
    assert json.loads(path.read_text())["metrics"]["held_out/step"] == 40


@pytest.mark.parametrize("how", [("--width", "0.1"), ("--use", "0.1"), ("--use", "original")])
def test_a_member_in_use_is_refused(run, capsys, how):
    lock = run / "members/expert-0/.lock"
    before = sha256_file(run / "members/expert-0/artifact/member.json")
    with FileLock(lock):
        assert command("ema", run, *how) == 2

    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {lock}: expert-0 is in use by another process; wait for it or stop it")
    assert sha256_file(run / "members/expert-0/artifact/member.json") == before


def test_the_choice_is_published(run, tmp_path):
    where = f"remote=file://{tmp_path}/remote"
    assert command("prepare", run, where, member=None) == 0
    assert command("fit", run, where) == 0
    assert command("ema", run, where, "--use", "0.15") == 0
    there = tmp_path / "remote/members/expert-0/artifact/model.safetensors"
    assert sha256_file(there) == sha256_file(run / "members/expert-0/artifact/model.safetensors")


def test_an_ensemble_takes_the_new_weights_and_fit_and_status_follow(run, capsys):
    assert command("fit", run, member="expert-1") == 0
    assert command("fit", run, member=None) == 0
    before = (run / "ensemble.json").read_bytes()
    grid = run / "samples" / "top-1.png"
    drawn = grid.read_bytes()
    capsys.readouterr()
    assert command("ema", run, "--use", "0.2") == 0
    assert (run / "ensemble.json").read_bytes() != before
    load_ensemble(read_ensemble(run / "ensemble.json"))
    loss = json.loads((run / "members/expert-0/artifact/member.json").read_text())["metrics"]["held_out/loss"]
    assert command("status", run, member=None) == 0
    assert f"{loss:.4f}" in capsys.readouterr().out
    assert command("fit", run, member=None) == 0
    assert "nothing to do" not in capsys.readouterr().out
    assert grid.read_bytes() != drawn
    assert command("ema", run, "--use", "original") == 0
    assert (run / "ensemble.json").read_bytes() == before


def damage_first(run):
    path = run / "members/expert-0/ema/width-0.1-step-00000010.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def forget_first(run):
    path = run / "members/expert-0/ema/snapshots.json"
    index = json.loads(path.read_text())
    del index["width-0.1-step-00000010.safetensors"]
    path.write_text(json.dumps(index))


def partition_anew(run):
    path = run / "prepared/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "partition_sha256": "0" * 64}))


def unfinish(run):
    shutil.rmtree(run / "members/expert-0/artifact")


def name_elsewhere(run):
    (run / "members/expert-0/ema/snapshots.json").write_text('{"../x": "0"}')


FIRST = "width-0.1-step-00000010.safetensors"


@pytest.mark.parametrize(
    ("arguments", "change", "words"),
    [
        ("--use 0.3", None, ["width 0.3", "at most 0.2887"]),
        ("--width -1", None, ["width -1", "above 0"]),
        ("--use wide", None, ["--use wide", "0.08"]),
        # Nearly the last step's weights alone, far from the profile of any snapshot.
        ("--width 0.15 --width 0.001", None, ["width 0.001", "miss its profile by 9", "ema_snapshots"]),
        ("--use 0.1", damage_first, [FIRST, "not a whole"]),
        ("--use 0.1", forget_first, [FIRST, "damaged", "remove"]),
        ("--use 0.1", partition_anew, ["expert-0/artifact", "clusters that have changed since"]),
        ("--use 0.1", name_elsewhere, [f"ema/{FIRST}", "damaged"]),
        ("--use 0.1", unfinish, ["not finished"]),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(run, capsys, arguments, change, words):
    if change is not None:
        change(run)

    artifact = run / "members/expert-0/artifact/model.safetensors"
    before = sha256_file(artifact) if artifact.exists() else None
    capsys.readouterr()

    assert command("ema", run, *arguments.split()) == 2

    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert all(word in error for word in words), error
    assert (sha256_file(artifact) if artifact.exists() else None) == before


def test_one_member_has_to_be_named(run, capsys):
    assert command("ema", run, member=None) == 2
    assert "member=expert-0" in capsys.readouterr().err
