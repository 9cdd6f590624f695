"""``full``, ``top-1`` and ``top-k`` against a loop in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import strategy_of


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), num_clusters=st.integers(1, 9), top_k=st.integers(1, 12))
@pytest.mark.parametrize("name", ["full", "top-1", "top-k"])
def test_against_a_loop(name, seed, num_clusters, top_k):
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.randn(5, num_clusters, generator=generator, dtype=torch.float64).mul(3).softmax(1)
    params = {"top_k": top_k} if name == "top-k" else {}
    weights = strategy_of(SampleConfig(strategy=name, strategy_params=params)).weights(probabilities)
    num_kept = {"full": num_clusters, "top-1": 1, "top-k": min(top_k, num_clusters)}[name]
    for row, got in zip(probabilities.tolist(), weights.tolist(), strict=True):
        best = sorted(range(num_clusters), key=lambda k: -row[k])[:num_kept]
        total = sum(row[k] for k in best)
        assert got == pytest.approx([row[k] / total if k in best else 0 for k in range(num_clusters)], abs=1e-12)
        assert [k for k in range(num_clusters) if got[k] == 0] == [k for k in range(num_clusters) if k not in best]


def test_ties_keep_exactly_so_many():
    weights = STRATEGIES.build("top-1", {}).weights(torch.full((3, 4), 0.25))
    assert weights.count_nonzero(dim=1).tolist() == [1, 1, 1] and weights.sum().item() == 3


def test_top_k_must_keep_an_expert():
    with pytest.raises(UserError, match="strategy 'top-k' refuses its params: top_k = 0 keeps no expert"):
        STRATEGIES.build("top-k", {"top_k": 0})
