"""One member from shards to artifact: interrupted in every way, and refused where it cannot go on."""

import dataclasses
import json
import math
import re
import shlex
import shutil
import threading
import time

import numpy as np
import pytest
import torch
from filelock import FileLock
from shards.mds import WARNINGS
from streaming import MDSWriter
from streaming.base.format import reader_from_json
from tiny_runs import TINY, read_status
from training.checkpoint_folders import cut
from training.short_fits import SHORT, checkpoints, events, fit, groups, member, weights

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.processes import FITTED_BY
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.flow.timesteps import sample_timesteps
from ddm_lightning.members.load import load_network
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import lock_member
from ddm_lightning.members.skipped import read_skipped
from ddm_lightning.training.fit import build_data
from ddm_lightning.training.module import MemberModule
from ddm_lightning.use.rows import text_condition

pytestmark = WARNINGS


@pytest.mark.parametrize("parts", ["null", "3"])
def test_no_gradient_outlives_its_step(tiny_run, monkeypatch, parts):
    """Else forward passes and validations would hold 4 bytes a parameter more."""
    held = {"training_step": [], "validation_step": []}

    def watched(name):
        method = getattr(MemberModule, name)

        def step(self, *arguments):
            held[name].append(any(parameter.grad is not None for parameter in self.network.parameters()))
            return method(self, *arguments)

        return step

    for name in held:
        monkeypatch.setattr(MemberModule, name, watched(name))

    assert fit(tiny_run, f"island.micro_batch_size={parts}", "expert.train.max_steps=3") == 0
    assert held["training_step"] == [False] * 3
    assert held["validation_step"] and not any(held["validation_step"])


def test_what_a_finished_member_leaves(finished):
    meta, _ = load_network(member(finished, "artifact"))

    assert (meta.step, meta.num_samples) == (20, 20 * 8)
    assert {"train/loss", "held_out/loss", "train/gradient_norm"} <= set(meta.metrics)
    assert all(math.isfinite(value) for value in meta.metrics.values())
    assert meta.metrics["held_out/step"] == 20
    assert checkpoints(finished) == ["step-00000012.ckpt", "step-00000018.ckpt", "step-00000020.ckpt"]

    status = read_status(finished, "expert-0")
    assert (status["state"], status["step"]) == ("done", 20)
    assert {**status["metrics"], "held_out/step": 20} == meta.metrics


def test_a_member_of_several_waits_while_another_process_trains_it(finished, tiny_run, monkeypatch, capsys):
    monkeypatch.setenv(FITTED_BY, "")
    folder = member(tiny_run)
    locked = threading.Event()
    asked = threading.Event()
    folder.mkdir(parents=True)
    monkeypatch.setattr(
        "ddm_lightning.training.fit.lock_member", lambda *its, **named: asked.set() or lock_member(*its, **named)
    )

    def train_there():
        with FileLock(folder / ".lock"):
            locked.set()
            assert asked.wait(60)
            time.sleep(0.2)
            shutil.copytree(member(finished, "artifact"), folder / "artifact")

    thread = threading.Thread(target=train_there)
    thread.start()

    assert locked.wait(60) and fit(tiny_run) == 0

    thread.join()
    assert f"expert-0 is finished: {folder / 'artifact'}\n" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "artifact"], "it has trained nothing"


def test_its_curves_and_images_are_in_tensorboard(finished):
    shown = events(finished)

    def steps(name):
        return [event.step for event in shown.Scalars(name)]

    assert steps("1_watch/held_out/loss") == [12, 20]

    training = ("learning_rate", "samples_per_second", "data_wait", "memory_gb", "skipped_steps", "gradient_norm")
    for name in ("1_watch/train/loss", *(f"3_training/train/{one}" for one in training)):
        assert steps(name) == [5, 10, 15, 20], name

    rates = [event.value for event in shown.Scalars("3_training/train/learning_rate")]

    assert rates == pytest.approx([2e-3 * min(1, (step + 1) / 10) for step in (5, 10, 15, 20)])
    assert {event.value for event in shown.Scalars("3_training/train/skipped_steps")} == {0}

    images = shown.Images("1_watch/validation/samples")
    assert [image.step for image in images] == [12, 20]
    assert {image.height > 2 * 72 for image in images} == {True}, "small images are enlarged"

    found = groups(shown)
    assert list(found) == ["1_watch", "3_training", "4_by_noise_level"]
    assert found["1_watch"] == {"train/loss", "held_out/loss", "validation/samples"}
    assert found["3_training"] == {f"train/{one}" for one in training}, "no MFU: the peak of a CPU is not known"

    by_time = sorted(name.partition("_t0.")[0] for name in found["4_by_noise_level"])
    assert by_time.count("held_out/loss") == 8 and by_time.count("train/loss") >= 6


