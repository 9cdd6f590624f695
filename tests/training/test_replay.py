"""A step that was left out, taken once more: with which weights, and what is said of each sample."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from shards.mds import WARNINGS
from tiny_runs import TINY, bucket_settings, copy_run
from torch.nn import functional
from training.short_fits import SHORT, member

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.evaluation.replay import replay_step
from ddm_lightning.members.load import load_network
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import lock_member
from ddm_lightning.members.skipped import SkippedStep
from ddm_lightning.training.checkpoint import load_tensors
from ddm_lightning.training.fit import build_data
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.objective import Position, build_objective

pytestmark = WARNINGS


def batch_of(data, step):
    """The samples of a step, by training up to it."""
    data.prepare_data()
    loader = data.train_dataloader()
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch by epoch
    batch = next(itertools.islice(batches, step, None))
    data.close()
    return batch


def left_out(run, step, name="expert-0", *more):
    """As if ``step`` had been left out, and as if step 5 before it, and step 19 by another rank, had been."""
    opened = Run(load_experiment(TINY, [f"run_dir={run}", *SHORT, *more]))
    batch = batch_of(build_data(opened.member(name), opened), step)
    ids = batch["sample_id"].tolist()
    folder = opened.folder.member(name)
    folder.mkdir(parents=True, exist_ok=True)
    records = [SkippedStep(at, rank, ids, [0.5] * 8, [1.0] * 8) for at, rank in ((step, 0), (5, 0), (19, 1))]
    (folder / "skipped_steps.jsonl").write_text("".join(record.line() + "\n" for record in records))
    return opened, batch


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_each_sample_has_its_own_loss_and_gradient_at_the_nearest_weights(finished, tmp_path, capsys, precision):
    run = copy_run(finished, tmp_path / "run", "expert-0")
    opened, batch = left_out(run, 17)
    opened.experiment.islands = {"expert-0": {"precision": precision}}

    assert main(["replay", "-c", str(TINY), f"run_dir={run}", "member=expert-0", *SHORT]) == 0
    assert "every gradient is finite here: the cause is that step's weights" in capsys.readouterr().out

    skipped, loaded, samples = replay_step("expert-0", opened, None, 0)
    nearest = member(run, "checkpoints", "step-00000018.ckpt")

    assert (
        skipped.step == 17
        and loaded == str(nearest)
        and [sample.sample_id for sample in samples] == batch["sample_id"].tolist()
    )

    objective = build_objective(opened.member("expert-0"), opened)
    module = MemberModule(objective)
    load_tensors(nearest, module)
    noised = objective.noisy_batch(batch, Position(17))
    for row, sample in enumerate(samples):
        one = noised.rows(slice(row, row + 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
            predicted = module.network(one.x_t, one.t, one.condition)
        loss = functional.mse_loss(predicted.float(), one.noise - one.x_0)
        gradients = torch.autograd.grad(loss, list(module.network.parameters()), allow_unused=True)
        norm = torch.cat([part.flatten() for part in gradients if part is not None]).norm()
        assert sample.t == float(one.t) and not sample.not_finite
        assert sample.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert sample.gradient_norm == pytest.approx(float(norm), rel=1e-4)


def test_steps_of_each_shape_are_replayed(bucket_run):
    """With 40 to 50 samples in three shapes, these four steps are in the fourth and fifth epoch."""
    shapes = set()
    for step in range(18, 22):
        opened, batch = left_out(bucket_run, step, "expert-0", *bucket_settings(bucket_run / "images"))
        _, _, samples = replay_step("expert-0", opened, step, 0)

        assert [sample.sample_id for sample in samples] == batch["sample_id"].tolist()

        shapes.add(batch["x_0"].shape[2:])

    assert len(shapes) > 1


def test_a_member_in_training_is_left_alone(finished, tiny_run):
    """Both would tidy the same cache."""
    left_out(tiny_run, 3)
    opened = Run(load_experiment(TINY, [f"run_dir={tiny_run}", *SHORT]))
    with lock_member(opened.folder.member("expert-0")), pytest.raises(UserError, match="expert-0 is in use"):
        replay_step("expert-0", opened, 3, 0)


def test_before_the_first_checkpoint_it_takes_the_weights_that_the_member_started_from(finished, tiny_run):
    start = f"expert.init_from={member(finished, 'artifact')}"
    opened, batch = left_out(tiny_run, 3, "expert-0", start)
    _, loaded, samples = replay_step("expert-0", opened, 3, 0)

    assert loaded == "the initial weights"

    objective = build_objective(opened.member("expert-0"), opened)
    _, network = load_network(member(finished, "artifact"))
    one = objective.noisy_batch(batch, Position(3)).rows(slice(0, 1))
    loss = functional.mse_loss(network(one.x_t, one.t, one.condition), one.noise - one.x_0)

    assert samples[0].loss == pytest.approx(float(loss.detach()), rel=1e-5)


def test_a_rank_of_a_student_replays_its_rows_alone(finished_run, tmp_path):
    opened, batch = left_out(copy_run(finished_run, tmp_path / "run"), 9, "student", "distill.global_batch_size=16")
    path = opened.folder.member("student") / "skipped_steps.jsonl"
    record = SkippedStep(9, 1, batch["sample_id"][1::2].tolist(), [0.5] * 8, [1.0] * 8)
    path.write_text(record.line() + "\n")
    _, _, samples = replay_step("student", opened, 9, 1)

    assert [sample.sample_id for sample in samples] == record.sample_ids
    assert all(math.isfinite(sample.gradient_norm) and sample.loss > 0 for sample in samples)

    path.write_text(replace(record, step=8).line() + "\n")
    with pytest.raises(UserError, match=r"step 8 has other samples here; replay where the member was trained"):
        replay_step("student", opened, 8, 1)
