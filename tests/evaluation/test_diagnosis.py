"""Diagnosis of exact experts and routers of a finite set, and of a finished tiny run."""

import json
import re

import numpy as np
import pytest
import torch
from ensemble_networks import ExactExpert, ExactRouter, finite_set
from finite_set import FiniteSetOracle
from PIL import Image
from tiny_runs import copy_run, settings
from torch import nn

from ddm_lightning.cli.parser import main
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.evaluation import diagnosis
from ddm_lightning.evaluation.diagnosis import Samples, expert_figures, router_figures
from ddm_lightning.evaluation.diagnosis_report import diagnosis_lines
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.member import Member
from ddm_lightning.shards.manifest import HELD_OUT, shard_name
from ddm_lightning.shards.mds import open_shards
from ddm_lightning.training.objective import Objective
from ddm_lightning.use import loaded as sampling

SIZES = [30, 60, 90]
PRIORS = [size / 180 for size in SIZES]


def samples(seed=0):
    points, labels = finite_set(SIZES, 4, seed)
    return Samples(points.float().reshape(-1, 1, 2, 2), labels, torch.arange(180), None)


class Sharpened(nn.Module):
    """An exact router that is twice as sure as it may be."""

    def __init__(self, oracle):
        super().__init__()
        self.exact = ExactRouter(oracle)

    def forward(self, x_t, t, condition):
        return 2 * self.exact(x_t, t, condition).clamp_min(-80)


class Blind(nn.Module):
    """An exact router up to t = ``above``, which answers the priors beyond."""

    def __init__(self, oracle, above):
        super().__init__()
        self.exact = ExactRouter(oracle)
        self.above = above

    def forward(self, x_t, t, condition):
        priors = torch.tensor(PRIORS).log().expand(len(x_t), -1)
        return torch.where((t > self.above)[:, None], priors, self.exact(x_t, t, condition))


def ensemble(points, *, sharpened=False, blind_above=1.0):
    oracle = FiniteSetOracle(points.x_0, points.clusters, 3)
    router = Sharpened(oracle) if sharpened else Blind(oracle, blind_above)
    temperatures = ([2.0], [2.0]) if sharpened else ((), ())
    return Ensemble([ExactExpert(oracle, k) for k in range(3)], router, PRIORS, temperatures=temperatures)


def repeated(points):
    """With noise enough for smooth figures."""
    return points.rows(torch.arange(len(points.x_0)).repeat(2))


def test_exact_experts_are_best_on_their_own_clusters():
    points = samples()
    found = expert_figures(ensemble(points), [repeated(points)], seed=0)
    loss = torch.tensor(found["loss"])
    assert loss.argmin(0).tolist() == [0, 1, 2]
    assert found["in_cluster"] == loss.diagonal().tolist()
    # The mean over the samples of other clusters, by hand for the first expert.
    assert found["out_of_cluster"][0] == pytest.approx(float((60 * loss[0, 1] + 90 * loss[0, 2]) / 150), rel=1e-5)
    assert all(inside < outside for inside, outside in zip(found["in_cluster"], found["out_of_cluster"], strict=True))
    assert torch.tensor(found["loss_by_time"]).mean(0).allclose(loss)
    # At low noise the router knows the cluster, so the routed experts agree.
    assert found["disagreement"][0] < 1e-3 < found["disagreement"][-1]


def test_disagreement_is_that_of_experts_weighted_under_the_condition():
    """Constant velocities 1 and 3 under shares of 1/4 and 3/4: a variance of 0.75 about a mean of 2.5."""
    points = samples().rows(torch.arange(90))
    given = Samples(points.x_0, points.clusters, points.sample_ids, Condition.of(torch.zeros(90, dtype=torch.int64)))
    made = Ensemble([Constant(1.0), Constant(3.0)], Sure(), [1 / 3, 2 / 3])
    assert expert_figures(made, [given], seed=0)["disagreement"] == pytest.approx([0.75 / 2.5**2] * 8)


class Constant(nn.Module):
    prediction = "velocity"

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x_t, t, condition):
        return torch.full_like(x_t, self.value)


