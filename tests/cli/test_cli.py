"""The command line: its help, its overrides, and what each command prints and leaves on the tiny run."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tiny_runs import MEMBERS, ROOT, STEPS, TINY, copy_run, settings

from ddm_lightning import __version__
from ddm_lightning.cli import parser
from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.members.member import parse_members

HELP = Path(__file__).with_name("help.txt")
FEW = "sample.num_steps=4"
COMMANDS = (
    *("prepare", "fit", "launch", "plan", "status", "sample", "demo", "evaluate", "diagnose"),
    *("replay", "ema", "export", "config"),
)
CHANGES = ("ensemble", "ensemble add", "ensemble remove", "ensemble replace")


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command that ends well prints to stdout."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert code == 0, (code, out, err)
    return out


def help_text(capsys: pytest.CaptureFixture[str]) -> str:
    texts = []
    for command in ("", *COMMANDS, *CHANGES):
        with pytest.raises(SystemExit) as caught:
            main([*command.split(), "--help"])
        assert caught.value.code == 0
        texts.append(f"$ {' '.join(['ddm_lightning', *command.split(), '--help'])}\n")
        texts.append(capsys.readouterr().out + "\n")
    return "".join(texts)


def test_the_help_is_the_frozen_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the command line has to be meant; to freeze it anew: FREEZE_HELP=1 pytest tests/cli/test_cli.py."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(parser.STRATEGIES, "names", lambda: ["even", "odd"])
    text = help_text(capsys)
    if os.environ.get("FREEZE_HELP"):
        HELP.write_text(text, encoding="utf-8")
    assert unified(text) == unified(HELP.read_text(encoding="utf-8"))


def unified(text: str) -> str:
    """Without what differs between the Pythons: 3.13 names an option's value once."""
    return re.sub(r"\s+", " ", text.replace("-c FILE, --config FILE", "-c, --config FILE"))


