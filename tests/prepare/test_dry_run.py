import io
import json
from collections import Counter

import pytest
from prepare.listed import Listed, experiment_of, plug_in, record, records, state_of
from prepare.tiny_experiment import tiny_experiment
from rich.console import Console

from ddm_lightning.config.experiment import PluginConfig, PrepareConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.dry_run import DryRun, dry_run, dry_run_table
from ddm_lightning.prepare.plugins import Plugins
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.reading import Reading
from ddm_lightning.prepare.records import BrokenSample
from ddm_lightning.prepare.stages import prepare

pytestmark = pytest.mark.usefixtures("quick_prepare")
EVERYTHING = ("source", "encode", "index", "partition", "shards", "merge")


def bytes_of(plan):
    return {name: num_bytes for name, (num_bytes, _) in plan.estimates.items()}


def test_nothing_is_written_before_or_after_a_run(tmp_path):
    experiment = tiny_experiment(num_samples=600)
    plan = dry_run(experiment, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    assert plan.stages == EVERYTHING
    assert (plan.num_parts, plan.num_unfinished_parts, plan.num_samples) == (2, 2, 600)
    prepare(experiment, tmp_path / "run")
    before = state_of(tmp_path)
    plan = dry_run(experiment, tmp_path / "run")
    assert (plan.stages, plan.num_unfinished_parts) == ((), 0)
    experiment.prepare.features = PluginConfig("pooled-pixels", {"grid": 2})
    plan = dry_run(experiment, tmp_path / "run")
    assert (plan.stages, plan.num_unfinished_parts) == (EVERYTHING[1:], 2)
    experiment.prepare.held_out_fraction = 0.2
    assert state_of(tmp_path) == before


@pytest.mark.parametrize("horizontal_flips", [False, True])
@pytest.mark.parametrize("caption_encoder", [None, PluginConfig("hashed-words", {"size": 6})])
def test_bytes_a_sample_are_those_that_prepare_writes(tmp_path, horizontal_flips, caption_encoder):
    experiment = tiny_experiment(num_samples=60)
    experiment.prepare.horizontal_flips, experiment.prepare.caption_encoder = horizontal_flips, caption_encoder
    told = bytes_of(dry_run(experiment, tmp_path))
    prepare(experiment, tmp_path)
    prepared = Prepared(tmp_path / "prepared")

    def on_disk(group):
        headers = 128  # of each .npy file
        files = prepared.ledgers[0].files(group).values()
        return sum(file["bytes"] - headers for file in files) / 60

    assert told["encoded images"] == on_disk("latents") == 192 * (1 + horizontal_flips)
    assert told["features"] == on_disk("features") == 4 * 48
    if caption_encoder is None:
        assert "encoded captions" not in told
    else:
        assert told["encoded captions"] == on_disk("captions") == 2 * 6
    (index, *_) = (tmp_path / "prepared" / "shards").rglob("index.json")
    shard = json.loads(index.read_text())["shards"][0]
    sizes = dict(zip(shard["column_names"], shard["column_sizes"], strict=True))
    others = {sizes.pop(name) for name in ("sample_id", "cluster", "caption")}
    assert others == {8, 4, None} and told["shards without texts"] == sum(sizes.values())
    texts = sum(
        len(f"{key}{caption}") for key, caption in zip(prepared.texts("keys"), prepared.texts("captions"), strict=True)
    )
    assert told["keys and captions"] == texts // 60


def test_a_source_that_does_not_know_its_size_is_estimated_by_the_sample(tmp_path, monkeypatch):
    parts = {"broken": [BrokenSample("x", "empty file")] * 3, "good": records(5, caption="é")}
    source = plug_in(monkeypatch, SOURCES, Listed(parts, sized=False))
    plan = dry_run(experiment_of(source), tmp_path)
    assert (plan.num_samples, plan.num_parts) == (None, 2)
    assert bytes_of(plan)["keys and captions"] == 2 + 2, "two letters of key, two bytes of caption"
    text = printed(dry_run_table(plan, 2))
    assert "unknown before reading" in text and "–" in text


def test_only_the_first_samples_are_read(tmp_path, monkeypatch):
    source = Listed({f"{name}": records(100, f"{name}-") for name in range(60)})
    seen = Counter()
    source.read = lambda part: (seen.update([one.key]) or one for one in source.samples[part.name])
    plan = dry_run(experiment_of(plug_in(monkeypatch, SOURCES, source)), tmp_path)
    assert sorted(seen) == sorted(f"{name}-{index}" for name in range(0, 60, 3) for index in range(50))
    assert plan.seen == "of 1,000 samples from all over the source: with a caption 1,000, different labels 1, broken 0"


def test_a_source_of_which_nothing_can_be_read_is_told(tmp_path, monkeypatch):
    source = plug_in(monkeypatch, SOURCES, Listed({"one": [BrokenSample("x", "empty file")] * 20}))
    with pytest.raises(UserError, match=r"no sample can be read \(empty file\); fix prepare\.source"):
        dry_run(experiment_of(source), tmp_path)


@pytest.mark.parametrize("image_encoder", ["vae", "pixels"])
def test_what_prepare_refuses_a_dry_run_refuses(tmp_path, monkeypatch, image_encoder):
    samples = records(20) if image_encoder == "vae" else [record("wide", size=(8, 9))]
    source = plug_in(monkeypatch, SOURCES, Listed({"one": samples * 20}))
    with pytest.raises(UserError, match="unknown image encoder" if image_encoder == "vae" else "is not square"):
        dry_run(experiment_of(source, image_encoder=PluginConfig(image_encoder)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_checks_the_sizes_of_the_data_too(tmp_path):
    def refuse(sizes):
        raise UserError(f"no network for {sizes.x_shape}")

    with pytest.raises(UserError, match="no network for"):
        dry_run(tiny_experiment(), tmp_path, refuse)
    assert list(tmp_path.iterdir()) == []


def printed(table):
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()


def plan_of(found=(), filtered=None):
    estimates = {"encoded images": (8192, 0.036), "features": (4096, 0.018)}
    looked = Reading(found, Plugins(PrepareConfig()))
    looked.num_read = 10
    looked.broken = list(found)
    looked.filtered = Counter(filtered or {})
    return DryRun(EVERYTHING, 1000, 1000, 1_000_000, estimates, looked, 0, 1)


def test_the_table_multiplies_by_hand():
    plan = plan_of()
    text = printed(dry_run_table(plan, 4))
    shared = printed(dry_run_table(plan, 16, 4))

    assert "with 4 processes" in text and "with 4 GPUs" in shared and "3.75 h" in shared
    assert "with 1 GPU " in printed(dry_run_table(plan, 1, 8))
    rows = {line.partition("  ")[0].strip(): line.split() for line in text.splitlines()}
    assert "parts: 1,000, samples: 1,000,000" in text
    assert " ".join(rows["encoded images"][2:]) == "8,192 36 ms 8.2 GB 2.5 h"
    assert " ".join(rows["features"][1:]) == "4,096 18 ms 4.1 GB 75 min"
    assert " ".join(rows["total"][1:]) == "12,288 54 ms 12.3 GB 3.75 h"
    # Of ten samples that were read, two are broken and three are filtered out.
    filtered = plan_of([BrokenSample("x", "empty file")] * 2, {"not min_side >= 9": 3})
    assert "samples: 1,000,000, about 500,000 after filters" in printed(dry_run_table(filtered, 4))
