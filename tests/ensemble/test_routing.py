"""Routing against a loop in plain Python, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.routing import route


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), num_clusters=st.integers(1, 9), top_k=st.integers(1, 12))
@pytest.mark.parametrize("strategy", ["full", "top-1", "top-k"])
def test_against_a_loop(strategy: str, seed: int, num_clusters: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.randn(5, num_clusters, generator=generator, dtype=torch.float64).mul(3).softmax(1)
    weights = route(probabilities, strategy, top_k)
    num_kept = {"full": num_clusters, "top-1": 1, "top-k": min(top_k, num_clusters)}[strategy]
    for row, got in zip(probabilities.tolist(), weights.tolist(), strict=True):
        best = sorted(range(num_clusters), key=lambda k: -row[k])[:num_kept]
        total = sum(row[k] for k in best)
        assert got == pytest.approx([row[k] / total if k in best else 0 for k in range(num_clusters)], abs=1e-12)
        assert [k for k in range(num_clusters) if got[k] == 0] == [k for k in range(num_clusters) if k not in best]


def test_ties_keep_exactly_so_many() -> None:
    weights = route(torch.full((3, 4), 0.25), "top-1")
    assert weights.count_nonzero(dim=1).tolist() == [1, 1, 1] and weights.sum().item() == 3


def test_refusals_name_the_key() -> None:
    with pytest.raises(UserError, match=r"sample\.strategy 'best' is none of full, top-1, top-k, bayes"):
        route(torch.ones(1, 1), "best")
    with pytest.raises(UserError, match=r"sample\.top_k = 0 keeps no expert"):
        route(torch.ones(1, 1), "top-k", 0)
