"""Two real ranks that cannot share the held-out samples equally: each sample counts once, as on one rank."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from tiny_runs import TINY, settings
from torch import nn
from torch.utils.data import DataLoader
from training.members import SCALE, SHIFT, batch, build
from training.two_processes import WORLD, in_two_processes, trainer_of

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.run import Run
from ddm_lightning.shards.datamodule import steps
from ddm_lightning.training.fit import build_data
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.objective import Classification, Regression, build_objective

NUM_HELD_OUT = 17
BATCH_SIZE = 8
NUM_CLUSTERS = 3
NUM_TIMES = 8  # a last step in which one rank has only a sample again

pytestmark = [pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")]


class Half(nn.Module):
    """An expert's velocity of half of x_t."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x_t, t, condition):
        return self.gain * x_t


class FirstPixels(Half):
    """A router's logits of a cluster each."""

    def forward(self, x_t, t, condition):
        return self.gain * x_t.flatten(1)[:, :NUM_CLUSTERS]


def validated(kind, network, num_ranks, strategy):
    """What a rank logs of one validation, and what it saw: step, time, x_t and id of each row, and its confusion."""

    def task(rank):
        seen = []

        class Seeing(kind):
            def noisy_validation_batch(self, given, batch_idx, index, at):
                noised = super().noisy_validation_batch(given, batch_idx, index, at)
                seen.append((given["sample_id"].tolist(), noised.t[0].item(), noised.noise.tolist()))
                return noised

        whole = batch(NUM_HELD_OUT)
        order = steps(np.arange(NUM_HELD_OUT), rank, num_ranks, BATCH_SIZE // num_ranks, full=False)
        dealt = [{name: column[rows] for name, column in whole.items()} for rows in order]
        trainer = trainer_of(rank, strategy, num_ranks, max_steps=1)
        objective = build(
            Seeing,
            network(),
            batch_size=BATCH_SIZE,
            num_held_out=NUM_HELD_OUT,
            condition=ConditionSpec("none", 0),
            train=TrainConfig(1, BATCH_SIZE, learning_rate=0.0),
        )
        trainer.fit(MemberModule(objective), *(DataLoader(batches, batch_size=None) for batches in (dealt[:1], dealt)))
        figures = {name: float(value) for name, value in trainer.callback_metrics.items() if "held_out" in name}
        confusion = objective.sum_confusion(num_ranks) if kind is Classification else None
        return figures, seen, None if confusion is None else confusion.tolist()

    return task


def expected(kind, answers):
    """Means over samples and confusion, in float64, of the noise that was seen; and how often each id was seen."""
    whole = batch(NUM_HELD_OUT)
    seen = defaultdict(int)
    found = defaultdict(dict)
    confusion = np.zeros((NUM_TIMES, NUM_CLUSTERS, NUM_CLUSTERS))
    for _, calls, _ in answers:
        for ids, t, noises in calls:
            for one, noise in zip(ids, np.asarray(noises), strict=True):
                seen[one] += 1
                if one in found[t] and seen[one] > NUM_TIMES:
                    continue  # once more, behind its first time
                x_0 = (whole["x_0"][one].double().numpy() - SHIFT) * SCALE
                x_t = (1 - t) * x_0 + t * noise
                if kind is Regression:
                    found[t][one] = np.square(0.5 * x_t - (noise - x_0)).mean()
                    continue
                chances = np.exp(0.5 * x_t.reshape(-1)[:NUM_CLUSTERS])
                chances /= chances.sum()
                true = int(whole["cluster"][one])
                found[t][one] = -np.log(chances[true])
                confusion[int(t * NUM_TIMES), true] += chances

    return {t: np.mean([of[one] for one in range(NUM_HELD_OUT)]) for t, of in found.items()}, seen, confusion


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("kind", "network"), [(Regression, Half), (Classification, FirstPixels)])
def test_what_ranks_see_once_more_does_not_count_once_more(kind, network, strategy):
    answers = in_two_processes(validated(kind, network, WORLD, strategy))
    losses, seen, confusion = expected(kind, [answers[0], answers[1]])

    assert seen == {one: NUM_TIMES * (2 if one == 0 else 1) for one in range(NUM_HELD_OUT)}

    name = f"held_out/{kind.loss_name}"
    for figures, _, _ in answers.values():
        assert figures[name] == pytest.approx(np.mean(list(losses.values())), rel=1e-5)
        for t, loss in losses.items():
            assert figures[f"{name}_t{t:.3f}"] == pytest.approx(loss, rel=1e-5)

    if kind is Classification:
        for _, _, found in answers.values():
            np.testing.assert_allclose(found, confusion, rtol=1e-4)


@pytest.mark.parametrize("member", ["expert-1", "router", "monolith"])
def test_a_member_counts_as_many_as_its_shards_hold_out(member, tiny_run):
    run = Run(load_experiment(TINY, settings(tiny_run)[2:]))
    resolved = run.member(member)
    data = build_data(resolved, run)
    data.prepare_data()
    held_out = [one for part in data.val_dataloader() for one in part["sample_id"].tolist()]

    assert build_objective(resolved, run).num_held_out == len(set(held_out)) == len(held_out) > 0
