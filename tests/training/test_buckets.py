"""Members that train on images of several shapes."""

import io
import json
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sample_log import LOGS_SAMPLES
from shards.mds import WARNINGS
from tiny_runs import TINY, bucket_experiment, bucket_settings, copy_run, read_status
from torch.utils.data import DataLoader
from training.members import Recorder, batch, expert, fitted
from training.short_fits import events, fit, groups, member
from training.two_processes import in_two_processes, trainer_of

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.sharded import local
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.run import Run
from ddm_lightning.networks.dit import DiT
from ddm_lightning.training.fit import build_data
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.objective import Position, build_objective
from ddm_lightning.training.optimizer import build_optimizer

pytestmark = WARNINGS
NAMES = ("4x16", "8x8", "16x4")
# The averages of the artifact are then the weights; without clipping and schedule a plain loop is short.
PLAIN = (
    LOGS_SAMPLES,
    "expert.train.ema_decay=0",
    "expert.train.gradient_clip_norm=null",
    "expert.train.warmup_steps=0",
)


def trained(prepared, run, *more):
    """A run in ``run`` whose first expert is finished."""
    copy_run(prepared.parent, run)
    assert fit(run, *bucket_settings(run / "images"), *PLAIN, *more) == 0
    return run


@pytest.fixture(scope="module")
def finished(bucket_prepared, tmp_path_factory):
    return trained(bucket_prepared, tmp_path_factory.mktemp("buckets") / "run")


def opened(run, *more):
    settings = [*bucket_settings(run / "images"), *PLAIN, "expert.train.max_steps=20", *more]
    return Run(load_experiment(TINY, [f"run_dir={run}", *settings]))


def test_it_trains_and_validates_as_a_plain_loop_does(finished):
    run = opened(finished)
    own = run.member("expert-0")
    objective = build_objective(own, run)
    optimizer = build_optimizer(objective.network, own.train)
    data = build_data(own, run)
    data.prepare_data()
    loader = data.train_dataloader()
    batches = chain.from_iterable(iter(loader) for _ in range(20))
    shapes = Counter()
    for step in range(20):
        given = next(batches)
        shapes[tuple(given["x_0"].shape[2:])] += 1
        noisy = objective.noisy_batch(given, Position(step))
        objective.compute_losses(noisy, given)["loss"].mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert len(shapes) == 3
    weights = load_file(member(finished, "artifact", "model.safetensors"))
    for name, parameter in objective.network.named_parameters():
        assert torch.equal(parameter, weights[name]), name

    losses = {name: [] for name in NAMES}
    for index, given in enumerate(data.val_dataloader()):
        for time in range(8):
            noisy = objective.noisy_validation_batch(given, index, time, Position(20))
            with torch.no_grad():
                velocity = objective.network(noisy.x_t, noisy.t, noisy.condition)

            errors = (velocity - (noisy.noise - noisy.x_0)).double().square().mean((1, 2, 3))
            losses["x".join(map(str, given["x_0"].shape[2:]))] += errors.tolist()

    metrics = read_status(finished, "expert-0")["metrics"]
    for name, found in losses.items():
        assert metrics[f"held_out/loss_{name}"] == pytest.approx(np.mean(found), rel=1e-5)

    assert metrics["held_out/loss"] == pytest.approx(np.mean([*chain(*losses.values())]), rel=1e-5)


def test_a_training_that_goes_on_in_mid_epoch_takes_the_same_samples(finished, bucket_prepared, tmp_path):
    run = trained(bucket_prepared, tmp_path / "run", "expert.train.max_steps=7")

    assert fit(run, *bucket_settings(run / "images"), *PLAIN) == 0

    for parts in (("sample_ids.txt",), ("artifact", "model.safetensors")):
        assert member(run, *parts).read_bytes() == member(finished, *parts).read_bytes()


def test_curves_and_images_show_each_bucket(finished):
    shown = groups(events(finished))
    own = shown["5_by_shape"]

    assert own == {f"held_out/loss_{name}" for name in NAMES}
    assert shown["1_watch"] >= {"held_out/loss", "validation/samples"}

    image = events(finished).Images("1_watch/validation/samples")[-1]
    height = Image.open(io.BytesIO(image.encoded_image_string)).height
    assert height > 3 * 72


def test_buckets_that_fill_no_batch_are_named(finished, bucket_prepared, tmp_path, capsys):
    trained(bucket_prepared, tmp_path / "run", "expert.train.max_steps=3")
    lines = [line for line in capsys.readouterr().err.splitlines() if "may never be trained on" in line]
    manifest = json.loads((finished / "prepared/manifest.json").read_text())
    sizes = [clusters[0]["train"] for clusters in manifest["bucket_samples"]]
    expected = [name for name, size in zip(NAMES, sizes, strict=True) if 0 < 3 * size < sum(sizes)]

    assert expected and len(lines) == 1 and lines[0].startswith(f"expert-0: {', '.join(expected)}: a share of 3 steps")
    assert "raise expert.train.max_steps, or leave" in lines[0]


def test_a_student_of_too_few_steps_is_told_its_own_key(bucket_finished, tmp_path, capsys):
    run = copy_run(bucket_finished, tmp_path / "run")

    assert main(["fit", *bucket_experiment(run), "member=student", "distill.max_steps=1"]) == 0
    assert "may never be trained on; raise distill.max_steps, or leave" in capsys.readouterr().err


SMALL = {"x_shape": (3, 4, 4), "condition": ConditionSpec("text", 6), "width": 16, "depth": 2, "num_heads": 2}
LARGE = (Bucket(4, 4, (3, 4, 4)), Bucket(6, 8, (3, 6, 8)))


def test_the_largest_shape_is_tried_once_the_optimizer_has_its_state():
    given = [batch(seed=seed) for seed in range(3)]
    alone, _ = fitted(expert(), *given)
    module, _ = fitted(expert(buckets=LARGE), *given)
    calls = [tuple(x_t.shape[2:]) for x_t, _, _ in module.network.calls]

    assert calls == [(4, 4), (6, 8), (4, 4), (4, 4)]
    assert torch.equal(module.network.gain, alone.network.gain)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_trying_the_largest_shape_changes_no_weight_on_several_ranks(strategy):
    def task(rank):
        found = []
        for buckets in ((), LARGE):
            torch.manual_seed(0)
            module = MemberModule(expert(DiT(**SMALL, patch_size=2), buckets=buckets))
            batches = [batch(seed=2 * step + rank) for step in range(3)]
            trainer = trainer_of(rank, strategy, max_steps=3, limit_val_batches=0)
            trainer.fit(module, DataLoader(batches, batch_size=None))
            found.append([local(weight).detach().clone() for weight in module.network.parameters()])

        return all(map(torch.equal, *found))

    assert in_two_processes(task) == {0: True, 1: True}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_held_out_sample_counts_once_in_its_bucket(num_ranks):
    """Five and three samples in batches of four: two ranks see a sample again at the end of each bucket."""
    objective = expert(Recorder(), batch_size=4, buckets=LARGE, held_out_ends={LARGE[0]: 5, LARGE[1]: 11})
    counted = []
    for index, (size, shape) in enumerate(((4, (4, 4)), (1, (4, 4)), (3, (6, 8)))):
        for rank in range(num_ranks):
            given = batch(-(-size // num_ranks))
            given["x_0"] = torch.zeros(len(given["sample_id"]), 3, *shape)
            counted.append(objective.num_counted(given, index, Position(0, rank, num_ranks)))

    assert counted == ([4, 1, 3] if num_ranks == 1 else [2, 2, 1, 0, 2, 1])