def test_the_router_trains_on_all_clusters_and_has_curves_of_its_own(tiny_run, capsys):
    assert fit(tiny_run, "router.train.max_steps=12", name="router") == 0

    meta, _ = load_network(tiny_run / "members/router/artifact")
    assert (meta.role, meta.step, meta.num_samples) == ("router", 12, 12 * 16)

    names = {"held_out/accuracy", "held_out/accuracy_conditional", "held_out/cross_entropy_t0.062"}
    assert names <= set(meta.metrics)

    shown = events(tiny_run, "router")
    assert [image.step for image in shown.Images("2_router/held_out/routing")] == [12]
    assert list(groups(shown)) == ["2_router", "3_training", "4_by_noise_level"]

    both = {f"{split}/{name}" for split in ("train", "held_out") for name in ("accuracy", "cross_entropy")}
    conditional = {"held_out/accuracy_conditional", "held_out/cross_entropy_conditional", "held_out/routing"}

    assert groups(shown)["2_router"] == both | conditional
    assert not [tag for tag in shown.Tags()["scalars"] if "loss" in tag], "an expert's are squared errors"

    status = read_status(tiny_run, "router")["metrics"]
    assert main(["status", "-c", str(TINY), f"run_dir={tiny_run}", *SHORT, "router.train.max_steps=12"]) == 0

    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(" router")]
    assert row[3:5] == [f"{status[f'{split}/cross_entropy']:.4f}" for split in ("train", "held_out")]


def test_shards_from_a_url_train_the_same_weights(finished, tiny_run, tmp_path, capsys):
    shards = shutil.move(tiny_run / "prepared" / "shards", tmp_path / "elsewhere")

    assert fit(tiny_run, f"island.shards=file://{shards}") == 0
    assert weights(tiny_run) == weights(finished)
    assert [path.name for path in member(tiny_run, "cache").iterdir()] == ["store"]

    name = next((member(tiny_run, "cache") / "store").rglob("*.mds"))
    assert name.exists()


