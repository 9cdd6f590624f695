import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import trainings

from ddm_lightning.core.errors import UserError
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import MemberStatus

MEMBER = "expert-0"


def setting(arguments, key):
    return [text.partition("=")[2] for text in arguments if text.startswith(f"{key}=")][-1]


@pytest.fixture
def calls(monkeypatch):
    """Command lines; what they would train has a loss of its learning rate, or fails at a negative one."""
    found = []

    def train(command, **_):
        found.append(command)
        time.sleep(0.02)  # as long as it takes to be told of another one's failure
        folder, rate = Path(setting(command, "run_dir")), float(setting(command, "rate"))
        assert (folder / "prepared" / "manifest.json").read_text() == "of the run"
        member = folder / "members" / MEMBER
        (member / "artifact").mkdir(parents=True)
        metrics = {} if rate == 0 else {trainings.LOSS: rate}
        MemberStatus(MEMBER, 1, metrics=metrics).write(member)
        (member / "artifact" / "member.json").write_text("{}")
        return subprocess.CompletedProcess(command, int(rate < 0), "", "what the training said")

    monkeypatch.setattr(trainings.subprocess, "run", train)
    # Whether folders are of the experiment is asked by the sweep's and the recipe's own tests.
    monkeypatch.setattr(trainings, "load", lambda *_: None)
    monkeypatch.setattr(trainings, "refuse_changed", lambda _: None)
    return found


@pytest.fixture
def made(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.prepared.mkdir(parents=True)
    (run.prepared / "manifest.json").write_text("of the run")
    return trainings.Trainings(Namespace(config="a.yaml", overrides=["run_dir=run", "b=c"], jobs=1), run, MEMBER)


def test_each_is_trained_once_in_its_folder_on_the_shards_of_the_run(made, calls, tmp_path):
    settings = {tmp_path / name: [f"rate={rate}"] for name, rate in (("slow", 0.5), ("fast", 2))}
    assert made.losses(settings) == {tmp_path / "slow": 0.5, tmp_path / "fast": 2.0}
    assert [command[:6] for command in calls] == [[sys.executable, "-m", "ddm_lightning", "fit", "-c", "a.yaml"]] * 2
    for command, folder in zip(calls, settings, strict=True):
        assert (setting(command, "member"), setting(command, "b")) == (MEMBER, "c")
        assert setting(command, "run_dir") == str(folder)  # it wins over the user's
        assert setting(command, "island.shards") == str((tmp_path / "run" / "prepared" / "shards").resolve())
    assert made.losses({**settings, tmp_path / "new": ["rate=1"]})[tmp_path / "slow"] == 0.5
    assert len(calls) == 3


def test_a_begun_one_is_kept_and_what_is_no_run_is_not(made, calls, tmp_path):
    begun = tmp_path / "begun"
    for folder in (begun, tmp_path / "none"):
        folder.mkdir()
        (folder / "left").touch()
    (begun / "prepared").mkdir()
    (begun / "prepared" / "manifest.json").write_text("of the run")
    made.losses({begun: ["rate=1"], tmp_path / "none": ["rate=1"]})
    assert (begun / "left").exists() and not (tmp_path / "none" / "left").exists()


def test_a_failed_one_says_why_and_nothing_is_begun_behind_it(made, calls, tmp_path):
    settings = {tmp_path / str(number): ["rate=-1"] for number in range(20)}
    with pytest.raises(UserError, match="ended with code 1: what the training said"):
        made.losses(settings)
    assert len(calls) < 20


def test_one_without_held_out_samples_is_refused(made, calls, tmp_path):
    with pytest.raises(UserError, match="no held-out samples; see prepare"):
        made.losses({tmp_path / "a": ["rate=0"]})
