"""Images of a validation: the experiment's prompts, or its first classes, from the same noise each time."""

import io
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from shards.mds import WARNINGS
from tiny_runs import TINY
from training.members import MEMBER
from training.short_fits import events, fit, member, weights

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.grids import labelled_grid
from ddm_lightning.encoders.captions import HashedWords
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.load import load_network
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.training.previews import fixed_rows, noise_of_rows
from ddm_lightning.training.prompts import encoded_prompts
from ddm_lightning.use.ensemble import DecentralizedEnsemble

pytestmark = WARNINGS
PROMPTS = ["red disc", "blue square"]  # of the experiment
# Where the second row begins: below the margin, a row and a gap.
BELOW = 12 + 72 + 4


def shown(run):
    """The images of each validation, by step."""
    images = events(run).Images("1_watch/validation/samples")
    return {one.step: np.asarray(Image.open(io.BytesIO(one.encoded_image_string))) for one in images}


def test_a_plain_loop_makes_the_same_images(finished):
    """Euler's steps with the weights of the artifact, which are those of the last validation."""
    _, network = load_network(member(finished, "artifact"))
    keys = [(prompt, index) for prompt in PROMPTS for index in range(4)]
    x_t = torch.stack([torch.randn(3, 8, 8, generator=keyed_generator(0, "x_1", *key)) for key in keys])
    condition = Condition.of(torch.from_numpy(HashedWords(16).vectors([prompt for prompt, _ in keys])))
    with torch.no_grad():
        for t, s in ((1.0, 0.75), (0.75, 0.5), (0.5, 0.25), (0.25, 0.0)):
            x_t = x_t + (s - t) * network(x_t, torch.full((8,), t), condition)

    images = ((x_t.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    held_out = [np.zeros((8, 8, 3), np.uint8)] * 8
    rows = [("held out", held_out), ("red disc", images[:4]), ("blue square", images[4:])]
    expected = np.asarray(labelled_grid(rows, 9))

    np.testing.assert_array_equal(shown(finished)[20][BELOW:], expected[BELOW:])


def test_they_begin_with_the_noise_of_the_command_sample(finished):
    settings = ["sample.member=expert-0", "sample.solver=euler", "expert.train.max_steps=20"]
    experiment = load_experiment(TINY, [f"run_dir={finished}", *settings])
    images = DecentralizedEnsemble.open(experiment).sample(PROMPTS, num=4)
    rows = [("held out", [np.zeros((8, 8, 3), np.uint8)] * 8)]
    for label, own in zip(PROMPTS, (images[:4], images[4:]), strict=True):
        rows.append((label, [np.asarray(image) for image in own]))

    expected = np.asarray(labelled_grid(rows, 9)).astype(int)
    assert abs(shown(finished)[20][BELOW:] - expected[BELOW:]).max() <= 2  # solvers round differently


def test_validations_differ_by_weights_alone(finished, tiny_run):
    first, last = shown(finished).values()
    assert first.shape == last.shape and (first[BELOW:] != last[BELOW:]).any()

    # Labels, and held-out images.
    np.testing.assert_array_equal(first[:BELOW], last[:BELOW])
    np.testing.assert_array_equal(first[:, :70], last[:, :70])

    assert fit(tiny_run, "expert.train.learning_rate=1e-12", "expert.train.warmup_steps=0") == 0
    first, last = shown(tiny_run).values()
    np.testing.assert_array_equal(first, last)


def test_an_island_without_the_encoder_says_so_and_trains_the_same(finished, tiny_run, monkeypatch, capsys):
    def fails(*_):
        raise UserError("no weights here")

    monkeypatch.setattr(HashedWords, "vectors", fails)
    assert fit(tiny_run, "sample.prompts=[a prompt of its own]") == 0

    said = [line for line in capsys.readouterr().err.splitlines() if "no weights here" in line]
    assert said == ["validations show samples for held-out captions, not for sample.prompts: no weights here"]
    assert weights(tiny_run) == weights(finished)
    assert {*shown(tiny_run)} == {12, 20}


@pytest.fixture
def run_of(tiny_prepared, tmp_path):
    """Opens the tiny run in a folder of this name, as on another island."""

    def opened(name, *overrides):
        folder = RunFolder(tmp_path / name)
        if not folder.prepared.exists():
            shutil.copytree(tiny_prepared, folder.prepared)

        settings = [f"run_dir={folder.root}", f"remote={tmp_path / 'remote'}"]
        return Run(load_experiment(TINY, [*settings, *overrides]), folder)

    return opened


def test_prompts_are_encoded_where_the_run_is_prepared(run_of, monkeypatch):
    """Changed prompts are encoded and published by a second ``prepare``."""
    changed = "sample.prompts=[green ring]"
    for settings in ((), (changed,)):
        run = run_of("a")
        assert main(["prepare", "-c", str(TINY), f"run_dir={run.folder.root}", f"remote={run.url}", *settings]) == 0

    expected = torch.from_numpy(HashedWords(16).vectors([*PROMPTS, "green ring"]))
    monkeypatch.setattr(HashedWords, "vectors", None)
    for island in ("a", "b"):
        rows = [encoded_prompts(run_of(island)), encoded_prompts(run_of(island, changed))]
        assert [label for own in rows for label in own.labels] == [*PROMPTS, "green ring"]
        assert torch.equal(torch.cat([own.condition.values for own in rows]), expected)

    assert encoded_prompts(run_of("b", "sample.prompts=[yellow cross]")) is None


@pytest.mark.parametrize(
    ("condition", "labels", "num"),
    [
        (ConditionSpec("none", 0), ["no condition"], 8),
        (ConditionSpec("class", 3), ["owl", "cat", "dog"], 2),
        (ConditionSpec("class", 20), [f"class {number}" for number in range(8)], 1),
    ],
)
def test_without_text_the_rows_are_the_first_classes(condition, labels, num):
    own = SimpleNamespace(**{**vars(MEMBER), "condition": condition})
    names = labels if "owl" in labels else None
    rows = fixed_rows(own, SimpleNamespace(manifest=SimpleNamespace(class_names=names)))
    noise, found = noise_of_rows(rows, MEMBER.seed, MEMBER.x_shape)

    assert rows.labels == labels and len(noise) == num * len(labels)

    key = "no condition"
    if condition.kind == "class":
        assert found.values.tolist() == [number for number in range(len(labels)) for _ in range(num)]
        key = f"class {len(labels) - 1}"

    # As ``sample`` generates it.
    assert torch.equal(noise[-1], torch.randn(3, 4, 4, generator=keyed_generator(7, "x_1", key, num - 1)))


def test_text_without_prompts_has_the_captions_of_held_out_images(run_of):
    prompts = ["red disc", "red disc", *map(str, range(20))]
    rows = fixed_rows(MEMBER, run_of("a", f"sample.prompts={prompts}"))
    assert rows.labels == ["red disc", *"0123456"]

    assert fixed_rows(MEMBER, run_of("a", "sample.prompts=[]")) is None