class Sure(nn.Module):
    """Takes both clusters for as likely unless it is given a condition."""

    def forward(self, x_t, t, condition):
        return torch.tensor([0.5, 0.5] if condition is None else [0.25, 0.75]).log().expand(len(x_t), -1)


def test_draws_of_one_sample_share_the_number_that_judges_chance(monkeypatch):
    """Eight draws of each sample are not eight samples, whose calibration error by chance would be smaller."""
    seen = []
    choose = diagnosis.choose
    monkeypatch.setattr(diagnosis, "choose", lambda weights, uniform: seen.append(uniform) or choose(weights, uniform))
    points = samples()
    router_figures(ensemble(points), [points.rows(torch.arange(180).repeat(8))], seed=0)
    for uniform in seen:
        assert torch.equal(uniform, uniform.reshape(8, -1)[0].repeat(8)) and len(uniform.unique()) > 60

    assert not torch.equal(seen[0], seen[1])


def is_judged(sample_ids):
    """The half of the samples that did not fit the router's temperatures."""
    return (sample_ids * 2654435761 >> 16) % 2 == 1


def at_time(points, index):
    """Noisy samples at one of the eight times, as the diagnosis makes them."""
    noise = torch.randn(points.x_0.shape, generator=keyed_generator(0, "diagnosis", index))
    t = (index + 0.5) / 8
    return (1 - t) * points.x_0 + t * noise, torch.full((len(noise),), t), noise - points.x_0


def test_losses_and_likelihoods_are_those_by_hand():
    points = samples()
    x_t, t, target = at_time(points, 3)
    oracle = FiniteSetOracle(points.x_0, points.clusters, 3)
    squares = [(oracle.velocity(x_t, t, k) - target).square().flatten(1).mean(1) for k in range(3)]
    expected = [[float(loss[points.clusters == cluster].mean()) for cluster in range(3)] for loss in squares]
    found = expert_figures(ensemble(points), [points], seed=0)["loss_by_time"][3]
    assert [row == pytest.approx(other, rel=1e-4) for row, other in zip(found, expected, strict=True)] == [True] * 3
    judged = is_judged(points.sample_ids)
    own = oracle.cluster_posterior(x_t, t)[torch.arange(180), points.clusters]
    found = router_figures(ensemble(points), [points], seed=0)["unconditional"]["nll"][3]
    assert found == pytest.approx(-float(own[judged].log().mean()), rel=1e-4)


def test_calibration_is_judged_before_and_after():
    points = samples()
    exact = router_figures(ensemble(points), [repeated(points)], seed=0)["unconditional"]
    sharp = router_figures(ensemble(points, sharpened=True), [repeated(points)], seed=0)["unconditional"]
    assert exact["accuracy"] == sharp["accuracy"] and len(exact["accuracy"]) == 8
    assert exact["nll"] == exact["nll_calibrated"] == pytest.approx(sharp["nll_calibrated"], abs=2e-3)
    assert sum(sharp["nll"]) > sum(sharp["nll_calibrated"])
    assert max(exact["calibration_error"]) < 0.08
    assert 0 < max(exact["calibration_error_by_chance"]) < 0.12
    worst = max(sharp["calibration_error"])
    assert worst > 0.1 > max(sharp["calibration_error_calibrated"])


@pytest.mark.parametrize(("above", "times"), [(0.5, "0.56, 0.69, 0.81, 0.94"), (0.8, "0.81, 0.94"), (0.9, ""), (1, "")])
def test_a_router_that_answers_the_priors_at_high_noise_is_named(above, times):
    points = samples()
    scores = router_figures(ensemble(points, blind_above=above), [repeated(points)], seed=0)
    judged = points.clusters[is_judged(points.sample_ids)]
    expected = -np.log(np.array(PRIORS)[judged]).mean()
    assert scores["unconditional"]["nll_of_priors"] == pytest.approx([expected] * 8)
    shares = {"expected": [], "by_chance": 0.1, "by_chance_95": 0.2, "classifier_accuracy": 1.0, "strategies": {}}
    figures = {"router": scores, "times": [(i + 0.5) / 8 for i in range(8)], "num_judged": 90, "shares": shares}
    found = [line for line in diagnosis_lines({**figures, "num_images": 64}) if "warning" in line]
    assert [line.split("t = ")[1].split(" this router tells no more")[0] for line in found] == [times] * bool(times)


