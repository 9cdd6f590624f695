"""What the artifact of a finished member says of it."""

import pytest
import torch
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.members.artifact import hand_over
from ddm_lightning.members.member import Member
from ddm_lightning.members.meta import read_meta
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.shards.manifest import Manifest


def handed_over(member, experiment, prepared, tmp_path):
    """Description of the artifact of a member that has trained for 60 steps."""
    manifest = Manifest.read(prepared.parent)
    resolved = Member.resolve(member, experiment, manifest)
    weights = {"weight": torch.ones(2)}
    hand_over(tmp_path / member, resolved, manifest, weights, "velocity", MemberStatus(member, 60))
    return read_meta(tmp_path / member)


@pytest.mark.parametrize(("member", "dropout"), [("expert-1", 0.0), ("monolith", 0.0), ("router", 0.25)])
def test_an_artifact_has_the_dropout_of_conditions_that_its_member_was_trained_with(
    tiny_prepared, tmp_path, member, dropout
):
    experiment = load_experiment(TINY, ["condition.dropout=0.0", "router.condition_dropout=0.25"])
    assert handed_over(member, experiment, tiny_prepared, tmp_path).condition_dropout == dropout


@pytest.mark.parametrize(("member", "shift"), [("expert-1", 3.0), ("monolith", 3.0), ("router", 1.5)])
def test_an_artifact_has_the_timestep_shift_that_its_member_was_trained_with(tiny_prepared, tmp_path, member, shift):
    experiment = load_experiment(TINY, ["expert.timesteps.shift=3.0", "router.timesteps.shift=1.5"])
    meta = handed_over(member, experiment, tiny_prepared, tmp_path)
    assert (meta.timestep_shift, meta.shift_for((3, 4, 4))) == (shift, shift)


def test_an_artifact_has_the_shift_of_each_shape(tiny_prepared, tmp_path):
    """The tiny run's samples have 8 x 8 cells."""
    experiment = load_experiment(TINY, ["expert.timesteps={shift: 3.0, shift_by_tokens: true}"])
    meta = handed_over("expert-0", experiment, tiny_prepared, tmp_path)
    assert [meta.shift_for((3, *size)) for size in ((8, 8), (4, 4), (2, 8))] == [3.0, 1.5, 1.5]
    assert not handed_over("router", experiment, tiny_prepared, tmp_path).shift_by_tokens


def test_an_artifact_counts_the_images_of_each_class(tiny_prepared, tmp_path):
    experiment = load_experiment(TINY, ["condition.kind=class", "sample.prompts=[]"])
    manifest = Manifest.read(tiny_prepared.parent)
    first, second = manifest.class_counts

    expert = handed_over("expert-1", experiment, tiny_prepared, tmp_path)
    monolith = handed_over("monolith", experiment, tiny_prepared, tmp_path)

    assert expert.class_counts == second
    assert monolith.class_counts == [a + b for a, b in zip(first, second, strict=True)]
    assert sum(monolith.class_counts) == manifest.num_samples
