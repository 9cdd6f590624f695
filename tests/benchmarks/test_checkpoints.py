import checkpoints
import pytest
import torch
from checkpoints import Cost, Saved

from ddm_lightning.training.checkpoint import damage_of


def test_both_ways_save_all_and_what_is_waited_for_stands_still(tmp_path):
    saved = Saved(checkpoints.QUICK, torch.device("cpu"), tmp_path)
    network, optimizer = saved.step.network, saved.step.optimizer
    numbers = sum(p.numel() for p in network.parameters())
    assert saved.num_bytes == pytest.approx(4 * 4 * numbers, rel=0.01)  # weights, two moments, the average
    ours, theirs = saved.in_background(saved.undisturbed()), saved.waited_for()
    assert damage_of(tmp_path / "background") is None
    assert torch.load(tmp_path / "waited-for")["optimizer"]["state"].keys() == optimizer.state_dict()["state"].keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["background", "waited-for"]
    assert 0 < ours.still < ours.whole
    assert theirs.still == theirs.lost == theirs.whole > 0
    saved.writer.close()


def test_ratios_are_of_pairs():
    found = {
        "background": [Cost(1.0, 2.0, 5.0), Cost(2.0, 2.0, 5.0), Cost(3.0, 9.0, 5.0)],
        "waited for": [Cost(10.0, 10.0, 10.0), Cost(10.0, 10.0, 10.0), Cost(5.0, 5.0, 5.0)],
    }
    figures = checkpoints._report(found, 0.1, 10**9, checkpoints.QUICK).figures
    assert figures["still_over_waited_for"] == pytest.approx(0.2)
    assert figures["lost_over_waited_for"] == pytest.approx(0.2)
    assert (figures["seconds_lost_background"], figures["seconds_whole_waited_for"]) == (2.0, 10.0)
