import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import changes, load_run, refuse_changed, refuse_changes

TINY = Path(__file__).parents[2] / "experiments" / "tiny_2x.yaml"


ENDS = "expert.{}train.max_steps (was 60, where the cosine schedule ends)"


def tiny(run_dir, *overrides):
    return load_experiment(TINY, [f"run_dir={run_dir}", *overrides])


def test_an_empty_record_is_named_and_not_the_file(tiny_run):
    (tiny_run / "experiment.yaml").write_text("")
    with pytest.raises(UserError) as caught:
        load_run(TINY, [f"run_dir={tiny_run}"])

    assert str(caught.value).startswith(f"{tiny_run / 'experiment.yaml'}: keys ")


def test_a_folder_that_has_moved_is_the_one_that_is_used(tmp_path):
    """Its record names the place where it was made."""
    made = Run.open(tiny(tmp_path / "first", "seed=7"), create=True)
    made.folder.root.rename(tmp_path / "second")
    file = tmp_path / "file.yaml"
    file.write_text(TINY.read_text().replace("name: tiny_2x", f"name: tiny_2x\nrun_dir: {tmp_path / 'second'}"))
    for overrides in ([], [f"run_dir={tmp_path / 'second'}"]):
        found = load_run(file, overrides)
        assert (found.run_dir, found.seed) == (str(tmp_path / "second"), 7)


def test_changes_are_those_of_the_training():
    old = asdict(load_experiment(TINY))

    def changed_keys(before, after):
        return [text.partition(" ")[0] for text in changes(before, after).split(", ") if text]

    for override, keys in (
        ("expert.train.learning_rate=1e-3", ["expert.train.learning_rate"]),
        ("router.network.params.depth=7", ["router.network.params.depth"]),
        ("expert.network.params.qk_norm=true", ["expert.network.params.qk_norm"]),
        (
            "prepare.caption_encoder.name=other",  # another name takes none of the params
            ["prepare.caption_encoder.name", "prepare.caption_encoder.params.size"],
        ),
        ("run_dir=elsewhere", []),
        ("island.devices=2", []),
        ("sample.num_steps=7", []),
    ):
        new = asdict(load_experiment(TINY, [override]))
        assert changed_keys(old, new) == keys
        assert changed_keys(new, old) == keys

    assert changed_keys({}, old)
    del old["expert"]["loss"]  # newer than the record
    assert changed_keys(old, asdict(load_experiment(TINY))) == []
    assert changed_keys(old, asdict(load_experiment(TINY, ["expert.loss=velocity"]))) == ["expert.loss"]


@pytest.mark.parametrize(
    ("schedule", "own", "key", "change"),
    [
        ("constant", {}, "router.train", "router.train.max_steps (was 40, where the linear schedule ends)"),
        ("constant", {}, "expert.overrides.expert-0.train", ""),  # which had none of its own
        ("constant", {"schedule": "cosine"}, "expert.overrides.expert-1.train", ENDS.format("overrides.expert-1.")),
        ("constant", {"schedule": "cosine"}, "expert.train", ENDS.format("")),
        ("cosine", {"schedule": "constant"}, "expert.overrides.expert-1.train", ""),
        ("cosine", {}, "expert.overrides.expert-1.train", ENDS.format("overrides.expert-1.")),
    ],
)
def test_more_steps_are_the_same_training_where_the_schedule_does_not_end(schedule, own, key, change):
    """An expert without a schedule of its own has that of all."""
    given = ["router.train.schedule=linear", f"expert.train.schedule={schedule}"]
    if key != "expert.overrides.expert-0.train":
        given.append(f"expert.overrides={json.dumps({'expert-1': {'train': {'max_steps': 60, **own}}})}")

    old, new = (asdict(load_experiment(TINY, [*given, *more])) for more in ([], [f"{key}.max_steps=90"]))

    assert changes(old, new) == change


