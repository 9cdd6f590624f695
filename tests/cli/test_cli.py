"""The command line: its help, its overrides, and what each command prints and leaves on the tiny run."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tiny_runs import MEMBERS, ROOT, STEPS, TINY, settings

from ddm_lightning.cli import parser
from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.members.roles import parse_members

HELP = Path(__file__).with_name("help.txt")
INSTALLED = str(Path(sys.executable).with_name("ddm-lightning"))
FEW = "sample.num_steps=4"
COMMANDS = (
    *("prepare", "fit", "launch", "plan", "status", "sample", "demo", "evaluate", "diagnose"),
    *("replay", "ema", "export", "config"),
)
CHANGES = ("init", "ensemble", "ensemble add", "ensemble remove", "ensemble replace")


def test_the_help_is_the_frozen_one(capsys, monkeypatch):
    """A change of the command line has to be meant; to freeze it anew: FREEZE_HELP=1 pytest tests/cli/test_cli.py."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(parser.STRATEGIES, "names", lambda: ["even", "odd"])
    text = ""
    for command in ("", *COMMANDS, *CHANGES):
        words = [*command.split(), "--help"]
        with pytest.raises(SystemExit, match="0"):
            main(words)
        text += f"$ {' '.join(['ddm_lightning', *words])}\n{capsys.readouterr().out}\n"

    if os.environ.get("FREEZE_HELP"):
        HELP.write_text(text, encoding="utf-8")
    assert unified(text) == unified(HELP.read_text(encoding="utf-8"))


def unified(text):
    """Without what differs between the Pythons: 3.13 names an option's value once."""
    return re.sub(r"\s+", " ", text.replace("-c FILE, --config FILE", "-c, --config FILE"))


