"""Training from Python: each method of ``Run`` against the command of its name, and a Trainer of one's own."""

import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading

import lightning as L
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from sample_log import python_path
from shards.mds import WARNINGS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import MEMBERS, ROOT, SETTINGS, STEPS, TINY, copy_run
from training.short_fits import events

import ddm_lightning
from ddm_lightning import Run, UserError
from ddm_lightning.cli.parser import main
from ddm_lightning.core.formatting import Bars
from ddm_lightning.islands import local

pytestmark = WARNINGS
SMALL = (
    "evaluate.num_images=12",
    "evaluate.metrics=[{name: kid, params: {features: pixels}}]",
    "sample.num_steps=2",
)


def at(folder, *more):
    return Run(TINY, [f"run_dir={folder}", *SETTINGS, *more])


@pytest.fixture(scope="module")
def done(finished_run):
    """The finished run. Not to be changed."""
    return at(finished_run)


def test_the_package_shows_its_classes():
    assert {"DecentralizedEnsemble", "Run", "UserError"} <= {*dir(ddm_lightning)} & {*ddm_lightning.__all__}


def test_overrides_may_be_texts_or_a_mapping(tmp_path):
    texts = [f"run_dir={tmp_path}", "seed=3", "sample.prompts=['a # b', \"it's 7\"]", "expert.train.ema_decay=1e-05"]
    mapping = {
        "run_dir": tmp_path,
        "seed": 3,
        "sample": {"prompts": ["a # b", "it's 7"]},
        "expert.train.ema_decay": 1e-5,
    }
    assert Run(TINY, mapping).experiment == Run(str(TINY), texts).experiment


def test_fit_makes_what_the_command_makes(finished_run, tmp_path, monkeypatch):
    """The router from its first step on, the ensemble and its samples."""
    monkeypatch.setenv("PYTHONPATH", python_path())
    run = at(copy_run(finished_run, tmp_path / "run", "router"))
    shutil.rmtree(run.folder.member("router"))
    shutil.rmtree(run.folder.samples)

    status = run.fit("router")

    assert [(seen.status.member, seen.health) for seen in status] == [(name, "done") for name in MEMBERS]
    for name in ("members/router/artifact/model.safetensors", f"samples/{run.grid.name}"):
        assert (run.folder.root / name).read_bytes() == (finished_run / name).read_bytes()


@pytest.fixture
def started(monkeypatch):
    """Replaces members' processes by Python code, with what they log."""

    def replace(code, log=""):
        def start(member, group, run, _):
            file = run.folder.member(member) / "log.txt"
            file.parent.mkdir(parents=True)
            file.write_text(log)
            process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
            return local._Child(member, process, group, file)

        monkeypatch.setattr(local, "_start", start)

    return replace


def test_members_that_fail_are_named_with_their_logs(tiny_run, started):
    started("raise SystemExit(2)", "error: key 'x': is wrong; mend it\n")
    with pytest.raises(UserError) as caught:
        at(tiny_run).fit("expert-1", "router")

    reason = "key 'x': is wrong; mend it"
    logs = tiny_run / "members" / "NAME" / "log.txt"
    assert str(caught.value) == f"expert-1: {reason}; router: {reason}; logs: {logs}; fit again to train the rest"
    assert {name: failure.code for name, failure in caught.value.failures.items()} == {"expert-1": 2, "router": 2}


def test_an_interrupt_stops_the_members_in_order(tiny_run, started):
    """As Ctrl-C, and as a notebook's interrupt; what a member does then is tested with the command."""
    started("import os, signal; os.kill(os.getppid(), signal.SIGINT); input()")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        at(tiny_run).fit("expert-0")

    assert signal.getsignal(signal.SIGINT) is before


def test_a_finished_run_may_be_fitted_in_any_thread(finished_run, tmp_path, capsys):
    run = at(copy_run(finished_run, tmp_path / "run"))
    found = []
    thread = threading.Thread(target=lambda: found.append(run.fit()))
    thread.start()
    thread.join()

    assert [len(status) for status in found] == [3]
    assert "their samples are there: nothing to do" in capsys.readouterr().out


def test_status_is_the_commands_table(done, capsys):
    status = done.status()

    assert [seen.status.step for seen in status] == [STEPS[name] for name in MEMBERS]
    assert main(["status", "-c", str(TINY), f"run_dir={done.folder.root}"]) == 0
    assert capsys.readouterr().out.startswith(str(status)) and "expert-1" in str(status)
    html = status._repr_mimebundle_(None, None)["text/html"]
    assert "router" in html and html.startswith("<pre")


def test_curves_are_those_that_tensorboard_shows(done, finished_run):
    figure = done.curves()

    experts, router = figure.axes
    assert (experts.get_title(), router.get_title()) == ("loss", "cross_entropy")
    assert [text.get_text() for text in experts.get_legend().get_texts()] == ["expert-0", "expert-1"]
    shown = events(finished_run, "router")
    for line, split in zip(router.lines, ("train", "held_out"), strict=True):
        expected = shown.Scalars(f"2_router/{split}/cross_entropy")
        assert [*line.get_xdata()] == [event.step for event in expected]
        assert [*line.get_ydata()] == [event.value for event in expected]

    assert figure._repr_png_().startswith(b"\x89PNG")


def test_evaluate_returns_the_figures_of_the_command(finished_run, tmp_path):
    run = at(copy_run(finished_run, tmp_path / "run"), *SMALL)
    results = run.evaluate(out=str(tmp_path / "ours"))
    command = ["evaluate", "-c", str(TINY), f"run_dir={run.folder.root}", *SETTINGS, *SMALL]
    assert main([*command, "--out", str(tmp_path / "theirs")]) == 0

    assert results.path == tmp_path / "ours" / "evaluation.json"
    assert results.path.read_bytes() == (tmp_path / "theirs" / "evaluation.json").read_bytes()
    assert results["scores"]["KID (pixels)"]["value"] > 0 and "KID (pixels)" in str(results)