def test_a_record_may_have_keys_of_earlier_releases_and_a_file_of_the_user_may_not(tmp_path):
    run = Run.open(tiny(tmp_path), create=True).folder
    run.member("router").mkdir(parents=True)
    record = asdict(tiny(tmp_path))
    record["island"]["loader"] = "mds"
    record["prepare"]["partition"]["out_of_cluster_fraction"] = 0.0
    run.experiment.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"unknown key 'prepare\.partition\.out_of_cluster_fraction'"):
        load_experiment(run.experiment)  # nothing else shows that it belongs to a run

    assert load_run(TINY, [f"run_dir={tmp_path}"]) == tiny(tmp_path)
    run.prepared.mkdir()
    assert load_run(run.experiment) == tiny(tmp_path)
    refuse_changes(tmp_path, record, asdict(tiny(tmp_path)))
    assert Run.open(load_experiment(run.experiment), create=True).folder == run


def test_reading_does_not_create_a_missing_folder(tmp_path):
    with pytest.raises(UserError, match="no run here; start it with"):
        Run.open(tiny(tmp_path / "run"))

    assert not (tmp_path / "run").exists()


def test_another_experiment_is_refused_by_its_keys_and_changes_nothing(tmp_path):
    run = Run.open(tiny(tmp_path), create=True)
    before = run.folder.experiment.read_bytes()
    refuse_changed(tiny(tmp_path, "seed=5"))  # nothing was trained
    run.folder.member("expert-0").mkdir(parents=True)
    with pytest.raises(UserError) as caught:
        Run.open(tiny(tmp_path, "seed=5", "expert.train.max_steps=59"), create=True)

    line = str(caught.value)
    assert line.startswith(f"{run.folder.experiment}: ")
    assert "expert.train.max_steps (was 60), seed (was 0);" in line
    assert "run_dir=" in line
    assert run.folder.experiment.read_bytes() == before


@pytest.mark.parametrize("change", ["prepare.images={size: 8, buckets: {max_aspect: 4, step: 4}}", "seed=5"])
def test_a_member_is_not_trained_on_what_another_experiment_prepared(tiny_prepared, tmp_path, capsys, change):
    settings = ["-c", str(TINY), f"run_dir={tmp_path}", "expert.train.max_steps=2", change]
    shutil.copytree(tiny_prepared, tmp_path / "prepared")
    record = Run.open(tiny(tmp_path), create=True).folder.experiment
    before = record.read_bytes()

    assert main(["fit", *settings, "member=expert-0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    key = "prepare.images.buckets" if "images" in change else "seed (was 0); repeat prepare"
    assert line.startswith(f"error: {record}: the shards were prepared with other settings: ") and key in line
    assert record.read_bytes() == before and not (tmp_path / "members").exists()


def test_free_sections_reach_the_members_through_the_folder(tmp_path):
    first = tiny(tmp_path)
    changed = tiny(tmp_path, "island.num_workers=2")

    record = Run.open(first, create=True).folder.experiment
    Run.open(changed)
    assert load_experiment(record) == first

    Run.open(changed, create=True)
    assert load_experiment(record) == changed


@pytest.mark.parametrize("text", ["a: [", "- 1"])
def test_a_damaged_record_is_refused(tmp_path, text):
    run = Run.open(tiny(tmp_path), create=True)
    run.folder.experiment.write_text(text)
    run.folder.member("expert-0").mkdir(parents=True)
    with pytest.raises(UserError, match=r"experiment\.yaml"):
        Run.open(tiny(tmp_path), create=True)

    assert run.folder.experiment.read_text() == text


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_refusal_leaves_no_record_but_that_of_a_training(tmp_path, has_trained):
    run = Run(tiny(tmp_path / "run"))
    with pytest.raises(UserError, match="diverged"), run.claimed():
        if has_trained:
            (run.folder.member("expert-0") / "checkpoints" / "step-00000010.ckpt").mkdir(parents=True)

        raise UserError("diverged")

    assert run.folder.experiment.exists() == has_trained
