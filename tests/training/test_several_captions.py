"""Several captions per image: stored by prepare, one drawn per step."""

import json
import shutil

import numpy as np
import pyarrow.parquet
import pytest
import torch
from prepare.listed import hashes
from prepare.tiny_experiment import tiny_experiment
from shards.mds import WARNINGS
from source_files import encoded, noise
from tiny_runs import TINY, copy_run
from training.members import batch, expert
from training.short_fits import member, weights

from ddm_lightning.cli.parser import main
from ddm_lightning.config.experiment import CaptionConfig, PluginConfig
from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.encoders.captions import HashedWords
from ddm_lightning.prepare.dry_run import dry_run
from ddm_lightning.prepare.stages import prepare
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, shard_name
from ddm_lightning.shards.mds import open_shards
from ddm_lightning.training.objective import Position

pytestmark = WARNINGS
COLUMNS = ["alt", "recap", "long"]


def captions_of(index):
    """Captions of a row; every combination of missing ones occurs."""
    texts = [f"alt {index}", f"a recaption {index}", f"a long one {index}"]
    return [None if index >> number & 1 else text for number, text in enumerate(texts)]


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "table"
    folder.mkdir()
    table = []
    for i in range(64):
        table.append({"image": encoded(noise(8, 8, 3, seed=i)), **dict(zip(COLUMNS, captions_of(i), strict=True))})

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), folder / "0.parquet")
    return PluginConfig("parquet", {"path": str(folder)})


def experiment_of(source, captions):
    experiment = tiny_experiment(captions=[CaptionConfig(*one) for one in captions])
    experiment.prepare.source = source
    experiment.prepare.partition.max_largest_over_mean = 2.0
    return experiment


THREE = [("alt", 0.2), ("recap", 0.5), ("long", 0.3)]


@pytest.mark.usefixtures("quick_prepare")
def test_all_captions_are_encoded_and_stored(source, tmp_path):
    plan = dry_run(experiment_of(source, THREE), tmp_path)

    assert plan.estimates["encoded captions"][0] == 3 * HashedWords(8).encode(["a"])["text"].nbytes

    manifest = prepare(experiment_of(source, THREE), tmp_path)
    assert [(one.column, one.weight) for one in manifest.captions] == list(THREE)
    assert manifest.num_without_caption == 64 // 8

    encoder = HashedWords(8)
    for cluster, split in ((cluster, split) for cluster in range(2) for split in (TRAIN, HELD_OUT)):
        shards = open_shards([tmp_path / "prepared" / "shards" / shard_name(cluster, split)])
        ids = np.arange(len(shards))
        found = shards.take(ids)
        expected = [captions_of(index) for index in found["sample_id"].tolist()]
        assert found["has_caption"].tolist() == [[int(text is not None) for text in texts] for texts in expected]
        for number, suffix in enumerate(("", "_2", "_3")):
            # The first caption of a row stands in for a missing one.
            texts = [row[number] or next(filter(None, row), "") for row in expected]
            assert shards.texts(ids, f"caption{suffix}") == texts
            np.testing.assert_array_equal(found[f"text{suffix}"], encoder.encode(texts)["text"])

    before = hashes(tmp_path / "prepared" / "shards")
    manifest = prepare(experiment_of(source, [(name, 1.0) for name in COLUMNS]), tmp_path)

    assert [one.weight for one in manifest.captions] == [1, 1, 1]
    assert hashes(tmp_path / "prepared" / "shards") == before


@pytest.mark.usefixtures("quick_prepare")
def test_one_caption_gives_the_bytes_of_a_caption_column(source, tmp_path):
    prepare(experiment_of(source, [("recap", 0.3)]), tmp_path / "one")
    source.params["caption_column"] = "recap"
    prepare(experiment_of(source, []), tmp_path / "column")

    assert hashes(tmp_path / "one" / "prepared" / "shards") == hashes(tmp_path / "column" / "prepared" / "shards")


def test_captions_that_cannot_be_used_are_refused(source, tmp_path):
    with pytest.raises(UserError, match=r"^key 'prepare\.captions': .*'other'; it has: image, alt"):
        prepare(experiment_of(source, [("alt", 1.0), ("other", 1.0)]), tmp_path / "run")

    for captions, words in (
        ([("alt", -0.5)], r"key 'prepare\.captions\[0\]\.weight' = -0\.5: must be at least 0"),
        ([("alt", 0.0), ("recap", 0.0)], r"'prepare\.captions' = .*no weight above 0"),
        ([("alt", 0.4), ("alt", 0.6)], r"'prepare\.captions' = .*names a column twice"),
    ):
        with pytest.raises(UserError, match=f"^FILE: .*{words}"):
            check_experiment(experiment_of(source, captions), "FILE")

    assert not (tmp_path / "run").exists()


def drawn(step, rank=0, num_ranks=1, num=4096, weights=(0.2, 0.5, 0.3)):
    """Number of the caption that each sample of a step gets; sample i has the combination i modulo 8."""
    given = {name: values[rank::num_ranks] for name, values in batch(num).items()}
    numbers = torch.arange(num)[rank::num_ranks]
    given["has_caption"] = torch.stack([1 - (numbers >> number & 1) for number in range(3)], 1).to(torch.uint8)
    for number, suffix in enumerate(("", "_2", "_3")):
        given[f"text{suffix}"] = torch.full_like(given["text"], float(number))

    objective = expert(caption_weights=weights, condition_dropout=0.0)
    return objective.noisy_batch(given, Position(step, rank, num_ranks)).condition.values[:, 0].long()


def test_shares_are_the_weights_of_the_captions_that_an_image_has():
    numbers = torch.cat([drawn(step) for step in range(10)])
    for combination in range(7):
        present = [number for number in range(3) if not combination >> number & 1]
        here = numbers[combination::8]
        total = sum((0.2, 0.5, 0.3)[number] for number in present)
        for number in range(3):
            share = (0.2, 0.5, 0.3)[number] / total if number in present else 0
            error = 4 * (share * (1 - share) / len(here)) ** 0.5
            assert abs((here == number).double().mean() - share) <= error, (combination, number)

    # Without captions, or with those of weight 0 alone, all columns hold the same text.
    assert not drawn(0)[7::8].any() and set(drawn(0, weights=(0, 0, 1))[0::8].tolist()) == {2}


def test_draws_do_not_depend_on_the_number_of_ranks():
    whole = drawn(3)
    for rank in range(4):
        assert torch.equal(drawn(3, rank, 4), whole[rank::4])


def test_captions_are_drawn_alike_after_a_kill(source, tmp_path):
    settings = [
        f"prepare.source={json.dumps({'name': 'parquet', 'params': source.params})}",
        'prepare.captions=[{column: alt, weight: 1}, {column: recap, weight: 1}]',
        "expert.train.max_steps=9",
        "expert.train.global_batch_size=8",
        "island.checkpoint_every_n_steps=6",
        "prepare.partition.max_largest_over_mean=2",
    ]  # fmt: skip

    def fit(run, *more):
        for command in (["prepare"], ["fit", "member=expert-0"]):
            assert main([command[0], "-c", str(TINY), f"run_dir={run}", *command[1:], *settings, *more]) == 0
        return weights(run)

    whole = fit(tmp_path / "run")
    killed = copy_run(tmp_path / "run", tmp_path / "killed", "expert-0")
    shutil.rmtree(member(killed, "checkpoints", "step-00000009.ckpt"))

    assert fit(killed) == whole
    assert fit(tmp_path / "other", "prepare.captions=[{column: alt}, {column: recap, weight: 0}]") != whole