def test_help_version_and_schema_wait_for_neither_torch_nor_lightning() -> None:
    code = """
import sys
from ddm_lightning.cli.parser import main
for arguments in ("--help", "fit --help", "sample --help", "--version", "config --describe"):
    try:
        main(arguments.split())
    except SystemExit:
        heavy = {"torch", "lightning", "streaming", "torchvision"}
        heavy |= set() if "describe" in arguments else {"numpy", "omegaconf"}
        if heavy & set(sys.modules):
            sys.exit(f"{arguments} imported {heavy & set(sys.modules)}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ddm_lightning") == 3 and f"\nddm_lightning {__version__}\n" in done.stdout


def test_config_prints_what_fit_would_use_as_an_experiment_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    overrides = [f"run_dir={tmp_path / 'run'}", "seed=7", "expert.train.learning_rate=1e-3"]
    printed = called(capsys, "config", "-c", TINY, *overrides)
    assert yaml.safe_load(printed) == asdict(load_experiment(TINY, overrides))
    assert yaml.safe_load(printed)["sample"]["guidance_scale"] == 1.0  # a default
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "resolved.yaml").write_text(printed, encoding="utf-8")
    assert load_experiment(tmp_path / "resolved.yaml") == load_experiment(TINY, overrides)


@pytest.mark.parametrize(
    "order",
    [
        "seed=3 name=n -c FILE",
        "-c FILE seed=3 name=n",
        "seed=3 -c FILE name=n",
        "name=m seed=2 -c FILE seed=3 name=n",
        "--config FILE seed=3 name=n",
    ],
)
def test_overrides_stand_anywhere_and_the_last_wins(capsys: pytest.CaptureFixture[str], order: str) -> None:
    printed = yaml.safe_load(called(capsys, "config", *order.replace("FILE", str(TINY)).split()))
    assert (printed["seed"], printed["name"]) == (3, "n")


def test_a_missing_command_or_file_is_told_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["fit"], ["train", "-c", str(TINY)]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage: ddm_lightning" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        *(f"{command} -c f" for command in COMMANDS if command != "export"),
        "export -c f --to ensemble --out o",
        "ensemble remove a b --out c",
    ],
)
def test_ctrl_c_promises_to_resume_only_what_resumes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parser, "_run", interrupted)
    assert main(command.split()) == 130
    resumes = command.startswith(("prepare", "fit", "evaluate"))
    assert capsys.readouterr().err == f"interrupted{'; run the same command again to resume' * resumes}\n"


# Commands on runs.


@pytest.mark.parametrize("command", ["sample --prompt disc", "diagnose --num 12", "evaluate evaluate.num_images=20"])
def test_a_log_shows_that_a_long_command_goes_on(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    finished_run: Path,
    tmp_path: Path,
    command: str,
) -> None:
    monkeypatch.setattr("ddm_lightning.core.formatting.LINE_SECONDS", 0.01)
    run = copy_run(finished_run, tmp_path / "run")
    name, *more = command.split()
    few = [FEW, "evaluate.metrics=[{name: kid, params: {features: pixels}}]"]
    assert main([name, *settings(run), *few, *more]) == 0
    assert re.search(r"^[\w, ]+: \d+ of \d+", capsys.readouterr().err, re.MULTILINE)


def test_prepare_names_its_results_and_the_next_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = called(capsys, "prepare", *settings(run))
    for name in ("shards", "clusters.png", "report/report.html"):
        path = run / "prepared" / name
        assert str(path) in out
        assert path.exists()
    assert f"next: python -m ddm_lightning fit {shlex.join(settings(run))}\n" in out
    assert "up to date" in called(capsys, "prepare", *settings(run))
    table = called(capsys, "status", *settings(run))
    for member, steps in STEPS.items():
        assert re.search(rf"^ ?{member} +waiting +0/{steps} +– +– +– +0:00 +–", table, re.MULTILINE), table


def test_the_first_fit_names_everything_that_it_left(finished_run: Path) -> None:
    out = finished_run.with_suffix(".out").read_text(encoding="utf-8")
    for line in (
        f"ensemble: {finished_run / 'ensemble.json'}",
        f"samples: {finished_run / 'samples' / 'top-1.png'}",
        f"clusters: {finished_run / 'prepared' / 'clusters.png'}",
        f"next: python -m ddm_lightning sample {shlex.join(settings(finished_run))} --prompt …",
        f"curves: tensorboard --logdir {finished_run}",
    ):
        assert line in out.splitlines()
    assert Path(finished_run / "samples" / "top-1.png").exists()
    assert finished_run.with_suffix(".err").read_text(encoding="utf-8") == ""


def test_status_after_the_run(capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path) -> None:
    run = copy_run(finished_run, tmp_path / "run")
    table = called(capsys, "status", *settings(run))
    for member in MEMBERS:
        steps = STEPS[member]
        accuracy = r"\d+\.\d%" if member == "router" else "–"
        row = rf"^ ?{member} +done +{steps}/{steps} +\d\.\d{{4}} +\d\.\d{{4}} +{accuracy} +\d+:\d\d +\d+"
        assert re.search(row, table, re.MULTILINE), table
    assert f"curves: tensorboard --logdir {run}" in table
    assert "monolith" not in table


def test_a_command_sets_up_torch_for_the_islands_device(
    capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path, torch_settings: None
) -> None:
    run = copy_run(finished_run, tmp_path / "run")
    for accelerator, precision in (("cpu", "highest"), ("gpu", "high")):
        called(capsys, "status", *settings(run), f"island.accelerator={accelerator}", "island.num_threads=2")
        assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == (precision, 2)


def test_a_second_fit_does_nothing_and_says_so(
    capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_run(finished_run, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.suffix != ".json"}
    modified = (run / "samples" / "top-1.png").stat().st_mtime_ns

    def start(*_: object) -> None:
        raise AssertionError("a member was started")

    monkeypatch.setattr("ddm_lightning.islands.local._start", start)
    out = called(capsys, "fit", *settings(run))
    assert "up to date" in out
    assert "all members are finished and their samples are there: nothing to do" in out
    assert (run / "samples" / "top-1.png").stat().st_mtime_ns == modified
    assert {path: path.read_bytes() for path in before} == before
    assert main(["fit", *settings(run), "member=expert-0"]) == 0
    assert capsys.readouterr().err == f"expert-0 is finished: {run / 'members' / 'expert-0' / 'artifact'}\n"


def test_artifacts_beside_a_manifest_are_assembled_without_the_source(
    capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "prepared").mkdir(parents=True)
    shutil.copy(finished_run / "prepared" / "manifest.json", run / "prepared")
    for member in MEMBERS:
        shutil.copytree(finished_run / "members" / member / "artifact", run / "members" / member / "artifact")

    def prepare(*_: object, **__: object) -> None:
        raise AssertionError("something was prepared")

    monkeypatch.setattr("ddm_lightning.prepare.stages.prepare", prepare)
    called(capsys, "fit", *settings(run))
    assert (run / "ensemble.json").read_bytes() == (finished_run / "ensemble.json").read_bytes()
    image = (run / "samples" / "top-1.png").read_bytes()
    assert image == (finished_run / "samples" / "top-1.png").read_bytes()


def test_captions_are_listed_and_searched_in_any_case(
    capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path
) -> None:
    every = called(capsys, "sample", *settings(finished_run), "--captions", "").splitlines()
    assert every == sorted(set(every)) and {"red disc", "blue square"} <= set(every)
    found = called(capsys, "sample", *settings(finished_run), "--captions", "RED d").splitlines()
    assert found == [text for text in every if "red d" in text]
    assert main(["sample", *settings(finished_run), "--captions", "zzz"]) == 2
    assert "--captions 'zzz': no caption contains it; give another word, or '' for all" in capsys.readouterr().err
    run = copy_run(finished_run, tmp_path / "run")
    for name in ("parts.json", "index.json"):
        (run / "prepared" / name).unlink()
        assert main(["sample", *settings(run), "--captions", "red"]) == 2
        assert f"{name}: is missing; search for captions on the machine that" in capsys.readouterr().err


def test_sample_names_the_solver_that_another_strategy_keeps(
    capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path
) -> None:
    keeps = ["sample.strategy=bayes", "sample.solver=ancestral", FEW, "--out", tmp_path / "a.png", "--num", 1]
    printed = called(capsys, "sample", *settings(finished_run), *keeps, "--strategy", "top-1")
    assert "\nsettings: top-1, ancestral, " in printed


def samples(path: Path) -> str:
    """What ``sample`` prints of the grid ``path``."""
    stem = path.with_suffix("")
    return f"samples: {path}\nsingle images: {stem}\nweights: {stem}-weights.png\ntrajectory: {stem}-trajectory.png\n"


def sampled(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What ``sample`` prints, after checking its lines of the settings and the cost."""
    *lines, of_settings, cost = called(capsys, "sample", *arguments).splitlines(keepends=True)
    assert re.fullmatch(r"settings: [\w-]+, [\w+]+, \d+ steps, guidance [\d.]+\n", of_settings)
    assert re.fullmatch(r"cost: [\d.e+-]+ GFLOP per image, \d\.\d\d active experts on average\n", cost)
    return "".join(lines)


