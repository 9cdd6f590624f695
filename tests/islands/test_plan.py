"""The plan of a run: its figures by hand, what does not fit, and bad input."""

import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product

import pytest
from PIL import Image
from tiny_runs import TINY

from ddm_lightning.cli.parser import main
from ddm_lightning.config.experiment import LoraConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.config.merge import island_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.core.gpus import Device
from ddm_lightning.encoders.images import Pixels
from ddm_lightning.islands import plan
from ddm_lightning.islands.plan_data import data_of
from ddm_lightning.members.cost import MemberCost, chosen_strategy
from ddm_lightning.members.member import Member
from ddm_lightning.training import measure
from ddm_lightning.training.module import MemberModule

GPU = ("island.accelerator=gpu", "island.precision=bf16-mixed")
PLAIN = ("condition.kind=none", "sample.prompts=[]")


def network(width, depth):
    return f"expert.network={{name: dit, params: {{width: {width}, depth: {depth}, num_heads: 2, patch_size: 4}}}}"


def planner(*overrides, members=("expert-0",), mfu=None, prices=(), samples=None):
    experiment = load_experiment(TINY, overrides)
    return plan.Planner(experiment, members, data_of(experiment, samples), plan.rates_of(mfu, prices))


def test_state_and_flops_are_those_of_the_closed_form(tmp_path):
    """Of a DiT with adaLN-Zero and no condition (Peebles and Xie, 2212.09748), in a training by AdamW."""
    d, depth, patch = 64, 3, 4 * 4 * 3
    settings = (*PLAIN, network(d, depth), "expert.train.ema_widths=[0.1]", f"run_dir={tmp_path}")
    (member,) = planner(*settings).on(None).members
    # Modulation, queries, keys and values, output, MLP of 4 d; then patches, time and the last layer.
    block = (6 * d * d + 6 * d) + (3 * d * d + 3 * d) + (d * d + d) + (8 * d * d + 5 * d)
    ends = (patch * d + d) + (256 * d + d) + (d * d + d) + (2 * d * d + 2 * d) + (d * patch + patch)
    assert member.parameters == depth * block + ends
    each = 4 * member.parameters
    assert (member.memory.gradients, member.memory.optimizer, member.memory.ema) == (each, 2 * each, 2 * each)
    assert member.checkpoint_bytes == 5 * each
    train = load_experiment(TINY).expert.train
    assert member.flops == member.flops_per_sample * train.max_steps * train.global_batch_size / 2


def test_hours_price_and_traffic_follow_by_division(tmp_path):
    prices, result = tmp_path / "prices.yaml", tmp_path / "mfu.json"
    prices.write_text("A100 80GB: 2.0\nL4: 1\n")
    result.write_text('{"figures": {"mfu_8": 0.25, "mfu_16": 0.5, "hfu_8": 0.9}}')
    settings = (*GPU, f"run_dir={tmp_path}", "islands={router: {devices: 1, nodes: 2, publish_every_n_minutes: 5}}")
    members = ("expert-0", "router")
    found = planner(*settings, members=members, mfu=str(result), prices=[str(prices)], samples=1000).on("A100 80GB")
    for one, devices, seconds in zip(found.members, (1, 2), (600, 300), strict=True):
        assert one.device_hours == pytest.approx(one.flops / (0.5 * 312e12) / 3600)
        assert (one.devices, one.hours, one.dollars) == (devices, one.device_hours / devices, 2 * one.device_hours)
        assert one.checkpoints_out == one.checkpoint_bytes / seconds
        num_samples, sample_bytes = one.flops / one.flops_per_sample, 3 * 8 * 8 + 2 * 16 + 4
        assert one.shards_in == pytest.approx(num_samples * sample_bytes / (3600 * one.hours))
        assert one.samples_per_second == pytest.approx(num_samples / (3600 * one.hours))
    expert, router = found.members
    assert router.shard_bytes == 2 * expert.shard_bytes == pytest.approx(850 * (3 * 8 * 8 + 2 * 16 + 4))
    assert found.totals["hours"] == max(expert.hours, router.hours)
    assert found.totals["dollars"] == expert.dollars + router.dollars
    again = planner(*settings, "island.activation_checkpointing=true", mfu="0.5").on("L4")
    assert again.members[0].device_hours == pytest.approx(expert.device_hours * 312 / 121)
    # What checkpointing computes twice counts on top of an MFU that is assumed, not of one that was measured so.
    plain, twice = (planner(*settings, f"island.activation_checkpointing={on}") for on in (False, True))
    cost = MemberCost(plain.members[0])
    more = 1 + cost.flops(backward=False) / cost.flops()
    first, second = (made.on("L4").members[0].device_hours for made in (plain, twice))
    assert second == pytest.approx(more * first) and 1.2 < more < 1.5


