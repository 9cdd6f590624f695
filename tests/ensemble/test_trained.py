"""A trained ensemble against the exact velocity and cluster posterior of its training set."""

from pathlib import Path

import numpy as np
import pytest
import torch
from finite_set import FiniteSetOracle

from ddm_lightning.__main__ import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.encoders.interfaces import StoredForm
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble
from ddm_lightning.evaluation.image_sets import open_side
from ddm_lightning.flow.path import interpolate
from ddm_lightning.members.run import Run
from ddm_lightning.shards.manifest import TRAIN

DIGITS = Path(__file__).parents[2] / "experiments" / "digits_2x.yaml"


def relative_error(found, exact):
    return float((found - exact).norm() / exact.norm())


@pytest.mark.slow
@pytest.mark.long
def test_a_trained_ensemble_is_close_to_the_exact_velocity(tmp_path):
    settings = [f"run_dir={tmp_path}", "expert.train.max_steps=700", "router.train.max_steps=300"]
    assert main(["fit", "-c", str(DIGITS), *settings]) == 0
    run = Run(load_experiment(DIGITS, settings))
    ensemble = load_ensemble(read_ensemble(run.folder.ensemble))
    shards, *_ = open_side(run.folder.shards, run.manifest, TRAIN)
    samples = shards.take(np.arange(len(shards)))
    x_0 = StoredForm(run.manifest.stores, run.manifest.normalisation).mean(samples["x_0"].float())
    oracle = FiniteSetOracle(x_0, samples["cluster"], 2)
    generator = torch.Generator().manual_seed(0)

    for t, most in ((0.5, 0.6), (0.75, 0.2), (0.9, 0.2), (0.95, 0.2), (0.99, 0.2)):
        times = torch.full((len(x_0),), t)
        x_t = interpolate(x_0, torch.randn(x_0.shape, generator=generator), times)
        assert relative_error(ensemble.velocity(x_t, times), oracle.velocity(x_t, times)) < most
        # It has not collapsed onto what every set shares at high noise.
        wrong = ensemble.probabilities(x_t, times) - oracle.cluster_posterior(x_t, times)
        assert wrong.abs().sum(1).mean() / 2 < 0.25
