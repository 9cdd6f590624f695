"""Experts trained as adapters on a tiny monolith: what they learn, hand over and share."""

import json
import re
import shutil

import pytest
import torch
from artifact_files import edit
from safetensors.torch import load_file
from tiny_runs import TINY, copy_run, finish, start

from ddm_lightning.cli.parser import main
from ddm_lightning.use.ensemble import DecentralizedEnsemble

ADAPTERS = "expert.network.lora={rank: 2, target_modules: [attention.qkv, modulation, final.out]}"
QUICK = ("expert.train.max_steps=20", "island.checkpoint_every_n_steps=10", "island.validate_every_n_steps=20")
BAYES = ("sample.strategy=bayes", "sample.solver=ancestral", "sample.num_steps=3")


def fit(run, name, *more):
    return main(["fit", "-c", str(TINY), f"run_dir={run}", f"member={name}", *QUICK, *more])


def artifact(run, name, file="model.safetensors"):
    return run / "members" / name / "artifact" / file


def meta(run, name):
    return json.loads(artifact(run, name, "member.json").read_text())


@pytest.fixture(scope="module")
def base(tiny_prepared, tmp_path_factory):
    """Artifact of a monolith."""
    run = tmp_path_factory.mktemp("base") / "run"
    shutil.copytree(tiny_prepared, run / "prepared")

    assert fit(run, "monolith", "expert.train.learning_rate=1e-2") == 0

    return artifact(run, "monolith").parent


@pytest.fixture(scope="module")
def run(tiny_prepared, base, tmp_path_factory):
    """A run of two finished experts on it, and its store."""
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(tiny_prepared, folder / "run" / "prepared")
    own = (ADAPTERS, f"expert.init_from={base}", "expert.train.learning_rate=2e-2", f"remote={folder / 'store'}")

    assert main(["prepare", "-c", str(TINY), f"run_dir={folder / 'run'}", *QUICK, *own]) == 0

    for name in ("expert-0", "expert-1"):
        assert fit(folder / "run", name, *own) == 0

    return folder / "run", own


def test_an_artifact_holds_the_adapter_and_the_hash_of_the_base(run, base):
    folder, _ = run
    metas = [meta(folder, name) for name in ("expert-0", "expert-1")]
    modules = ["attention.qkv", "modulation", "final.out"]

    assert metas[0]["lora"] == {"rank": 2, "alpha": None, "target_modules": modules}

    expected = json.loads((base / "member.json").read_text())["model_sha256"]
    assert {meta["init_sha256"] for meta in metas} == {expected}

    for place in (folder, folder.parent / "store"):
        kept = place / "initial" / expected / "model.safetensors"
        assert kept.read_bytes() == (base / "model.safetensors").read_bytes()

    weights = load_file(artifact(folder, "expert-0"))

    assert {name.split(".lora_")[0].rpartition(".")[2] for name in weights} == {"qkv", "modulation", "out"}

    checkpoint = max((folder / "members" / "expert-0" / "checkpoints").iterdir())
    tensors = [name for file in checkpoint.glob("*.safetensors") for name in load_file(file)]

    assert len(tensors) == 5 * len(weights) and all(".lora_" in name for name in tensors)


def test_an_adapter_starts_as_its_base_and_learns_its_cluster(run, tiny_run):
    folder, own = run
    still = ("expert.train.learning_rate=1e-12", "expert.train.max_steps=1", "island.validate_every_n_steps=1")

    assert fit(tiny_run, "expert-0", *own[:-1], *still) == 0

    losses = [meta(place, "expert-0")["metrics"]["held_out/loss"] for place in (tiny_run, folder)]
    assert losses[1] < losses[0] - 0.02


def test_fit_refuses_an_adapter_of_another_base(run, tmp_path, capsys):
    folder, own = run
    copy = copy_run(folder, tmp_path / "copy")
    edit(artifact(copy, "expert-1", "member.json"), init_sha256="cd" * 32)

    assert fit(copy, "expert-0", *own, "remote=null") == 0

    capsys.readouterr()
    assert fit(copy, "expert-1", *own, "remote=null") == 2
    assert (
        f"artifact: has init_sha256 = '{'cd' * 32}' in member.json, and the experiment asks for"
        in capsys.readouterr().err
    )


