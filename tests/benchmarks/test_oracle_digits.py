import json

import oracle_digits
import oracle_intervals
import pytest
import torch
from ensemble_networks import ExactExpert, ExactRouter
from finite_set import FiniteSetOracle
from split import Split

from ddm_lightning.ensemble.velocity import Ensemble


def small_split():
    x_0 = torch.randn(9, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    clusters = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1])
    return Split(clusters, clusters, x_0, None)


def test_exact_experts_and_an_exact_router_have_no_error():
    split = small_split()
    oracle = FiniteSetOracle(split.x_0, split.clusters, 2)
    ensemble = Ensemble([ExactExpert(oracle, k) for k in range(2)], ExactRouter(oracle), [2 / 3, 1 / 3])
    figures = oracle_digits.measure(ensemble, split, seed=0).figures
    assert len(figures) == 4 * len(oracle_digits.TIMES) + 1
    assert max(figures.values()) < 1e-5


def test_experts_that_swapped_their_clusters_are_found_out():
    split = small_split()
    oracle = FiniteSetOracle(split.x_0, split.clusters, 2)
    ensemble = Ensemble([ExactExpert(oracle, 1), ExactExpert(oracle, 0)], ExactRouter(oracle), [2 / 3, 1 / 3])
    figures = oracle_digits.measure(ensemble, split, seed=0).figures
    assert min(figures[f"{name}_error_t0.50"] for name in ("ensemble", "expert_0", "expert_1")) > 0.1
    assert figures["router_total_variation_t0.50"] < 1e-5


def test_errors_are_relative():
    exact = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert oracle_digits.relative_error(exact + torch.tensor([[0.0, 0.5], [0.0, 0.0]]), exact) == pytest.approx(0.1)


@pytest.mark.slow
@pytest.mark.long
def test_a_trained_ensemble_is_close_to_the_exact_velocity(tmp_path):
    out = tmp_path / "oracle.json"
    steps = ["expert.train.max_steps=700", "router.train.max_steps=300"]
    oracle_digits.main([f"run_dir={tmp_path / 'run'}", *steps, "--json", str(out)])
    figures = json.loads(out.read_text())["figures"]
    for t in ("0.75", "0.90", "0.95", "0.99"):
        assert figures[f"ensemble_error_t{t}"] < oracle_digits.BAR
    # It has not collapsed onto what every set shares at high noise.
    assert figures["ensemble_error_t0.50"] < 0.6
    assert figures["router_total_variation_t0.50"] < 0.25


@pytest.mark.slow
@pytest.mark.long
def test_experts_by_noise_level_cost_the_same_and_are_compared_by_t(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    oracle_intervals.main(["--quick", "--json", "out.json"])
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert figures["flops_ratio"] == pytest.approx(1) and 0.5 < figures["mean_ratio"] < 1.5
    assert (tmp_path / "out.png").stat().st_size > 10_000
