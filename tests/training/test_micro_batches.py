"""Micro batches: gradients accumulated within a step."""

import pytest
import torch
from sample_log import LOGS_SAMPLES
from shards.mds import WARNINGS
from tiny_runs import read_status
from training.short_fits import fit, trained, weights

from ddm_lightning.members.load import load_network

pytestmark = WARNINGS
SHORT = ("router.train.max_steps=10", LOGS_SAMPLES)


@pytest.fixture(scope="module")
def whole(tiny_prepared, tmp_path_factory):
    """Expert and router, trained without micro batches."""
    run = trained(tiny_prepared, tmp_path_factory.mktemp("whole"), *SHORT)

    assert fit(run, *SHORT, name="router") == 0

    return run


@pytest.mark.parametrize("member", ["expert-0", "router"])
def test_micro_batches_give_the_weights_of_the_whole_batch(whole, tiny_run, member):
    """8 or 16 samples, at most 3 at once, so the micro batches are unequal."""
    assert fit(tiny_run, *SHORT, "island.micro_batch_size=3", name=member) == 0

    parts, expected = (run / "members" / member for run in (tiny_run, whole))
    assert (parts / "sample_ids.txt").read_text() == (expected / "sample_ids.txt").read_text()

    reference = load_network(expected / "artifact")[1].state_dict()
    for name, value in load_network(parts / "artifact")[1].state_dict().items():
        torch.testing.assert_close(value, reference[name], rtol=1e-3, atol=1e-4)  # 20 steps moved it by some 1e-2

    figures, found = (read_status(run, member)["metrics"] for run in (whole, tiny_run))

    assert found.keys() == figures.keys()

    for name, value in found.items():
        assert value == pytest.approx(figures[name], rel=1e-3, abs=1e-6), name


def test_a_single_micro_batch_changes_no_bit(whole, tiny_run):
    assert fit(tiny_run, *SHORT, "island.micro_batch_size=64") == 0
    assert weights(tiny_run) == weights(whole)
