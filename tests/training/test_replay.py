"""A step that was left out, taken once more: with which weights, and what is said of each sample."""

import pytest
import torch
from shards.mds import WARNINGS
from tiny_runs import TINY, copy_run
from torch.nn import functional
from training.short_fits import SHORT, member

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.load import load_network
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import lock_member
from ddm_lightning.training.checkpoint import load_tensors
from ddm_lightning.training.fit import build_data
from ddm_lightning.training.guard import SkippedStep
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.objective import Position, build_objective
from ddm_lightning.training.replay import replay_step

pytestmark = WARNINGS


def first_samples(data):
    data.prepare_data()
    batch = next(iter(data.training_in_order()))
    data.close()
    return {name: values[:3] for name, values in batch.items()}


def left_out(run, step, name="expert-0"):
    """As if three samples of ``step`` had been left out, step 5 before it, and step 19 by another rank."""
    experiment = load_experiment(TINY, [f"run_dir={run}", *SHORT])
    opened = Run(experiment)
    folder = opened.folder
    data = build_data(opened.member(name), opened)
    ids = first_samples(data)["sample_id"].tolist()
    folder.member(name).mkdir(parents=True, exist_ok=True)
    records = [SkippedStep(at, rank, ids, [0.5] * 3, [1.0] * 3) for at, rank in ((step, 0), (5, 0), (19, 1))]
    lines = "".join(record.line() + "\n" for record in records)
    (folder.member(name) / "skipped_steps.jsonl").write_text(lines)
    return opened, data, ids


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_each_sample_has_its_own_loss_and_gradient_at_the_nearest_weights(finished, tmp_path, capsys, precision):
    run = copy_run(finished, tmp_path / "run", "expert-0")
    opened, data, ids = left_out(run, 17)
    opened.experiment.island.precision = precision
    assert main(["replay", "-c", str(TINY), f"run_dir={run}", "member=expert-0", *SHORT]) == 0
    assert "every gradient is finite here: the cause is that step's weights" in capsys.readouterr().out
    skipped, loaded, samples = replay_step("expert-0", opened, None, 0)
    nearest = member(run, "checkpoints", "step-00000018.ckpt")
    assert skipped.step == 17 and loaded == str(nearest) and [sample.sample_id for sample in samples] == ids

    objective = build_objective(opened.member("expert-0"), opened)
    module = MemberModule(objective)
    load_tensors(nearest, module)
    batch = first_samples(data)
    noised = objective.noisy_batch(batch, Position(17))
    for row, sample in enumerate(samples):
        one = noised.rows(slice(row, row + 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            predicted = module.network(one.x_t, one.t, one.condition)
        loss = functional.mse_loss(predicted.float(), one.noise - one.x_0)
        gradients = torch.autograd.grad(loss, list(module.network.parameters()), allow_unused=True)
        norm = torch.cat([part.flatten() for part in gradients if part is not None]).norm()
        assert sample.t == float(one.t) and sample.not_finite == ()
        assert sample.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert sample.gradient_norm == pytest.approx(float(norm), rel=1e-4)


def test_a_member_in_training_is_left_alone(finished, tiny_run):
    """Both would tidy the same cache."""
    left_out(tiny_run, 3)
    opened = Run(load_experiment(TINY, [f"run_dir={tiny_run}", *SHORT]))
    with lock_member(opened.folder.member("expert-0")), pytest.raises(UserError, match="expert-0 is in use"):
        replay_step("expert-0", opened, 3, 0)


def test_before_the_first_checkpoint_it_takes_the_weights_that_the_member_started_from(finished, tiny_run):
    _, data, _ = left_out(tiny_run, 3)
    start = f"expert.init_from={member(finished, 'artifact')}"
    opened = Run(load_experiment(TINY, [f"run_dir={tiny_run}", *SHORT, start]))
    _, loaded, samples = replay_step("expert-0", opened, 3, 0)
    assert loaded == "the initial weights"
    objective = build_objective(opened.member("expert-0"), opened)
    _, network = load_network(member(finished, "artifact"))
    one = objective.noisy_batch(first_samples(data), Position(3)).rows(slice(0, 1))
    loss = functional.mse_loss(network(one.x_t, one.t, one.condition), one.noise - one.x_0)
    assert samples[0].loss == pytest.approx(float(loss.detach()), rel=1e-5)
