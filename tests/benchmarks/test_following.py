from types import SimpleNamespace

import pytest
import torch
from following import Prompts, nearest
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.members.run_folder import RunFolder

LOADED = SimpleNamespace(ensemble=None, meta=SimpleNamespace(x_shape=(3, 8, 8), timestep_shift=1.0))


def test_the_nearest_is_the_one_in_the_same_direction():
    known = torch.tensor([[1.0, 0.0], [0.0, 5.0], [-2.0, -2.0]])
    assert nearest(torch.tensor([[0.1, 3.0], [9.0, 1.0], [-1.0, -2.0]]), known) == [1, 0, 2]


def test_images_that_are_the_training_set_follow_and_others_do_not(tiny_run, monkeypatch):
    """As many as guesses among the names would do so by chance."""
    experiment = load_experiment(TINY, [f"run_dir={tiny_run}"])
    prompts = Prompts(experiment, RunFolder(tiny_run), "expert-0", 24)
    assert len(prompts.chosen) == 24
    monkeypatch.setattr("following.load_single", lambda _: LOADED)
    monkeypatch.setattr(prompts.encoder, "decode", lambda x_0: x_0)
    monkeypatch.setattr("following.image_features", lambda images: images)
    for shift, low, high in ((0, 1.0, 1.0), (1, 0.0, 0.7)):
        order = (prompts.chosen + shift) % len(prompts.names)
        monkeypatch.setattr("following.sample", lambda *_, order=order, **__: prompts.features[order])
        assert low <= prompts.followed(tiny_run) <= high
    # By chance: any training image may be the nearest to any of them.
    pairs = [prompts.names[row] == name for row in prompts.chosen.tolist() for name in prompts.names]
    assert prompts.chance == pytest.approx(sum(pairs) / len(pairs))
    assert 0 < prompts.chance < 1


@pytest.mark.slow
def test_the_tiny_expert_is_judged(finished_run):
    experiment = load_experiment(TINY, [f"run_dir={finished_run}"])
    run = RunFolder(finished_run)
    prompts = Prompts(experiment, run, "expert-0", 8)
    share = prompts.followed(run.artifact("expert-0"))
    assert share * 8 == pytest.approx(round(share * 8))
