"""What the artifact of a finished member says of it."""

import pytest
import torch
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.members.artifact import hand_over, read_meta
from ddm_lightning.members.member import Member
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.shards.manifest import Manifest


@pytest.mark.parametrize(("member", "shift"), [("expert-1", 3.0), ("monolith", 3.0), ("router", 1.5)])
def test_an_artifact_has_the_timestep_shift_that_its_member_was_trained_with(tiny_prepared, tmp_path, member, shift):
    experiment = load_experiment(TINY, ["expert.timesteps.shift=3.0", "router.timesteps.shift=1.5"])
    manifest, status = Manifest.read(tiny_prepared.parent), MemberStatus(member, 60)
    resolved = Member.resolve(member, experiment, manifest)
    hand_over(tmp_path / "artifact", resolved, manifest, {"weight": torch.ones(2)}, "velocity", status)
    assert read_meta(tmp_path / "artifact").timestep_shift == shift


def test_an_artifact_counts_the_images_of_each_class(tiny_prepared, tmp_path):
    experiment = load_experiment(TINY, ["condition.kind=class", "sample.prompts=[]"])
    manifest = Manifest.read(tiny_prepared.parent)
    first, second = manifest.class_counts
    expected = {"expert-1": second, "monolith": [a + b for a, b in zip(first, second, strict=True)]}
    for member, counts in expected.items():
        resolved = Member.resolve(member, experiment, manifest)
        status = MemberStatus(member, 60)
        hand_over(tmp_path / member, resolved, manifest, {"weight": torch.ones(2)}, "velocity", status)
        assert read_meta(tmp_path / member).class_counts == counts
    assert sum(counts) == manifest.num_samples