def test_sample_draws_a_row_a_prompt(capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path) -> None:
    sizes = {}
    for strategy, num, prompts in (("full", 2, ["red disc"]), ("top-k", 9, ["red disc", "a cross"])):
        path = tmp_path / f"{strategy}.png"
        options = [text for prompt in prompts for text in ("--prompt", prompt)]
        arguments = [*settings(finished_run), FEW, *options, "--strategy", strategy, "--num", num, "--out", path]
        assert sampled(capsys, *arguments) == samples(path)
        assert len(list(path.with_suffix("").iterdir())) == num * len(prompts)
        with Image.open(path) as image:
            sizes[strategy] = image.size
            assert len(np.unique(np.asarray(image).reshape(-1, 3), axis=0)) > 50
    assert all(larger > smaller for larger, smaller in zip(sizes["top-k"], sizes["full"], strict=True))


def test_sample_without_options_draws_the_experiments_grid_into_the_run(
    capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path
) -> None:
    run = copy_run(finished_run, tmp_path / "run")
    grid = run / "samples" / "top-1.png"
    as_fit_drew_it = grid.read_bytes()
    grid.unlink()
    assert sampled(capsys, *settings(run)) == samples(grid)
    assert grid.read_bytes() == as_fit_drew_it
    assert sampled(capsys, *settings(run), "--strategy", "full") == samples(run / "samples" / "full.png")


