import numpy as np
import pytest
import torch
from tiny_runs import TINY
from torch import nn
from training.members import batch, figures, losses_of, router

from ddm_lightning.config.load import load_experiment
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.member import Member
from ddm_lightning.shards.manifest import Manifest

NUM_TIMES = 8
NUM_CLUSTERS = 3


class LinearRouter(nn.Module):
    """Logits by a fixed linear map of the pixels, shifted when a condition is seen."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(0.3 * torch.randn(48, NUM_CLUSTERS, generator=generator))
        self.calls = []

    def forward(self, x_t, t, condition):
        self.calls.append((x_t, t, condition))
        logits = x_t.flatten(1) @ self.weight
        return logits if condition is None else logits + condition.values[:, :NUM_CLUSTERS] * condition.keep[:, None]


def log_softmax(logits):
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def expected_logits(network, x_t, part, is_conditional):
    logits = x_t.double().flatten(1).numpy() @ network.weight.detach().double().numpy()
    return logits + part["text"].double().numpy()[:, :NUM_CLUSTERS] if is_conditional else logits


def test_the_router_drops_conditions_as_often_as_its_own_section_says(tiny_prepared):
    experiment = load_experiment(TINY, ["condition.dropout=0.25", "router.condition_dropout=0.5"])
    manifest = Manifest.read(tiny_prepared.parent)
    dropouts = {
        name: Member.resolve(name, experiment, manifest).condition_dropout
        for name in ("router", "expert-1", "monolith")
    }

    assert dropouts == {"router": 0.5, "expert-1": 0.25, "monolith": 0.25}


def test_the_loss_is_the_cross_entropy_of_the_cluster():
    network = LinearRouter()
    part = batch(16)
    losses, loss = losses_of(router(network, condition_dropout=0.0), part)
    ((x_t, _, _),) = network.calls
    logits = expected_logits(network, x_t, part, is_conditional=True)
    rows = np.arange(16), part["cluster"].numpy()

    assert loss.item() == pytest.approx(-log_softmax(logits)[rows].mean(), rel=1e-4)

    accuracy = (logits.argmax(1) == rows[1]).mean()
    assert losses.keys() == {"loss", "accuracy"}
    assert losses["accuracy"].mean().item() == pytest.approx(accuracy)


def test_logits_that_are_not_finite_give_no_figures():
    network = LinearRouter()
    network.weight.data[0] = torch.nan
    found = figures(router(network), batch(10))

    assert all(np.isfinite(value) for value in found.values())


@pytest.mark.parametrize("kind", ["text", "none"])
def test_held_out_figures_and_confusion_against_numpy(kind):
    network = LinearRouter()
    objective = router(network, condition=ConditionSpec(kind, 6 if kind == "text" else 0))
    batches = [batch(10, seed=1), batch(3, seed=2)]
    found = figures(objective, *batches)
    branches = [""] if kind == "none" else ["", "_conditional"]
    nll = {(suffix, time): [] for suffix in branches for time in range(NUM_TIMES)}
    hits = {key: [] for key in nll}
    confusion = np.zeros((NUM_TIMES, NUM_CLUSTERS, NUM_CLUSTERS))
    calls = iter(network.calls)
    for part in batches:
        true = part["cluster"].numpy()
        for time in range(NUM_TIMES):
            for suffix in branches:
                x_t, t, condition = next(calls)
                assert (condition is None) == (suffix == "")
                np.testing.assert_allclose(t.numpy(), (time + 0.5) / NUM_TIMES)
                logits = expected_logits(network, x_t, part, suffix != "")
                nll[suffix, time] += (-log_softmax(logits)[np.arange(len(true)), true]).tolist()
                hits[suffix, time] += (logits.argmax(1) == true).tolist()
                if not suffix:
                    np.add.at(confusion[time], true, np.exp(log_softmax(logits)))

    for suffix, time in nll:
        at = f"{suffix}_t{(time + 0.5) / NUM_TIMES:.3f}"
        assert found[f"held_out/cross_entropy{at}"] == pytest.approx(np.mean(nll[suffix, time]), rel=1e-4)
        assert found[f"held_out/accuracy{at}"] == pytest.approx(np.mean(hits[suffix, time]))

    for suffix in branches:
        everything = [nll[suffix, time] for time in range(NUM_TIMES)]
        assert found[f"held_out/cross_entropy{suffix}"] == pytest.approx(np.mean(everything), rel=1e-4)

    calibration = {name for name in found if "temperature" in name or "calibration" in name}

    assert len(calibration) == len(branches) * 3 * NUM_TIMES  # temperature, and the error before and after
    assert len(found) - len(calibration) == len(branches) * 2 * (1 + NUM_TIMES)

    np.testing.assert_allclose(objective.confusion.numpy(), confusion, rtol=1e-4, atol=1e-5)
    # Rows are true clusters: each holds as many samples as there are of it.
    counts = np.bincount(torch.cat([part["cluster"] for part in batches]).numpy(), minlength=NUM_CLUSTERS)
    np.testing.assert_allclose(objective.confusion.sum(2).numpy(), np.tile(counts, (NUM_TIMES, 1)), rtol=1e-4)
