import json
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import common
import pytest

from ddm_lightning.core.errors import UserError


@pytest.mark.parametrize(
    ("words", "batch", "overrides"),
    [
        (["-c", "a.yaml", "--batch", "4", "8", "x.size=S", "seed=1"], [4, 8], ["x.size=S", "seed=1"]),
        (["-c", "a.yaml", "key-x.b=2", "--json=x.json", "--batch", "4"], [4], ["key-x.b=2"]),
        (["--batch", "1"], [1], []),
    ],
)
def test_an_option_of_several_values_takes_no_setting_for_one(words, batch, overrides):
    made = common.parser("text", config="a.yaml")
    made.add_argument("--batch", type=int, nargs="+")

    options = common.parse(made, words)

    assert (options.config, options.batch, options.overrides) == ("a.yaml", batch, overrides)


@pytest.mark.parametrize(
    ("made", "words", "told"),
    [
        (common.parser("text", fixed=True), ["seed=1"], "unrecognized arguments: seed=1"),
        (common.parser("text"), [], "-c/--config"),
    ],
)
def test_what_a_benchmark_does_not_take_or_lacks_is_refused(made, words, told, capsys):
    with pytest.raises(SystemExit):
        common.parse(made, words)
    assert told in capsys.readouterr().err


def refuse(_):
    raise UserError("file: key: remedy")


def interrupted(_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("main", "code", "told"), [(refuse, 2, "error: file: key: remedy\n"), (interrupted, 130, "interrupted")]
)
def test_exit_codes(main, code, told, capsys, monkeypatch):
    monkeypatch.setattr(common.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        common.run(main)
    assert end.value.code == code
    assert capsys.readouterr().err.startswith(told)


def test_results_hold_origin_and_figures_and_the_table_lies_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(common.REPOSITORY / "benchmarks" / "x.py"), "-c", "a b.yaml"])
    report = common.Report("Title", ["t", "value"])
    report.row("0.50", "1.25")
    report.note("A note.")
    report.figures = {"value_t0.50": 1.25, "value_t0.95": 2.0}
    report.write(tmp_path / "new" / "out.json")
    written = json.loads((tmp_path / "new" / "out.json").read_text())
    origin = {"commit": common.commit(), "device": common.device(), "command": "python benchmarks/x.py -c 'a b.yaml'"}
    assert written == {**origin, "figures": report.figures}
    assert "torch" in written["device"]
    markdown = (tmp_path / "new" / "out.md").read_text()
    assert "| t | value |\n| :-- | --: |\n| 0.50 | 1.25 |\n\nA note.\n" in markdown
    assert f"- commit: `{written['commit']}`" in markdown


@pytest.mark.parametrize(
    ("module", "code", "told"),
    [
        ("no_such_module", 0, r"no_such_module: ended with code 1, not 0: .*No module named no_such"),
        ("this", 130, "ended with code 0, not 130"),
    ],
)
def test_a_child_that_ends_otherwise_is_told_with_its_last_line(module, code, told):
    with pytest.raises(UserError, match=told):
        common.Child(module).ended(code)


SLEEP = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_after_a_failure_children_end_and_no_other_starts(tmp_path, monkeypatch):
    (tmp_path / "asleep.py").write_text(SLEEP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    handles = tmp_path / "handles the signal"
    begun = []

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
        common.all_of([pool.submit(one) for one in (fail, sleep, sleep, sleep)])
    assert begun[0].returncode == common.INTERRUPTED
    # Another one may have been started meanwhile, and ended before it handles the signal.
    assert [child.returncode in (common.INTERRUPTED, -signal.SIGTERM) for child in begun[1:]] in ([], [True])