def test_one_member_alone_is_what_the_oracle_of_its_cluster_samples(
    capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path
) -> None:
    run, images = copy_run(finished_run, tmp_path / "run"), []
    few = [*settings(run), FEW, "--prompt", "red disc", "--num", "2", "--out"]
    for name, more in {"oracle": ["--strategy", "oracle", "sample.strategy_params.cluster=1"], "expert-1": []}.items():
        sampled(capsys, *few, tmp_path / f"{name}.png", *(more or [f"sample.member={name}"]))
        images.append([path.read_bytes() for path in sorted((tmp_path / name).iterdir())])
    assert images[0] == images[1] and len(images[0]) == 2
    refusals = {"expert-9": "unknown member", "all": "unknown member", "monolith": "does not exist yet"}
    for member, words in refusals.items():
        assert main(["sample", *settings(run), f"sample.member={member}"]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["top-1", "bayes"])
def test_an_image_of_a_prompt_is_the_same_whatever_its_neighbours(
    capsys: pytest.CaptureFixture[str],
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
) -> None:
    def drawn(out: str, *more: object) -> np.ndarray:
        arguments = [*settings(finished_run), FEW, "--strategy", strategy, "--out", tmp_path / f"{out}.png", *more]
        called(capsys, "sample", *arguments)
        return np.stack([np.asarray(Image.open(path)) for path in sorted((tmp_path / out).glob("*-red-disc-*.png"))])

    alone = drawn("alone", "--prompt", "red disc", "--num", 2)
    monkeypatch.setattr("ddm_lightning.use.ensemble.BATCH_SIZE", 4)
    among = drawn("among", "--prompt", "a cross", "--prompt", "red disc", "--prompt", "a box", "--num", 3)
    assert alone.shape[0] == 2 and among.shape[0] == 3
    assert np.abs(alone.astype(int) - among[:2]).max() <= 1  # a rounding of 256 values
    assert np.abs(alone[0].astype(int) - alone[1]).max() > 20
    for more in (("red disc", "--seed", 1), ("red-disc",)):
        other = drawn(f"other-{len(more)}", "--num", 2, "--prompt", *more)
        assert np.abs(alone.astype(int) - other).max() > 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "top-p", "sample.strategy_params.p=2"], "p = 2"),
        (["--strategy", "bayes", "sample.solver=heun"], "add sample.solver=ancestral"),
    ],
)
def test_settings_beside_another_strategy_count(
    capsys: pytest.CaptureFixture[str], finished_run: Path, arguments: list[str], words: str
) -> None:
    assert main(["sample", *settings(finished_run), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_grid_written_again_leaves_no_images_of_the_first(
    capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path
) -> None:
    for num in (2, 1):
        options = ["sample.num_steps=1", "--prompt", "red disc", "--num", num, "--out", tmp_path / "a.png"]
        called(capsys, "sample", *settings(finished_run), *options)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["000-red-disc-0000.png"]


def test_out_may_be_a_folder(capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        sheet = tmp_path / "new" / f"top-1-00{number}.png"
        options = ["--prompt", "red disc", "--num", 1, "--out", tmp_path / "new"]
        assert sampled(capsys, *settings(finished_run), "sample.num_steps=1", *options) == samples(sheet)
        assert [path.name for path in sheet.with_suffix("").iterdir()] == ["000-red-disc-0000.png"]


def test_a_run_is_addressed_without_repeating_its_overrides(
    capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path
) -> None:
    run = copy_run(finished_run, tmp_path / "run")
    shutil.move(run, tmp_path / "moved")  # the record names the old place
    run = tmp_path / "moved"
    for address in (["-c", TINY, f"run_dir={run}"], ["-c", run / "experiment.yaml"]):
        assert f"{STEPS['expert-0']}/{STEPS['expert-0']}" in called(capsys, "status", *address)
        sheet = run / "samples" / "top-1.png"
        assert sampled(capsys, *address) == samples(sheet)
        assert main(["sample", *map(str, address), "seed=5"]) == 2
        line = capsys.readouterr().err
        assert (
            line.startswith(f"error: {run / 'experiment.yaml'}: the experiment changed since")
            and "seed (was 0)" in line
        )
        assert main(["replay", *map(str, address), "member=expert-0"]) == 2
        assert "steps of rank 0 that were skipped: none" in capsys.readouterr().err


def test_what_is_drawn_besides_takes_a_file_of_its_own(
    capsys: pytest.CaptureFixture[str], finished_run: Path, tmp_path: Path
) -> None:
    run = copy_run(finished_run, tmp_path / "run")
    grid = (run / "samples" / "top-1.png").read_bytes()
    drawn = (("--prompt", "red disc"), ("--num", 2), ("--prompt", "red disc"), ("sample.prompts=[blue square]",))
    for number, more in enumerate(drawn, 1):
        path = run / "samples" / f"top-1-00{number}.png"
        assert sampled(capsys, *settings(run), FEW, *more) == samples(path)
    first, third = ((run / "samples" / f"top-1-00{number}.png").read_bytes() for number in (1, 3))
    assert first == third != grid
    assert (run / "samples" / "top-1.png").read_bytes() == grid


def test_the_installed_command_is_the_same() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("ddm-lightning"), "config", "-c", TINY, "seed=9"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["seed"] == 9


@pytest.mark.parametrize("variables", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "latin-1"}], ids=str)
def test_an_output_that_is_not_utf_8_shows_question_marks(variables: dict[str, str]) -> None:
    command = [sys.executable, "-m", "ddm_lightning", "config", "--describe"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **variables}, check=False)
    assert done.returncode == 0, done.stderr
    assert b"`bayes` ? (`sample --help`" in done.stdout


