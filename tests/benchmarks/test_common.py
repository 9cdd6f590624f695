import json
import signal
import subprocess
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import common
import pytest

from ddm_lightning.core.errors import UserError


def test_an_option_of_several_values_takes_no_setting_for_one():
    made = common.parser("text")
    made.add_argument("--batch", type=int, nargs="+")
    options = common.parse(made, ["-c", "a.yaml", "--batch", "4", "8", "expert.network.params.size=S", "seed=1"])
    assert (options.batch, options.overrides) == ([4, 8], ["expert.network.params.size=S", "seed=1"])
    options = common.parse(made, ["-c", "a.yaml", "key-x.b=2", "--json=x.json", "--batch", "4"])
    assert (options.config, str(options.json), options.overrides) == ("a.yaml", "x.json", ["key-x.b=2"])


def test_a_word_that_is_no_setting_is_refused(capsys):
    for made, word in ((common.parser("text", fixed=True), "seed=1"), (common.parser("text", config="a.yaml"), "seed")):
        with pytest.raises((SystemExit, UserError)):
            common.load(common.parse(made, [word]))


def test_an_experiment_is_asked_for_unless_there_is_a_usual_one(capsys):
    with pytest.raises(SystemExit):
        common.parse(common.parser("text"), [])
    assert "-c/--config" in capsys.readouterr().err
    assert common.parse(common.parser("text", config="usual.yaml"), []).config == "usual.yaml"


def test_exit_codes(capsys, monkeypatch):
    monkeypatch.setattr(common.signal, "signal", lambda *_: None)

    def refuse(_):
        raise UserError("file: key: remedy")

    def interrupted(_):
        raise KeyboardInterrupt

    common.run(lambda _: None)
    for main, code, told in ((refuse, 2, "error: file: key: remedy\n"), (interrupted, 130, "interrupted")):
        with pytest.raises(SystemExit) as end:
            common.run(main)
        assert end.value.code == code and capsys.readouterr().err.startswith(told)


def test_a_failing_command_is_told_and_a_succeeding_one_is_not(tmp_path, capfd):
    with pytest.raises(UserError, match=r"config -c .*missing\.yaml: ended with code 2"):
        common.call("config", Namespace(config=tmp_path / "missing.yaml", overrides=[]))
    assert "missing.yaml" in capfd.readouterr().err


def test_results_hold_origin_and_figures_and_the_table_lies_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(common.REPOSITORY / "benchmarks" / "x.py"), "-c", "a b.yaml"])
    report = common.Report("Title", ["t", "value"])
    report.row("0.50", "1.25")
    report.note("A note.")
    report.figures = {"value_t0.50": 1.25, "value_t0.95": 2.0}
    report.write(tmp_path / "new" / "out.json")
    written = json.loads((tmp_path / "new" / "out.json").read_text())
    assert list(written) == ["commit", "device", "command", "figures"]
    assert written["figures"] == report.figures
    assert written["command"] == "python benchmarks/x.py -c 'a b.yaml'"
    assert "torch" in written["device"]
    markdown = (tmp_path / "new" / "out.md").read_text()
    assert "| t | value |\n| :-- | --: |\n| 0.50 | 1.25 |\n\nA note.\n" in markdown
    assert f"- commit: `{written['commit']}`" in markdown


def test_a_child_that_fails_is_told_with_its_last_line():
    with pytest.raises(UserError, match=r"no_such_module: ended with code 1, not 0: .*No module named no_such"):
        common.Child("no_such_module").ended()
    with pytest.raises(UserError, match="ended with code 0, not 130"):
        common.Child("this").ended(code=130)
    assert "Beautiful" in common.Child("this").ended()


SLEEP = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_after_a_failure_children_end_and_no_other_starts(tmp_path, monkeypatch):
    (tmp_path / "asleep.py").write_text(SLEEP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    begun, handles = [], tmp_path / "handles the signal"

    def fail():
        while not handles.exists():
            time.sleep(0.01)
        raise UserError("of the first")

    def sleep():
        child = common.Child("asleep", str(handles))
        begun.append(child)
        child.ended()

    monkeypatch.setattr(common.Child, "running", [])
    with pytest.raises(UserError, match="of the first"), ThreadPoolExecutor(2) as pool:
        common.all_of([pool.submit(one) for one in (fail, sleep, sleep, sleep)], lambda _: None)
    assert begun[0].returncode == common.INTERRUPTED
    # Another one may have been started meanwhile, and ended before it handles the signal.
    assert [child.returncode in (common.INTERRUPTED, -signal.SIGTERM) for child in begun[1:]] in ([], [True])


@pytest.mark.long
@pytest.mark.parametrize("name", ["flop_matched", "mfu", "smoke_gpu", "step"])
def test_a_benchmark_starts_as_a_script(name):
    """Tests import torchvision's stand-in first; a script has to do it itself."""
    script = common.REPOSITORY / "benchmarks" / f"{name}.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