def test_what_is_known_before_prepare_is_what_it_writes(tiny_run):
    before = data_of(load_experiment(TINY, [f"run_dir={tiny_run.parent / 'none'}"]))
    after = data_of(load_experiment(TINY, [f"run_dir={tiny_run}"]))
    assert before.sample_bytes == after.sample_bytes
    assert sum(before.num_samples) == pytest.approx(sum(after.num_samples), abs=8)
    sizes = ("x_shape", "text_size", "token_shape", "num_classes")
    assert [getattr(before.sizes, name) for name in sizes] == [getattr(after.sizes, name) for name in sizes]


def folder_of_images(folder):
    """Twenty images of 12 x 12 pixels and five of 6 x 6."""
    folder.mkdir()
    for number in range(25):
        edge = 12 if number < 20 else 6
        Image.new("RGB", (edge, edge), (10 * number, 0, 0)).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"red {number}")
    return folder


@pytest.mark.parametrize("filters", [{}, {"min_side": ">= 9"}])
def test_a_dry_run_of_prepare_and_the_plan_agree(tmp_path, capsys, filters):
    folder = folder_of_images(tmp_path / "images [1]")
    settings = [
        *(f"run_dir={tmp_path / 'run'}", "prepare.horizontal_flips=true", "prepare.images={size: 8, aspect: crop}"),
        *(f"prepare.source={{name: imagefolder, params: {{path: '{folder}'}}}}", f"prepare.filters={filters}"),
        *("prepare.partition.num_fine_centroids=2", "expert.train.global_batch_size=2"),
    ]
    assert main(["prepare", "-c", str(TINY), *settings, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (data,) = (line.removeprefix("data, as in plan: ") for line in lines if line.startswith("data, as in plan: "))
    num, sample_bytes = (20 if filters else 25), 2 * 3 * 8 * 8 + 2 * 16 + 4
    assert data.startswith(
        f"samples {num}, {sample_bytes} bytes each in the shards without captions' texts; from the source"
    )
    (shards,) = (line for line in lines if "shards without texts" in line)
    assert shards.split()[3:] == [str(sample_bytes), "–", format_bytes(num * sample_bytes).split()[0], "kB", "–"]

    command = shlex.split(lines[-1].partition(": python -m ddm_lightning ")[2])
    command[command.index("here")] = "L4"
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sources"]["data"] == data
    experts = found["plans"][0]["members"][:2]
    assert sum(one["shard_bytes"] for one in experts) == pytest.approx(0.85 * num * sample_bytes, abs=sample_bytes)


def test_flips_and_deviations_are_stored_beside_the_images(tmp_path, monkeypatch):
    def stored(*overrides):
        return data_of(load_experiment(TINY, [f"run_dir={tmp_path}", *overrides])).sample_bytes

    plain, image = stored(), 3 * 8 * 8
    assert stored("prepare.horizontal_flips=true") == plain + image
    monkeypatch.setattr(Pixels, "stores", "posterior")
    assert stored() == plain + image
    assert stored("prepare.horizontal_flips=true") == plain + 3 * image


def test_a_suggestion_has_no_larger_parts_than_the_island(tmp_path):
    made = planner(*GPU, f"run_dir={tmp_path}", "island.micro_batch_size=2")
    (found,) = made.with_suggestions(made.on("RTX 3090")).members
    assert (found.suggestion.devices, found.suggestion.micro_batch_size) == (1, 2)


def peak_of(setting, experiment, size, num_bytes, data):
    island = replace(island_of("expert-0", experiment), devices=setting.devices, strategy="auto", micro_batch_size=size)
    cost = MemberCost(Member.resolve("expert-0", experiment, data.sizes))
    return cost.memory(island, chosen_strategy(island, cost.state(island), num_bytes)).peak


def test_too_many_samples_at_once_are_halved_until_they_fit(tmp_path):
    settings = (*GPU, f"run_dir={tmp_path}", "expert.train.global_batch_size=4194304")
    made = planner(*settings)
    found = made.with_suggestions(made.on("RTX 3090"))
    (line,) = found.warnings()
    assert line.startswith("expert-0 on RTX 3090 24GB: does not fit: ")
    assert "; fits with island.micro_batch_size=" in line and " of 24.0 GB" in line and "devices" not in line
    setting = found.members[0].suggestion
    exact = [peak_of(setting, made.experiment, n * setting.micro_batch_size, 24e9, made.data) for n in (1, 2)]
    assert exact[0] == pytest.approx(setting.peak, rel=0.02)
    assert exact[0] <= 0.9 * 24e9 < exact[1]


def test_weights_too_large_for_a_device_are_sharded_over_as_few_as_hold_them(tmp_path, monkeypatch):
    """1.8 billion parameters: 36 GB of state, half of which leaves room for two gathered blocks, but not for all."""
    monkeypatch.setattr(plan, "_CHEAPER", {})
    made = planner(*GPU, *PLAIN, network(4096, 6), f"run_dir={tmp_path}", "expert.train.global_batch_size=16")
    found = made.with_suggestions(made.on("RTX 3090"))
    setting = found.members[0].suggestion
    assert not found.fits
    assert (setting.devices, setting.strategy) == (2, "fsdp")
    assert setting.peak <= 0.9 * 24e9
    # Two devices cannot share 9 samples, nor can four; these three can.
    three = ("islands={expert: {devices: 3}}", "expert.train.global_batch_size=18")
    of_three = planner(*GPU, *PLAIN, network(4096, 6), f"run_dir={tmp_path}", *three)
    assert of_three.with_suggestions(of_three.on("RTX 3090")).members[0].suggestion.devices == 3


def test_where_nothing_fits_the_smallest_memory_that_would_do_is_named(tmp_path):
    """A device a little larger fits, one a little smaller does not."""
    sparing = ("island.accelerator=gpu", "island.precision=bf16-true", "island.ema=host")
    made = planner(*sparing, *PLAIN, network(1024, 2), f"run_dir={tmp_path}", "expert.train.global_batch_size=64")

    def told(gigabytes):
        return next(made.with_suggestions(made.on(f"name=Mine,tflops=1,memory_gb={gigabytes:.4f}")).warnings())

    found = re.search(r"%.*; on one node needs at least (\S+) MB with island.devices=8 .* on each of 8", told(0.02))
    least = float(found[1]) / 1e3
    assert "; fits with " in told(1.01 * least) and "; on one node needs " in told(0.99 * least)


def test_the_cheapest_change_that_fits_is_suggested(tmp_path):
    """The first in order of cost whose smallest micro-batch fits, found here by trying all."""
    made = planner(*GPU, *PLAIN, network(1024, 2), f"run_dir={tmp_path}", "expert.train.global_batch_size=2048")
    cost, island = MemberCost(made.members[0]), replace(made.experiment.island, micro_batch_size=1)
    least = []
    for half, eight, host, again in product((False, True), repeat=4):
        tried = replace(
            island,
            precision="bf16-true" if half else "bf16-mixed",
            ema="host" if host else "device",
            activation_checkpointing=again,
        )
        changes = {
            "island.precision=bf16-true": half,
            "expert.train.optimizer=adamw-8bit": eight,
            "island.ema=host": host,
            "island.activation_checkpointing=true": again,
        }
        peak = cost.with_optimizer("adamw-8bit" if eight else "adamw").memory(tried, "single").peak
        least.append(({change for change, chosen in changes.items() if chosen}, peak))

    found = []
    for gigabytes in (1.1, 0.95, 0.75, 0.55):
        setting = made.with_suggestions(made.on(f"name=Mine,tflops=1,memory_gb={gigabytes}")).members[0].suggestion
        changes = {word for word in setting.changes.split() if "micro_batch" not in word}
        assert setting.devices == 1 and changes == next(one for one, peak in least if peak <= 0.9e9 * gigabytes)
        assert setting.peak <= 0.9e9 * gigabytes and 1 <= setting.micro_batch_size < 1024
        found.append(changes)

    assert [len(one) for one in found] == [0, 1, 2, 3]


def test_no_setting_is_suggested_that_fit_refuses(tmp_path):
    """bfloat16 where the device has none, or for Muon; FSDP2 under float16, or for Muon."""
    made = planner(*GPU, *PLAIN, network(1024, 2), f"run_dir={tmp_path}", "expert.train.global_batch_size=16")
    cost, island = MemberCost(made.members[0]), made.experiment.island

    def changes(optimizer="adamw", precision="32-true", has_bfloat16=True):
        tried = replace(island, precision=precision)
        found = plan.smallest(cost.with_optimizer(optimizer), tried, 600_000_000, [1, 8], has_bfloat16=has_bfloat16)
        return found.peak <= 0.9 * 600e6, found.changes

    fits, words = changes()
    assert fits and words.startswith("island.precision=bf16-true ")
    assert changes(has_bfloat16=False) == (True, "island.devices=8")
    least = "island.ema=host island.micro_batch_size=1 island.activation_checkpointing=true"
    assert changes("muon") == (False, least)
    assert changes(precision="16-mixed") == (False, f"{least} expert.train.optimizer=adamw-8bit")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("stem", ["laion_8x", "laion_24b"])
def test_the_command_for_a_card_of_24_gb_fits_it(stem):
    """With activations and micro-batches, on tensors without data; compiled blocks need annotations unchecked."""
    root = TINY.parents[1]
    text = (root / "experiments" / f"{stem}.yaml").read_text("utf-8")
    command = re.search(
        r"python -m ddm_lightning fit (-c \S+) member=(\S+) (.*island\.micro_batch_size=.*?)(?: {4}|$)", text, re.M
    )
    file, member, settings = command.groups()
    words = f"plan {file} --only {member} {settings} --device name=X,tflops=100,memory_gb=24 --json"
    done = subprocess.run(
        [sys.executable, "-m", "ddm_lightning", *words.split()], cwd=root, capture_output=True, check=True
    )
    (found,) = json.loads(done.stdout)["plans"]
    assert found["fits"] and found["members"][0]["suggestion"]["changes"] == ""


def test_a_tenth_of_a_device_is_left_free(tmp_path, monkeypatch):
    made = planner(*GPU, f"run_dir={tmp_path}")
    least = made.on("RTX 3090").members[0].memory.peak / 0.9
    for num_bytes, fits in ((least + 1, True), (least - 1, False)):
        monkeypatch.setattr(plan, "parse_gpu", lambda _, num_bytes=num_bytes: Device("RTX 3090", num_bytes, {}))
        assert made.on("RTX 3090").fits == fits


def test_json_has_every_figure_and_its_source(tmp_path, capsys):
    arguments = ["plan", "-c", str(TINY), f"run_dir={tmp_path}", *GPU, "--device", "H200", "--device", "A100 80GB"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"experiment", "sources", "warnings", "plans"}
    assert [one["device"] for one in found["plans"]] == ["H200 141GB", "A100 80GB"]
    for one in found["plans"]:
        assert [member["member"] for member in one["members"]] == ["expert-0", "expert-1", "router"]
        assert one["fits"] and one["dollars"] is None and one["hours"] > 0
        assert one["members"][0]["memory"]["peak"] > 0
    assert found["plans"][0]["members"][0]["suggestion"]["devices"] == 1

    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "expert-0…1" in text and "assumed" in text and not any(tmp_path.iterdir())


def test_a_gpu_of_ones_own_is_planned_by_its_peak_and_memory(tmp_path):
    made = planner(*GPU, f"run_dir={tmp_path}", mfu="0.5")
    found = made.on("name=MyGPU,tflops=120,memory_gb=0.001")
    (one,) = found.members
    assert (found.device, found.device_bytes) == ("MyGPU", 10**6)
    assert one.device_hours == pytest.approx(one.flops / (0.5 * 120e12) / 3600)
    assert one.samples_per_second == pytest.approx(0.5 * 120e12 / one.flops_per_sample)
    assert one.memory.peak > 0.9e6 and "on MyGPU: does not fit: 1.1 MB, with 90% of the" in next(found.warnings())


def test_each_device_says_what_fits_it_once_for_members_alike(tmp_path, capsys):
    """Devices that fit come first; where nothing fits, that is said."""
    arguments = ["plan", "-c", str(TINY), f"run_dir={tmp_path}", *GPU, "--only", "expert-0,expert-1"]
    names = {"A": 1e-4, "B": 5e-4, "C": 3e-3}
    devices = [f"--device=name={name},tflops=1,memory_gb={size}" for name, size in names.items()]
    assert main([*arguments, *devices]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  expert-0…1 on ")]
    assert [line.split()[2] for line in lines] == ["C:", "A:", "B:"]
    assert re.fullmatch(r"expert-0…1 on C: fits without changes: \S+ MB of 3\.0 MB", lines[0])
    assert "; fits with island.devices=4: " in lines[2] and " of 500.0 kB on each of 4 (fsdp)" in lines[2]
    assert "; on one node needs at least " in lines[1]


def test_a_gpu_without_bfloat16_is_told(tmp_path):
    made = planner(*GPU, f"run_dir={tmp_path}")
    found = made.on("T4")
    assert found.members[0].hours is None
    (line,) = found.warnings()
    assert line.startswith("T4 16GB: no hours") and "need 16-mixed" in line
    assert plan.shortages(made.experiment, ["expert-0"], ["Tesla T4", "L4"]) == [line]
    half = planner("island.accelerator=gpu", "island.precision=16-mixed", f"run_dir={tmp_path}", mfu="0.5").on("T4")
    assert half.members[0].device_hours == pytest.approx(half.members[0].flops / (0.5 * 65e12) / 3600)
    assert not [*half.warnings()]


def slowed(monkeypatch, seconds):
    """Let each training step take some seconds more, in which nothing is computed; list their members."""
    steps = []
    real = MemberModule.training_step

    def training_step(module, *arguments):
        steps.append(module.member.name)
        time.sleep(seconds)
        return real(module, *arguments)

    monkeypatch.setattr(MemberModule, "training_step", training_step)
    monkeypatch.setattr(measure, "_SECONDS", 0.0)
    return steps


def test_this_machine_is_measured_by_steps_of_each_kind_of_member(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "default_jobs", lambda *_: 2)
    steps = slowed(monkeypatch, 0.1)
    assert main(["plan", "-c", str(TINY), f"run_dir={tmp_path / 'run'}", "--device", "here", "--json"]) == 0
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if "measuring" in line]  # a slow machine says how far it is
    assert said == ["expert-0: measuring a few steps here …", "router: measuring a few steps here …"]
    assert set(steps) == {"expert-0", "router"} and len(steps) == 10 and not any(tmp_path.iterdir())
    found = json.loads(captured.out)
    assert found["sources"]["speed"].startswith("measured by a few steps on this CPU")
    (here,) = found["plans"]
    assert (here["device"], here["jobs"], here["fits"]) == ("this CPU", 2, True)
    expert, twin, router = here["members"]
    assert expert["samples_per_second"] == twin["samples_per_second"]
    for one, batch, num_steps in ((expert, 8, 60), (router, 16, 40)):
        seconds = batch / one["samples_per_second"]
        assert 0.1 < seconds < 0.2
        assert one["hours"] == pytest.approx(num_steps * seconds / 3600)
    # Two experts and the router, two at a time.
    assert here["hours"] == pytest.approx((2 * expert["hours"] + router["hours"]) / 2)


def test_a_step_too_long_to_wait_for_is_measured_on_fewer_samples(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(measure, "samples_per_second", lambda member, _: sizes.append(member.batch_size) or 3.0)
    made = planner(f"run_dir={tmp_path}")
    monkeypatch.setattr(plan, "_CPU_FLOPS", 2.5 * made.on(None).members[0].flops_per_sample)
    (one,) = made.on("here").members
    assert one.hours == pytest.approx(60 * 8 / 3.0 / 3600)
    monkeypatch.setattr(plan, "_CPU_FLOPS", 2e11)
    (one,) = planner(f"run_dir={tmp_path}", "island.devices=2").on("here").members
    assert sizes == [2, 4], "each of two devices computes half of the batch"
    assert one.hours == pytest.approx(60 * 8 / (2 * 3.0) / 3600) and one.samples_per_second == 6.0


def test_what_does_not_fit_this_machine_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "free_bytes", lambda: 1e6)
    (one,) = planner(f"run_dir={tmp_path}").on("here").members
    assert (one.fits, one.hours) == (False, None)


@pytest.mark.parametrize(
    "settings",
    [
        ("condition.kind=class", "sample.prompts=[]"),
        (*PLAIN, "router.conditional=false"),
        (
            "prepare.caption_encoder={name: hashed-words, params: {size: 16, max_tokens: 5}}",
            "condition.kind=tokens+text",
        ),
        ("island.precision=bf16-mixed", "router.train.optimizer=muon", "island.micro_batch_size=3"),
    ],
)
def test_every_kind_of_member_can_be_measured(tmp_path, monkeypatch, settings):
    slowed(monkeypatch, 0.0)
    made = planner(f"run_dir={tmp_path}", *settings, members=("expert-0", "router"))
    adapters = replace(made.members[0], lora=LoraConfig(rank=2, target_modules=["qkv"]))
    for member in (*made.members, adapters):
        assert measure.samples_per_second(member, made.experiment.island) > 10


def test_a_student_needs_its_teacher(tmp_path):
    with pytest.raises(UserError, match="student: cannot be measured, as its teacher is not trained yet; name a GPU"):
        planner(f"run_dir={tmp_path}", members=("student",)).on("here")


def test_large_and_small_figures_are_written_out(tmp_path, capsys):
    settings = (*PLAIN, *GPU, "expert.train.global_batch_size=65536", "expert.train.max_steps=1")
    arguments = ["-c", str(TINY), f"run_dir={tmp_path}", *settings, "--only", "expert-0"]
    assert main(["plan", *arguments, "--device", "B200", "--samples", "1000"]) == 0
    traffic, _, training = (
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(" expert-0 ")
    )
    assert re.fullmatch(r"\d+,\d{3}", traffic[-1])  # MB/s in
    assert training[-3:-1] == ["<", "0.1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "Abacus"], "unknown device 'Abacus'; known: B300, GB200"),
        (["--device", "name=X,tflops=1"], "key 'memory_gb' is missing; write it as name=MyGPU,tflops=120,memory_gb=24"),
        (["--device", "here"], "key 'island.devices' = 1 with 'island.accelerator' = 'gpu', but torch sees 0"),
        (["--prices", "{prices}"], "key 'H100' = -1: must be at least 0"),
        (["--prices", "{unknown}"], "prices.yaml: unknown device 'Abacus'"),
        (["--prices", "nowhere.yaml"], "nowhere.yaml: no such file or folder; write lines such as 'H100: 2.50'"),
        (["--mfu", "1.5"], "--mfu 1.5: gives no share"),
        (["--mfu", "nowhere.json"], "nowhere.json: a result of benchmarks/mfu.py is missing"),
        (["--samples", "0"], "--samples 0: must be at least 1"),
        (["--only", "expert-9"], "--only=expert-9: unknown member"),
        (
            [
                "prepare.image_encoder={name: diffusers-vae, params: {path: nowhere}}",
                "expert.network.params.patch_size=3",
            ],
            "(sizes of the data: assumed: Stable Diffusion's latents",
        ),
        (
            ["prepare.images.size=8", "prepare.images.buckets=[[8, 8], [8, 10]]"],
            "expert 'dit' takes no images of 8x10 pixels (patch_size = 4 must divide the 8x10 cells of a sample)",
        ),
        (
            [
                "prepare.image_encoder={name: diffusers-vae, params: {path: nowhere}}",
                "prepare.images={size: 64, buckets: [[64, 64], [32, 120]]}",
            ],
            "expert 'dit' takes no images of 32x120 pixels (patch_size = 4 must divide the 4x15 cells of a sample)",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(arguments, words, tmp_path, capsys):
    files = {"{prices}": "H100: -1\n", "{unknown}": "Abacus: 1\n"}
    for name, text in files.items():
        if name in arguments:
            (tmp_path / "prices.yaml").write_text(text)
            arguments = [str(tmp_path / "prices.yaml") if one == name else one for one in arguments]
    assert main(["plan", "-c", str(TINY), f"run_dir={tmp_path / 'run'}", *GPU, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and words in captured.err and captured.out == ""