def refusal(capsys):
    """The one error line."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_the_ranks_of_a_node_share_its_cache(tiny_run):
    run = Run(load_experiment(TINY, [f"run_dir={tiny_run}"]))
    folders = [build_data(run.member("expert-0"), run, node).cache.name for node in (0, 1)]

    assert folders == ["cache", "node-1"]


def test_a_diverged_training_says_so_and_keeps_its_checkpoints_from_before(tiny_run, capsys):
    settings = ("expert.train.learning_rate=1e30", "expert.train.max_skipped_steps=2", "island.log_every_n_steps=7")

    assert fit(tiny_run, *settings) == 2

    line = refusal(capsys)
    assert re.search(r"expert-0: .*\d consecutive steps, up to step 5, had no finite gradient", line)
    assert "lower its train.learning_rate" in line
    assert [skipped.step for skipped in read_skipped(member(tiny_run, "skipped_steps.jsonl"))] == [1, 2, 3, 4, 5]
    assert not member(tiny_run, "checkpoints").exists()
    assert read_status(tiny_run, "expert-0")["state"] == "failed"


@pytest.mark.usefixtures("quick_prepare")
def test_an_expert_reads_tokens(tmp_path):
    """Stored by the shards; a caption in another order of words is another condition."""
    run = tmp_path / "run"
    tokens = ("prepare.caption_encoder.params.max_tokens=3", "condition.kind=tokens", "router.conditional=false")
    recipe = [f"expert.network.params.{key}={value}" for key, value in (("modulation", "single"), ("rope", "true"))]

    assert main(["prepare", "-c", str(TINY), f"run_dir={run}", *SHORT, *tokens, *recipe]) == 0
    assert fit(run, *tokens, *recipe, "expert.train.max_steps=3") == 0

    meta, network = load_network(member(run, "artifact"))
    assert (meta.condition, meta.step) == (ConditionSpec("tokens", 16, 3), 3)

    conditions = [text_condition([prompt], meta) for prompt in ("red disc", "disc red", "red disc")]

    assert conditions[0].values.shape == (1, 3, 16) and bool((conditions[0].values[0, 2] == 0).all())

    with torch.no_grad():
        images = [network(torch.ones(1, 3, 8, 8), torch.tensor([0.5]), condition) for condition in conditions]

    assert torch.equal(images[0], images[2]) and bool(images[1].isfinite().all())


def test_tokens_that_the_shards_do_not_have_are_asked_for_before_anything_is_written(tmp_path, capsys):
    arguments = ["prepare", "-c", str(TINY), f"run_dir={tmp_path / 'run'}", "condition.kind=tokens"]

    assert main(arguments) == 2
    assert "key 'condition.kind' = 'tokens': the caption encoder makes no tokens" in refusal(capsys)
    assert not (tmp_path / "run").exists()


def plant_infinity(run, sample_index):
    """Spoil the text of one training sample of cluster 0; returns its id."""
    folder = run / "prepared/shards/cluster-0/train"
    name = "cluster-0/train"
    shards = json.loads((folder / "index.json").read_text())["shards"]
    readers = [reader_from_json(str(folder.parent), folder.name, shard) for shard in shards]
    samples = [dict(reader[i]) for reader in readers for i in range(reader.samples)]
    text = np.array(samples[sample_index]["text"])
    text[0] = np.inf
    samples[sample_index]["text"] = text
    columns = dict(zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=True))
    shutil.rmtree(folder)
    with MDSWriter(out=str(folder), columns=columns, hashes=["sha1", "xxh64"]) as writer:
        for sample in samples:
            writer.write(sample)

    manifest = run / "prepared/manifest.json"
    stored = json.loads(manifest.read_text())
    stored["index_sha256"][name] = sha256_file(folder / "index.json")
    manifest.write_text(json.dumps(stored))
    return int(samples[sample_index]["sample_id"])


def test_a_sample_that_is_not_finite_costs_its_steps_and_is_found_by_one_command(tiny_run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    planted = plant_infinity(tiny_run, 3)

    assert fit(tiny_run, "condition.dropout=0.0") == 0

    skipped = read_skipped(member(tiny_run, "skipped_steps.jsonl"))
    assert 1 <= len(skipped) < 20
    assert all(planted in one.sample_ids for one in skipped)
    assert all(math.isnan(one.losses[one.sample_ids.index(planted)]) for one in skipped)
    assert sum(not math.isfinite(loss) for one in skipped for loss in one.losses) == len(skipped)

    status = read_status(tiny_run, "expert-0")
    assert status["metrics"]["train/skipped_steps"] == len(skipped) and math.isfinite(status["metrics"]["train/loss"])

    load_network(member(tiny_run, "artifact"))  # refuses weights that are not finite

    settings = ["-c", str(TINY), f"run_dir={tiny_run}", "condition.dropout=0.0", *SHORT]

    assert main(["status", *settings]) == 0

    steps = "1 step" if len(skipped) == 1 else f"{len(skipped)} steps"
    told = f"expert-0: skipped {steps} without a finite gradient; see python -m ddm_lightning replay -c {TINY} "
    _, line = (line for line in capsys.readouterr().out.splitlines() if line.startswith(told))
    assert main(shlex.split(line.partition("see python -m ddm_lightning ")[2])) == 0, "the command as it is printed"

    command = ["replay", "member=expert-0", *settings]
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if re.match(r" *\d+ ", line)]

    assert "every gradient is finite" not in out
    assert len(rows) == 8 and f"step {skipped[-1].step} of expert-0, rank 0, with {member(tiny_run)}" in out
    assert rows[0][0] == str(planted) and rows[0][2:] == ["text", "nan", "nan"]

    by_id = {row[0]: row for row in rows}
    for sample_id, t in zip(skipped[-1].sample_ids, skipped[-1].t, strict=True):
        assert float(by_id[str(sample_id)][1]) == pytest.approx(t, abs=1e-4)

    for path in member(tiny_run, "checkpoints").iterdir():
        cut(path)

    assert main(command) == 0
    assert "with the initial weights" in capsys.readouterr().out
    assert main([*command, "--step", "12345"]) == 2
    assert "nothing to replay; steps of rank 0 that were skipped: " in refusal(capsys)
    assert main([*command, "--rank", "1"]) == 2
    assert "steps of rank 1 that were skipped: none" in refusal(capsys)

    # As if a second device had had every other of these samples: its times are others.
    one = dataclasses.replace(skipped[-1], rank=1, sample_ids=skipped[-1].sample_ids[1::2])
    member(tiny_run, "skipped_steps-1.jsonl").write_text(one.line() + "\n")

    assert main([*command, "--rank", "1"]) == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines() if re.match(r" *\d+ ", line)]
    experiment = load_experiment(TINY)
    drawn = keyed_generator(experiment.seed, "expert-0", "noise", 1, one.step)
    settings = dataclasses.asdict(experiment.expert.timesteps)
    del settings["shift_by_tokens"]
    times = sample_timesteps(4, **settings, generator=drawn, device="cpu")
    wanted = {str(sample_id): t for sample_id, t in zip(one.sample_ids, times.tolist(), strict=True)}

    assert {row[0]: float(row[1]) for row in rows} == pytest.approx(wanted, abs=1e-4)