def test_every_place_gives_the_same_images(run, tmp_path):
    folder, own = run
    grids = []
    for number, place in enumerate([folder, tmp_path / "reader"]):
        grids.append(tmp_path / f"{number}.png")
        where = ["-c", str(TINY), f"run_dir={place}", *QUICK, *own, *BAYES]
        assert main(["sample", *where, "--prompt", "red disc", "--num", "2", "--out", str(grids[-1])]) == 0

    assert main(["export", *where, "--to", "ensemble", "--out", str(tmp_path / "saved")]) == 0
    assert main(["export", *where, "--to", "peft", "--out", str(tmp_path / "peft")]) == 0

    written = {path.name for path in (tmp_path / "peft" / "expert-1").iterdir()}
    assert written == {"adapter_config.json", "adapter_model.safetensors"}

    grids.append(tmp_path / "2.png")
    saved = ["-c", str(tmp_path / "saved"), *BAYES, "--prompt", "red disc", "--num", "2"]

    assert main(["sample", *saved, "--out", str(grids[-1])]) == 0
    assert len({grid.read_bytes() for grid in grids}) == 1

    first, second = DecentralizedEnsemble.from_pretrained(tmp_path / "saved").field.experts
    shared = {tensor.data_ptr() for tensor in first.buffers()} & {tensor.data_ptr() for tensor in second.buffers()}

    assert len(shared) >= len(load_file(next(folder.glob("initial/*/model.safetensors"))))


def test_a_resumed_adapter_has_the_same_weights(run, tiny_run):
    folder, own = run
    for steps in (10, 20):
        assert fit(tiny_run, "expert-0", *own[:-1], f"expert.train.max_steps={steps}") == 0

    torch.testing.assert_close(
        load_file(artifact(tiny_run, "expert-0")), load_file(artifact(folder, "expert-0")), rtol=0, atol=0
    )


@pytest.mark.parametrize("setting", ["expert.train.optimizer=muon", "island.precision=bf16-true"])
def test_settings_train_adapters_and_ema_widths_choose_among_their_averages(run, tiny_run, capsys, setting):
    _, own = run
    more = (*own[:-1], setting, "expert.train.ema_widths=[0.1, 0.2]")

    assert fit(tiny_run, "expert-0", *more) == 0

    before = load_file(artifact(tiny_run, "expert-0"))
    capsys.readouterr()
    arguments = ["ema", "-c", str(TINY), f"run_dir={tiny_run}", "member=expert-0", *QUICK, *more]

    assert main([*arguments, "--width", "0.1"]) == 0

    told = re.search(r"width 0\.1 +([\d.]+)", capsys.readouterr().out)
    assert main([*arguments, "--use", "0.1"]) == 0

    after = load_file(artifact(tiny_run, "expert-0"))
    metrics = meta(tiny_run, "expert-0")["metrics"]

    assert metrics["ema_width"] == 0.1 and metrics["held_out/loss"] == pytest.approx(float(told[1]), abs=1e-5)
    assert after.keys() == before.keys() and all(".lora_" in name for name in after)
    assert not torch.equal(after[min(after)], before[min(after)])


@pytest.mark.long
def test_two_ranks_resume_an_adapter_to_the_same_weights(run, tiny_prepared, tmp_path):
    _, own = run
    found = []
    for name, steps in {"resumed": (10, 20), "straight": (20,)}.items():
        shutil.copytree(tiny_prepared, tmp_path / name / "prepared")
        for number in steps:
            ranks = (f"expert.train.max_steps={number}", "island.devices=2", "island.strategy=fsdp")
            finish(
                start("fit", tmp_path / name, *QUICK, *own[:-1], *ranks, "member=expert-0", "island.accelerator=cpu")
            )
        found.append(load_file(artifact(tmp_path / name, "expert-0")))

    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_the_monolith_is_an_adapter_too(run, tiny_run):
    folder, own = run

    assert fit(tiny_run, "monolith", *own[:-1], "expert.train.max_steps=2") == 0
    assert load_file(artifact(tiny_run, "monolith")).keys() == load_file(artifact(folder, "expert-0")).keys()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["expert.network.lora.target_modules=[qkv, to_q]"], ["to_q", "attention.qkv"]),
        (["expert.network.lora.rank=0"], ["expert.network.lora.rank", "at least 1"]),
        (["expert.init_from=null"], ["expert.network.lora", "init_from"]),
        (["expert.overrides.expert-1.init_from=other"], ["expert.overrides.expert-1", "adapters share one base"]),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny_run, base, capsys, more, words):
    capsys.readouterr()

    assert fit(tiny_run, "expert-0", f"expert.init_from={base}", ADAPTERS, *more) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words)
    assert not (tiny_run / "members").exists()