def test_help_and_schema_wait_for_neither_torch_nor_lightning():
    code = """
import sys
from ddm_lightning.cli.parser import main
for arguments in ("--help", "fit --help", "sample --help", "init", "config --describe"):
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
    assert done.stdout.count("usage: ddm_lightning") == 3


def test_config_prints_what_fit_would_use_as_an_experiment_file(called, tmp_path):
    overrides = [f"run_dir={tmp_path / 'run'}", "seed=7", "expert.train.learning_rate=1e-3"]

    printed = called("config", "-c", TINY, *overrides)

    assert list(tmp_path.iterdir()) == []
    assert yaml.safe_load(printed) == asdict(load_experiment(TINY, overrides))
    (tmp_path / "resolved.yaml").write_text(printed, encoding="utf-8")
    assert load_experiment(tmp_path / "resolved.yaml") == load_experiment(TINY, overrides)


@pytest.mark.parametrize(
    "order", ["seed=3 name=n -c FILE", "-c FILE seed=3 name=n", "name=m seed=2 --config FILE seed=3 name=n"]
)
def test_overrides_stand_anywhere_and_the_last_wins(called, order):
    printed = yaml.safe_load(called("config", *order.replace("FILE", str(TINY)).split()))
    assert (printed["seed"], printed["name"]) == (3, "n")


@pytest.mark.parametrize("words", ["", "fit", f"train -c {TINY}"])
def test_a_missing_command_or_file_is_told_with_the_usage(capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert "usage: ddm_lightning" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "resumes"),
    [
        *((f"{name} -c f", True) for name in ("prepare", "fit", "evaluate")),
        *((f"{name} -c f", False) for name in ("sample", "launch", "ema")),
        ("ensemble remove a b --out c", False),
    ],
)
def test_ctrl_c_promises_to_resume_only_what_resumes(capsys, monkeypatch, command, resumes):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(parser, "_run", interrupted)
    assert main(command.split()) == 130
    assert capsys.readouterr().err == f"interrupted{'; run the same command again to resume' * resumes}\n"


# Commands on runs.


@pytest.mark.parametrize("command", ["sample --prompt disc", "diagnose --num 6", "evaluate evaluate.num_images=8"])
def test_a_log_shows_that_a_long_command_goes_on(capsys, monkeypatch, run, command):
    monkeypatch.setattr("ddm_lightning.core.formatting.LINE_SECONDS", 0.01)
    name, *more = command.split()
    few = ["sample.num_steps=1", "evaluate.metrics=[{name: kid, params: {features: pixels}}]"]
    assert main([name, *settings(run), *few, *more]) == 0
    assert re.search(r"^[\w, -]+: \d+ of \d+", capsys.readouterr().err, re.MULTILINE)


def test_prepare_names_its_results_and_the_next_command(called, tmp_path):
    run = tmp_path / "run"

    out = called("prepare", *settings(run))

    for name in ("shards", "clusters.png", "report/report.html"):
        path = run / "prepared" / name
        assert str(path) in out
        assert path.exists()
    assert f"next: python -m ddm_lightning fit {shlex.join(settings(run))}\n" in out
    assert "up to date" in called("prepare", *settings(run))
    table = called("status", *settings(run))
    for member, steps in STEPS.items():
        assert re.search(rf"^ ?{member} +waiting +0/{steps} +– +– +– +0:00 +–", table, re.MULTILINE), table


def test_the_first_fit_names_everything_that_it_left(finished_run):
    out = finished_run.with_suffix(".out").read_text(encoding="utf-8")
    for line in (
        f"ensemble: {finished_run / 'ensemble.json'}",
        f"samples: {finished_run / 'samples' / 'top-1.png'}",
        f"clusters: {finished_run / 'prepared' / 'clusters.png'}",
        f"next: python -m ddm_lightning sample {shlex.join(settings(finished_run))} --prompt …",
        f"curves: tensorboard --logdir {finished_run}",
    ):
        assert line in out.splitlines()
    assert (finished_run / "samples" / "top-1.png").exists()
    assert finished_run.with_suffix(".err").read_text(encoding="utf-8") == ""


def test_status_after_the_run(called, run):
    table = called("status", *settings(run))

    for member in MEMBERS:
        steps = STEPS[member]
        accuracy = r"\d+\.\d%" if member == "router" else "–"
        row = rf"^ ?{member} +done +{steps}/{steps} +\d\.\d{{4}} +\d\.\d{{4}} +{accuracy} +\d+:\d\d +\d+"
        assert re.search(row, table, re.MULTILINE), table
    assert f"curves: tensorboard --logdir {run}" in table
    assert "monolith" not in table


@pytest.mark.parametrize(("accelerator", "precision"), [("cpu", "highest"), ("gpu", "high")])
def test_a_command_sets_up_torch_for_the_islands_device(called, run, accelerator, precision):
    called("plan", *settings(run), f"island.accelerator={accelerator}", "island.num_threads=2")
    assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == (precision, 2)


def unexpected(*_, **__):
    raise AssertionError("this was to be left as it is")


def test_a_second_fit_does_nothing_and_says_so(called, capsys, run, monkeypatch):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.suffix != ".json"}
    modified = (run / "samples" / "top-1.png").stat().st_mtime_ns
    monkeypatch.setattr("ddm_lightning.islands.local._start", unexpected)

    out = called("fit", *settings(run))

    assert "up to date" in out
    assert "all members are finished and their samples are there: nothing to do" in out
    assert (run / "samples" / "top-1.png").stat().st_mtime_ns == modified
    assert {path: path.read_bytes() for path in before} == before
    assert main(["fit", *settings(run), "member=expert-0"]) == 0
    assert capsys.readouterr().err == f"expert-0 is finished: {run / 'members' / 'expert-0' / 'artifact'}\n"


def test_captions_are_listed_and_searched_in_any_case(called, refuse, run):
    every = called("sample", *settings(run), "--captions", "").splitlines()
    found = called("sample", *settings(run), "--captions", "RED d").splitlines()

    assert every == sorted(set(every))
    assert {"red disc", "blue square"} <= set(every)
    assert found == [text for text in every if "red d" in text]
    line = refuse("sample", *settings(run), "--captions", "zzz")
    assert "--captions 'zzz': no caption contains it; give another word, or '' for all" in line
    for name in ("parts.json", "index.json"):
        (run / "prepared" / name).unlink()
        line = refuse("sample", *settings(run), "--captions", "red")
        assert f"{name}: is missing; search for captions on the machine that" in line


@pytest.fixture
def sampled(called):
    """Runs ``sample``; the grid that it wrote, after checking all that it prints."""

    def call(*arguments):
        *lines, of_settings, cost = called("sample", *arguments).splitlines()
        assert re.fullmatch(r"settings: [\w-]+, [\w+]+, \d+ steps, guidance [\d.]+", of_settings)
        assert re.fullmatch(r"cost: [\d.e+-]+ GFLOP per image, \d\.\d\d active experts on average", cost)
        grid = Path(lines[0].removeprefix("samples: "))
        stem = grid.with_suffix("")
        beside = [f"single images: {stem}", f"weights: {stem}-weights.png", f"trajectory: {stem}-trajectory.png"]
        assert lines[1:] == beside
        return grid

    return call


def images(grid):
    return [np.asarray(Image.open(path)).astype(int) for path in sorted(grid.with_suffix("").iterdir())]


def test_sample_names_the_solver_that_another_strategy_keeps(called, finished_run, tmp_path):
    keeps = ["sample.strategy=bayes", "sample.solver=ancestral", FEW, "--out", tmp_path / "a.png", "--num", 1]
    printed = called("sample", *settings(finished_run), *keeps, "--strategy", "top-1")
    assert "\nsettings: top-1, ancestral, " in printed


def test_sample_draws_a_row_a_prompt(sampled, finished_run, tmp_path):
    few = [*settings(finished_run), FEW, "--prompt", "red disc"]

    small = sampled(*few, "--strategy", "full", "--num", 2, "--out", tmp_path / "a.png")
    large = sampled(*few, "--prompt", "a cross", "--strategy", "top-k", "--num", 9, "--out", tmp_path / "b.png")

    assert (small, large) == (tmp_path / "a.png", tmp_path / "b.png")
    assert (len(images(small)), len(images(large))) == (2, 18)
    with Image.open(small) as one, Image.open(large) as other:
        assert other.width > one.width
        assert other.height > one.height
        assert len(np.unique(np.asarray(other).reshape(-1, 3), axis=0)) > 50


def test_sample_without_options_draws_the_experiments_grid_into_the_run(sampled, run):
    grid = run / "samples" / "top-1.png"
    as_fit_drew_it = grid.read_bytes()
    grid.unlink()

    assert sampled(*settings(run)) == grid

    assert grid.read_bytes() == as_fit_drew_it
    assert sampled(*settings(run), "--strategy", "full") == run / "samples" / "full.png"


def test_one_member_alone_is_what_the_oracle_of_its_cluster_samples(sampled, refuse, run, tmp_path):
    few = [*settings(run), FEW, "--prompt", "red disc", "--num", "2", "--out"]

    oracle = sampled(*few, tmp_path / "a.png", "--strategy", "oracle", "sample.strategy_params.cluster=1")
    alone = sampled(*few, tmp_path / "b.png", "sample.member=expert-1")

    assert np.array_equal(images(oracle), images(alone))
    refusals = {"expert-9": "unknown member", "all": "unknown member", "monolith": "does not exist yet"}
    for member, words in refusals.items():
        assert words in refuse("sample", *settings(run), f"sample.member={member}")


@pytest.mark.parametrize("strategy", ["top-1", "bayes"])
def test_an_image_of_a_prompt_is_the_same_whatever_its_neighbours(
    sampled, finished_run, tmp_path, monkeypatch, strategy
):
    few = [*settings(finished_run), "sample.num_steps=2", "--strategy", strategy, "--num", 2]

    alone = images(sampled(*few, "--prompt", "red disc", "--out", tmp_path / "a.png"))
    other_seed = images(sampled(*few, "--prompt", "red disc", "--seed", 1, "--out", tmp_path / "b.png"))
    monkeypatch.setattr("ddm_lightning.use.loaded.BATCH_SIZE", 3)
    prompts = ["--prompt", "a cross", "--prompt", "red disc", "--prompt", "red-disc"]
    cross, _, *among, other_text, _ = images(sampled(*few, *prompts, "--out", tmp_path / "c.png"))

    assert np.abs(np.subtract(alone, among)).max() <= 1  # a rounding of 256 values
    for other in (alone[1], other_seed[0], other_text, cross):
        assert np.abs(alone[0] - other).max() > 20


def test_a_grid_written_again_leaves_no_images_of_the_first_and_out_may_be_a_folder(sampled, finished_run, tmp_path):
    few = [*settings(finished_run), "sample.num_steps=1", "--prompt", "red disc"]

    for num in (2, 1):
        sampled(*few, "--num", num, "--out", tmp_path / "a.png")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["000-red-disc-0000.png"]

    for number in (1, 2):
        assert sampled(*few, "--num", 1, "--out", tmp_path / "new") == tmp_path / "new" / f"top-1-00{number}.png"


@pytest.mark.parametrize("by_record", [True, False], ids=["record", "file"])
def test_a_run_is_addressed_without_repeating_its_overrides(called, refuse, sampled, run, tmp_path, by_record):
    run = Path(shutil.move(run, tmp_path / "moved"))  # the record names the old place
    address = ["-c", run / "experiment.yaml"] if by_record else ["-c", TINY, f"run_dir={run}"]

    assert f"{STEPS['expert-0']}/{STEPS['expert-0']}" in called("status", *address)
    assert sampled(*address, FEW) == run / "samples" / "top-1-001.png"
    line = refuse("sample", *address, "seed=5")
    assert line.startswith(f"{run / 'experiment.yaml'}: the experiment changed since")
    assert "seed (was 0)" in line
    assert "steps of rank 0 that were skipped: none" in refuse("replay", *address, "member=expert-0")


def test_what_is_drawn_besides_takes_a_file_of_its_own(sampled, run):
    before = (run / "samples" / "top-1.png").read_bytes()
    prompt = ("--prompt", "red disc")

    grids = [sampled(*settings(run), FEW, *more) for more in (prompt, ("--num", 2), prompt, ("sample.prompts=[a]",))]

    assert [grid.name for grid in grids] == [f"top-1-00{number}.png" for number in (1, 2, 3, 4)]
    assert grids[0].read_bytes() == grids[2].read_bytes() != before
    assert (run / "samples" / "top-1.png").read_bytes() == before


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ([sys.executable, "-m", "ddm_lightning"], {"LC_ALL": "C", "PYTHONUTF8": "0"}),
        ([INSTALLED], {"PYTHONIOENCODING": "latin-1"}),
    ],
    ids=["module", "installed"],
)
def test_an_output_that_is_not_utf_8_shows_question_marks(command, variables):
    environment = {**os.environ, **variables}
    done = subprocess.run([*command, "config", "--describe"], capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert b"`bayes` ? (`sample --help`" in done.stdout


@pytest.mark.parametrize(("line", "expected"), [("dia", {"diagnose"}), ("export --to d", {"diffusers"})])
def test_a_shell_completes_commands_and_options(tmp_path, line, expected):
    line = f"ddm-lightning {line}"
    shell = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    out = tmp_path / "completions"
    environment = {**os.environ, **shell, "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    subprocess.run([INSTALLED], env=environment, check=True)
    assert {word.strip() for word in out.read_text(encoding="utf-8").splitlines()} == expected


def documented_commands():
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        found += re.findall(r"python -m ddm_lightning (.* -c .*?) *(?:  #.*)?$", page.read_text("utf-8"), re.MULTILINE)
    return found


def test_the_documents_show_every_command():
    assert {command.split()[0] for command in documented_commands()} == set(COMMANDS)


@pytest.mark.parametrize("command", documented_commands())
def test_a_command_of_the_documents_is_one(command):
    options = parser._parse(shlex.split(command))
    overrides = [text for text in options.overrides if not text.startswith("member=")]
    path = Path(options.config)  # or a folder or a URL; init writes files elsewhere
    name = path.name if path.suffix == ".yaml" else "emoji_4x.yaml"
    experiment = load_experiment(ROOT / "experiments" / name, overrides)
    for text in set(options.overrides) - set(overrides):
        assert parse_members(text.removeprefix("member="), experiment)


def keys(value, prefix=""):
    """All keys of an experiment, those of sections included."""
    found = {prefix[1:]}
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            found |= keys(getattr(value, field.name), f"{prefix}.{field.name}")
    return found


def test_describe_prints_every_key_with_type_default_and_documentation(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["config", "--describe"])

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
    printed = re.findall(r"^(\S+?):", text, re.MULTILINE)
    of_null = {key for key in printed if key.startswith("expert.network.lora.")}
    assert keys(load_experiment(TINY)) - {""} == set(printed) - of_null
    assert len(printed) == len(set(printed))
