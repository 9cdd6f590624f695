"""The plan of a run: its figures by hand, what does not fit, and bad input."""

import json
import re
from dataclasses import replace

import pytest
from tiny_runs import TINY

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.config.merge import island_of
from ddm_lightning.encoders.images import Pixels
from ddm_lightning.islands import plan
from ddm_lightning.members.cost import MemberCost, chosen_strategy
from ddm_lightning.members.member import Member

GPU = ("island.accelerator=gpu", "island.precision=bf16-mixed")
PLAIN = ("condition.kind=none", "sample.prompts=[]")


def network(width, depth):
    return f"expert.network={{name: dit, params: {{width: {width}, depth: {depth}, num_heads: 2, patch_size: 4}}}}"


def planner(*overrides, members=("expert-0",), mfu=None, prices=(), samples=None):
    experiment = load_experiment(TINY, overrides)
    return plan.Planner(experiment, members, plan.data_of(experiment, samples), plan.rates_of(mfu, prices))


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
    before = plan.data_of(load_experiment(TINY, [f"run_dir={tiny_run.parent / 'none'}"]))
    after = plan.data_of(load_experiment(TINY, [f"run_dir={tiny_run}"]))
    assert before.sample_bytes == after.sample_bytes
    assert sum(before.num_samples) == pytest.approx(sum(after.num_samples), abs=8)
    sizes = ("x_shape", "text_size", "token_shape", "num_classes")
    assert [getattr(before.sizes, name) for name in sizes] == [getattr(after.sizes, name) for name in sizes]


def test_flips_and_deviations_are_stored_beside_the_images(tmp_path, monkeypatch):
    def stored(*overrides):
        return plan.data_of(load_experiment(TINY, [f"run_dir={tmp_path}", *overrides])).sample_bytes

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
    return cost.memory(island, chosen_strategy(island, cost.state, num_bytes)).peak


def test_too_many_samples_at_once_are_halved_until_they_fit(tmp_path):
    settings = (*GPU, f"run_dir={tmp_path}", "expert.train.global_batch_size=4194304")
    made = planner(*settings)
    found = made.with_suggestions(made.on("RTX 3090"))
    (line,) = found.warnings()
    assert line.startswith("expert-0: does not fit: ") and "devices=1 strategy=single micro_batch_size=" in line
    setting = found.members[0].suggestion
    exact = [peak_of(setting, made.experiment, n * setting.micro_batch_size, 24e9, made.data) for n in (1, 2)]
    assert exact[0] == pytest.approx(setting.peak, rel=0.02)
    assert exact[0] <= 0.9 * 24e9 < exact[1]


def test_weights_too_large_for_a_device_are_sharded_over_as_few_as_hold_them(tmp_path):
    """1.8 billion parameters: 36 GB of state, half of which leaves room for two gathered blocks, but not for all."""
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
    larger = planner(*GPU, *PLAIN, network(16384, 6), f"run_dir={tmp_path}")
    assert "use a larger device" in next(larger.with_suggestions(larger.on("RTX 3090")).warnings())


def test_a_tenth_of_a_device_is_left_free(tmp_path, monkeypatch):
    made = planner(*GPU, f"run_dir={tmp_path}")
    least = made.on("RTX 3090").members[0].memory.peak / 0.9
    for num_bytes, fits in ((least + 1, True), (least - 1, False)):
        monkeypatch.setattr(plan, "known_device", lambda _, num_bytes=num_bytes: ("RTX 3090", num_bytes))
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


def test_large_and_small_figures_are_written_out(tmp_path, capsys):
    settings = (*PLAIN, *GPU, "expert.train.global_batch_size=65536", "expert.train.max_steps=1")
    arguments = ["-c", str(TINY), f"run_dir={tmp_path}", *settings, "--only", "expert-0"]
    assert main(["plan", *arguments, "--device", "B200", "--samples", "1000"]) == 0
    traffic, _, training = (line.split() for line in capsys.readouterr().out.splitlines() if " expert-0 " in line)
    assert re.fullmatch(r"\d+,\d{3}", traffic[-1])  # MB/s in
    assert training[-3:-1] == ["<", "0.1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "Abacus"], "unknown device 'Abacus'; known: GB200"),
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