def test_the_ensemble_has_the_settings_of_the_experiment(done, finished_run, tmp_path):
    out = tmp_path / "one.png"
    options = ["--prompt", "red disc", "--num", "1", "--out", str(out), "sample.strategy=full"]
    assert main(["sample", "-c", str(finished_run), *options]) == 0
    run = Run(finished_run, {"sample.strategy": "full"})

    (image,) = run.ensemble().sample(["red disc"], num=1)

    (single,) = out.with_suffix("").iterdir()
    assert image.tobytes() == Image.open(single).convert("RGB").tobytes()


def test_prepare_leaves_torch_as_the_caller_has_set_it(tiny_run, quick_prepare):
    def state():
        return torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()

    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        before = state(), torch.get_rng_state().tolist()
        assert at(tiny_run, "prepare.held_out_fraction=0.2").prepare() == tiny_run / "prepared"
        assert (state(), torch.get_rng_state().tolist()) == before
    finally:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
def test_the_documents_trainer_trains_what_fit_trains(finished_run, tmp_path, monkeypatch):
    copy_run(finished_run, tmp_path / "runs" / "tiny_2x", "expert-0")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").split("\nFor a Trainer of your own")[1]
    first, second, *_ = re.findall(r"\n\n((?:    .*\n|\n)+?)\n(?=\S)", text)
    found = {}
    exec(textwrap.dedent(first + second).replace("experiments/tiny_2x.yaml", str(TINY)), found)

    artifact = load_file(finished_run / "members" / "expert-0" / "artifact" / "model.safetensors")
    assert artifact.keys() == found["weights"].keys()
    assert all(torch.equal(found["weights"][name], artifact[name]) for name in artifact)

    shown = events(finished_run)
    (ours,) = tmp_path.glob("lightning_logs/*")
    losses = {event.step: event.value for event in EventAccumulator(str(ours)).Reload().Scalars("train/loss")}
    of_fit = [event.value for event in shown.Scalars("1_watch/train/loss")]  # each of 5 steps
    assert losses == pytest.approx({50: sum(of_fit[:10]) / 10, 60: sum(of_fit[10:]) / 2}, rel=1e-6)
    assert found["trainer"].callback_metrics["held_out/loss"] == shown.Scalars("1_watch/held_out/loss")[-1].value

    again = L.Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False)
    (alone,) = again.validate(found["module"], found["data"], verbose=False)
    assert alone["held_out/loss"] > 0


def test_overrides_are_texts_or_a_mapping():
    found = [Run(TINY, given).experiment for given in (["seed=3"], {"seed": 3})]
    assert found[0].seed == 3 and all(one == found[0] for one in found)


def test_a_module_starts_from_the_given_weights(finished_run, tiny_run):
    source = finished_run / "members" / "expert-1" / "artifact"
    module, _ = at(tiny_run, f"expert.init_from={source}").lightning("expert-0")

    expected = load_file(source / "model.safetensors")
    assert all(torch.equal(weights, expected[name]) for name, weights in module.network.state_dict().items())


# What is refused is one line.


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda folder: Run(folder / "none.yaml"), "none.yaml: no such file or folder"),
        (lambda _: Run(TINY, ["expert.trane=1"]), "'expert.trane'"),
        (lambda _: Run(TINY, {"expert.train.max_steps": "many"}), "'expert.train.max_steps': must be a whole number"),
        (lambda folder: at(folder).prepare(parts="x"), "--parts x: give the num"),
        (lambda folder: at(folder).fit("expert-9"), "unknown member 'expert-9'; known: expert-0, expert-1, router"),
        (lambda folder: at(folder).fit(jobs=0), "jobs 0: must be at least 1"),
        (lambda folder: at(folder).fit("expert-0"), "the prepared shards is missing; run prepare first"),
        (lambda folder: at(folder).lightning("expert-0"), "the prepared shards is missing; run prepare first"),
        (lambda folder: at(folder).lightning("all"), "lightning: name the member, such as"),
        (lambda folder: at(folder).status(), "no run here; start it with fit"),
        (lambda folder: at(folder).curves(), "no run here; start it with fit"),
        (lambda folder: at(folder).ensemble(), "ensemble.json"),
        (lambda folder: at(folder).evaluate(), "ensemble.json"),
        (lambda folder: at(folder).diagnose(num=0), "num 0: must be at least 1"),
        (lambda folder: at(folder, "sample.solver=none").fit(), "'sample.solver' = 'none'"),
    ],
)
def test_what_cannot_be_is_one_line(call, words, tmp_path):
    with pytest.raises(UserError) as caught:
        call(tmp_path)

    line = str(caught.value)
    assert words in line and "\n" not in line
    assert not any(tmp_path.iterdir())


# In notebooks.


def test_bars_in_a_notebook_are_redrawn_in_place(monkeypatch):
    drawn = []

    class Handle:
        def update(self, what, raw=False):
            drawn.append(what)

    monkeypatch.setattr("IPython.display.display", lambda what, **_: drawn.append(what) or Handle())
    with Bars(Console(force_jupyter=True)) as bars:
        bars.update(bars.add_task("expert-0", total=60), completed=30, note="loss 1.5")

    assert drawn and {*map(id, drawn)} == {id(bars)}
    text = bars._repr_mimebundle_(None, None)["text/html"]
    assert "expert-0" in text and "30/60" in text and "loss 1.5" in text