@pytest.mark.parametrize(
    ("line", "expected"), [("dia", {"diagnose"}), ("sample --st", {"--strategy"}), ("export --to d", {"diffusers"})]
)
def test_a_shell_completes_commands_and_options(tmp_path: Path, line: str, expected: set[str]) -> None:
    line = f"ddm-lightning {line}"
    shell = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    out = tmp_path / "completions"
    environment = {**os.environ, **shell, "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    subprocess.run([Path(sys.executable).with_name("ddm-lightning")], env=environment, check=True)
    assert {word.strip() for word in out.read_text(encoding="utf-8").splitlines()} == expected


def documented_commands() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    found = [line[line.index("python -m ddm_lightning") :] for line in lines if "python -m ddm_lightning " in line]
    return [command.partition("  #")[0].rstrip() for command in found if " -c " in command]


def test_the_documents_show_every_command() -> None:
    assert {shlex.split(command)[3] for command in documented_commands()} == set(COMMANDS)


@pytest.mark.parametrize("command", documented_commands())
def test_a_command_of_the_documents_is_one(command: str) -> None:
    options = parser._parse(shlex.split(command)[3:])
    overrides = [text for text in options.overrides if not text.startswith("member=")]
    is_file = options.config.endswith(".yaml")  # else a folder or a URL
    experiment = load_experiment(ROOT / (options.config if is_file else "experiments/emoji_4x.yaml"), overrides)
    for text in set(options.overrides) - set(overrides):
        assert parse_members(text.removeprefix("member="), experiment)


def test_describe_prints_every_key_with_type_default_and_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["config", "--describe"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for lines in (
        "seed: int = 0, from 0 to 9223372036854775807\n    Seed of the partition, ",
        "name: str, required, the name of a folder: letters, digits, '_', '-' and '.' only\n    Name of the experiment",
        "expert.train.max_steps: int, required, at least 0\n    Optimizer steps; 0 hands over the initial weights.\n",
        "expert.train.gradient_clip_norm: float | null = 1.0, at least 1e-12\n",
        "prepare.caption_encoder.name: str, required\n",
        "expert.network.params: dict[str, Any] = {}\n",
        'router.timesteps.density: str = "uniform", one of logit-normal, uniform\n    `logit-normal` or `uniform`.\n',
        "existing` (the clusters of another run, for new data).\n",  # a second line
        "\nisland:\n    Machine that trains a member.\n",
    ):
        assert lines in text

    def keys(value: object, prefix: str) -> Iterator[str]:
        for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
            yield from keys(getattr(value, field.name), f"{prefix}.{field.name}")
        yield prefix[1:]

    printed = [line.partition(":")[0] for line in text.splitlines() if line and not line.startswith(" ")]
    of_null = {key for key in printed if key.startswith("expert.network.lora.")}
    assert set(keys(load_experiment(TINY), "")) - {""} == set(printed) - of_null
    assert len(printed) == len(set(printed))
