"""Several experts of one cluster: each is asked at its own times alone, and the ensemble stays exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from artifact_files import SHAPE, edit, put, refused
from ensemble_networks import ExactExpert, ExactRouter, finite_set
from finite_set import FiniteSetOracle
from saved_ensembles import ABOUT

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.ensemble.changes import removed, replaced
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble, single, write_ensemble
from ddm_lightning.ensemble.residency import ResidentExperts
from ddm_lightning.ensemble.sampler import sample
from ddm_lightning.ensemble.velocity import Ensemble, Work
from ddm_lightning.flow.condition import Condition

EDGES = {"expert-0": (0.0, 0.7), "expert-1": (0.7, 1.0), "expert-2": (0.0, 0.3), "expert-3": (0.3, 1.0)}
CLUSTERS = [0, 0, 1, 1]


class Within(ExactExpert):
    """Exact at the times of its interval, NaN elsewhere."""

    def __init__(self, oracle, k, low, high):
        super().__init__(oracle, k)
        self.low = low
        self.high = high

    def forward(self, x_t, t, condition):
        held = (t >= self.low) & ((t < self.high) | (t == 1)) & ((t < 1) | (self.high == 1))
        return super().forward(x_t, t, condition).where(held.reshape(-1, *(1 for _ in x_t.shape[1:])), torch.nan)


@pytest.fixture
def oracle():
    return FiniteSetOracle(*finite_set([30, 10], 3, seed=0), 2)


def by_noise(oracle):
    experts = [Within(oracle, k, *edges) for k, edges in zip(CLUSTERS, EDGES.values(), strict=True)]
    return Ensemble(
        experts, ExactRouter(oracle), [0.75, 0.25], expert_clusters=CLUSTERS, intervals=list(EDGES.values())
    )


def test_exact_experts_of_intervals_are_the_exact_mixture_at_every_t(oracle):
    t = torch.cat([torch.linspace(0.05, 1, 39, dtype=torch.float64), torch.tensor([0.3, 0.7]).double()])
    x_t = torch.randn(len(t), 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ensemble = by_noise(oracle)
    torch.testing.assert_close(ensemble.velocity(x_t, t), oracle.velocity(x_t, t), rtol=0, atol=1e-10)
    ensemble.work = Work([0] * 4)
    found = ensemble.expert_velocities(x_t, t, None, torch.ones(len(t), 2, dtype=torch.bool))
    assert ensemble.work.active == 2 * len(t) and ensemble.num_clusters == 2
    inside = [int(((t >= low) & ((t < high) | (high == 1))).sum()) for low, high in EDGES.values()]
    assert ensemble.work.expert_rows == inside
    # Times as float32, as samplers have them: 0.7 is rounded down there.
    assert ensemble.velocity(x_t.float(), t.float()).isfinite().all()
    for k in range(2):
        torch.testing.assert_close(found[:, k], oracle.velocity(x_t, t, k))


OWN_SOLVERS = {"bayes": "ancestral", "sample-each-step": "euler"}


@pytest.mark.parametrize("strategy", ["full", "top-1", "top-p", "sample-1", "sample-each-step", "oracle", "bayes"])
def test_every_strategy_makes_the_images_of_experts_for_all_noise_levels(oracle, strategy):
    plain = Ensemble([ExactExpert(oracle, k) for k in range(2)], ExactRouter(oracle), [0.75, 0.25])
    condition = Condition.of(torch.zeros(6, 1))
    for guidance in ("expert", "mixture"):
        given = {"strategy": strategy, "guidance": guidance, "guidance_scale": 2.0, "num_steps": 12}
        given |= {"solver": OWN_SOLVERS[strategy]} if strategy in OWN_SOLVERS else {}
        images = [
            sample(one, condition, 6, (1, 1, 3), SampleConfig(**given), shift=2.0, seed=0, batch_size=4)
            for one in (plain, by_noise(oracle))
        ]
        torch.testing.assert_close(*images, rtol=1e-5, atol=1e-5)


@pytest.fixture
def run_dir(tmp_path):
    """A run of two clusters with two experts each, and a router."""
    for number, (name, edges) in enumerate(EDGES.items()):
        put(tmp_path / name, name, cluster=CLUSTERS[number], interval=list(edges))

    put(tmp_path / "router", "router")
    write_ensemble(tmp_path, [tmp_path / name for name in [*EDGES, "router"]], [0.25, 0.75], expert_clusters=CLUSTERS)
    return tmp_path


def test_a_run_round_trips_and_experts_take_turns(run_dir):
    manifest = read_ensemble(run_dir / "ensemble.json")
    assert manifest.experts == [*EDGES] and [*manifest.places.values()] == [0, 0, 1, 1] and manifest.logits == [0, 1]
    assert manifest.shares == {"expert-0": 0.25, "expert-1": 0.25, "expert-2": 0.75, "expert-3": 0.75}
    all_at_once = load_ensemble(manifest)
    in_turns = load_ensemble(manifest, resident_experts=2)
    assert isinstance(in_turns.experts, ResidentExperts) and all_at_once.intervals == [*EDGES.values()]
    assert all_at_once.cluster_names == ["expert-0 + expert-1", "expert-2 + expert-3"]
    settings = SampleConfig(strategy="full", num_steps=6)
    images = [sample(one, None, 3, SHAPE, settings, shift=1.5, seed=0, batch_size=3) for one in (all_at_once, in_turns)]
    assert torch.equal(*images)
    # Of the 6 times from 1 down, shifted by 1.5, those below 0.3 and 0.7.
    assert all_at_once.work.expert_rows == [3 * n for n in (3, 3, 1, 5)]
    refused(
        lambda: single(run_dir / "expert-1"), run_dir / "expert-1" / "member.json", "sample from the whole ensemble"
    )


def test_a_cluster_leaves_with_any_of_its_experts(run_dir):
    (run_dir / "expert-1" / "member.json").unlink()
    refused(lambda: read_ensemble(run_dir / "ensemble.json"), "expert-1", "is missing")
    rest = read_ensemble(run_dir / "ensemble.json", partial=True)
    assert rest.experts == ["expert-2", "expert-3"] and rest.priors == (1.0,) and rest.lost == ("expert-1",)
    loaded = load_ensemble(rest)
    assert loaded.clusters == [1] and loaded.expert_clusters == [0, 0]
    (run_dir / "expert-0" / "member.json").unlink()
    both = read_ensemble(run_dir / "ensemble.json", partial=True)
    assert both.priors == (1.0,) and both.lost == ("expert-0", "expert-1") and both.share == 0.75


def test_an_expert_is_removed_with_all_others_of_its_cluster(run_dir):
    manifest = replace(read_ensemble(run_dir / "ensemble.json"), about=replace(ABOUT, num_images=400))
    changed = removed(manifest, "expert-1")
    assert changed.shares == {"expert-2": 1.0, "expert-3": 1.0} and changed.description.num_images == 300
    uneven = replace(manifest, priors=(0.71, 0.29), about=replace(ABOUT, num_images=100))
    assert removed(uneven, "expert-1").description.num_images == 29  # 0.29 · 100 is a little less


def test_a_new_number_of_images_counts_for_all_experts_of_the_cluster(run_dir):
    manifest = replace(read_ensemble(run_dir / "ensemble.json"), about=replace(ABOUT, num_images=400))
    changed = replaced(manifest, "expert-0", run_dir / "expert-0", 300)
    assert changed.shares == dict.fromkeys(EDGES, 0.5)


def test_experts_of_one_cluster_are_not_replaced_by_those_of_another(run_dir):
    manifest = replace(read_ensemble(run_dir / "ensemble.json"), about=ABOUT)
    edit(run_dir / "expert-3" / "member.json", interval=[0.7, 1.0])
    stranger = run_dir / "expert-3"
    refused(
        lambda: replaced(manifest, "expert-1", stranger), "expert-0, expert-1", "several clusters", "of their cluster"
    )


def test_intervals_of_strangers_that_do_not_cover_all_noise_levels_are_refused(run_dir):
    folders = [run_dir / name for name in [*EDGES, "router"]]

    def written():
        return write_ensemble(run_dir, folders, [0.25, 0.75], expert_clusters=CLUSTERS)

    edit(run_dir / "expert-1" / "member.json", interval=[0.6, 1.0])
    refused(written, run_dir / "ensemble.json", "expert-0, expert-1", "two experts for t from 0.6 to 0.7")
    edit(run_dir / "expert-1" / "member.json", interval=[0.8, 1.0])
    refused(written, run_dir / "ensemble.json", "expert-0, expert-1", "no expert for t from 0.7 to 0.8")
    edit(run_dir / "expert-1" / "member.json", interval=[0.7, 1.0], cluster=1)
    refused(written, run_dir / "expert-1" / "member.json", "is not the expert-1")
    edit(run_dir / "expert-1" / "member.json", interval=[0.7, 2.0])
    refused(written, run_dir / "expert-1" / "member.json", "key 'interval'", "two times, 0 <= low < high <= 1")