def test_a_distance_is_within_chance_up_to_the_limit_of_19_in_20():
    strategies = {name: {"solver": "heun", "shares": [1.0], "total_variation": distance}
                  for name, distance in (("a", 0.15), ("b", 0.2), ("c", 0.21))}  # fmt: skip
    shares = {"expected": [1.0], "by_chance": 0.1, "by_chance_95": 0.2, "classifier_accuracy": 1.0}
    lines = diagnosis_lines({"router": {}, "shares": {**shares, "strategies": strategies}, "num_images": 64})
    assert [line.rpartition(", ")[2] for line in lines[1:4]] == ["within chance", "within chance", "more than chance"]


def test_the_command_writes_figures_and_charts(capsys, finished_run, tmp_path, monkeypatch):
    sizes = []
    condition = Objective.condition
    clusters = []
    sample = sampling.sample

    def counted(self, batch):
        sizes.append(len(batch["sample_id"]))
        return condition(self, batch)

    def sampled(*arguments, **named):
        clusters.append(named["clusters"].tolist())
        return sample(*arguments, **named)

    monkeypatch.setattr(Objective, "condition", counted)
    monkeypatch.setattr(sampling, "sample", sampled)
    monkeypatch.setattr(Member, "build_network", lambda _: pytest.fail("needs no random network"))
    run = copy_run(finished_run, tmp_path / "run")

    assert main(["diagnose", *settings(run), "--num", "12", "sample.num_steps=2"]) == 0

    out = capsys.readouterr().out
    figures = json.loads((run / "diagnosis" / "diagnosis.json").read_text())
    num = figures["num_held_out"]
    assert max(sizes) <= 64 and sum(sizes) == num, "captions of training images are not encoded"

    shards = open_shards([run / "prepared" / "shards" / shard_name(k, HELD_OUT) for k in range(2)])
    held_out = shards.take(np.arange(len(shards)), ("cluster", "sample_id"))
    given = held_out["cluster"][np.arange(12) * num // 12].tolist()  # evenly spaced, so of all clusters
    assert figures["shares"]["expected"] == pytest.approx(np.bincount(given) / 12)
    assert clusters == [given] * 4  # which the strategy oracle follows
    assert figures["num_judged"] == is_judged(held_out["sample_id"]).sum()
    assert figures["router"] and len(figures["experts"]["loss"]) == 2

    strategies = figures["shares"]["strategies"]
    assert set(strategies) == {"full", "top-1", "sample-1", "bayes"}
    for name, found in strategies.items():
        assert sum(found["shares"]) == pytest.approx(1, abs=1e-5)
        assert re.search(rf"^{name} \(.*; total variation .* chance$", out, re.MULTILINE)

    for name in ("experts", "router", "shares"):
        with Image.open(run / "diagnosis" / f"{name}.png") as chart:
            assert chart.width > 500

    assert main(["diagnose", *settings(run), "--strategy", "top-1", "--num", "2", "sample.precision=bf16-mixed"]) == 0
    half = json.loads((run / "diagnosis" / "diagnosis.json").read_text())
    assert half["shares"]["by_chance"] > 1.5 * figures["shares"]["by_chance"], "of 2 images instead of 12"
    assert half["router"] != figures["router"] and half["experts"] != figures["experts"]  # nearly the same
    assert half["experts"]["in_cluster"] == pytest.approx(figures["experts"]["in_cluster"], rel=0.01)

    assert main(["diagnose", *settings(run), "--strategy", "unheard-of"]) == 2
    assert "unheard-of" in capsys.readouterr().err
    assert main(["diagnose", *settings(run), "--strategy", "top-k", "sample.strategy_params.top_k=0"]) == 2
    assert "top_k = 0" in capsys.readouterr().err
