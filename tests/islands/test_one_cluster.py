"""One cluster: an expert without a router, trained, sampled from and trained on by the command line."""

import pytest
from shards.mds import WARNINGS
from tiny_runs import TINY

from ddm_lightning.cli.parser import main
from ddm_lightning.ensemble.manifest import read_ensemble

pytestmark = WARNINGS


def fit_in_this_process(settings, steps):
    """``fit`` finds the member trained, and starts no process."""
    for more in (["member=expert-0"], []):
        assert main(["fit", *settings, f"expert.train.max_steps={steps}", *more]) == 0


@pytest.mark.slow
def test_one_expert_needs_no_router_and_can_be_trained_on(tmp_path, capsys, quick_prepare):
    run = tmp_path / "run"
    settings = ["-c", str(TINY), f"run_dir={run}", "prepare.partition.num_clusters=1"]
    assert main(["prepare", *settings]) == 0
    fit_in_this_process(settings, 3)
    assert [path.name for path in (run / "members").iterdir()] == ["expert-0"]
    assert list(read_ensemble(run / "ensemble.json").metas) == ["expert-0"]
    sheet = run / "samples" / "top-1.png"
    drawn = sheet.read_bytes()
    for strategy in ("full", "bayes"):
        assert main(["sample", *settings, "expert.train.max_steps=3", "--strategy", strategy]) == 0
    assert main(["fit", *settings, "expert.train.max_steps=5", "member=router"]) == 2
    known = capsys.readouterr().err.partition("unknown member 'router'; known: ")[2]
    assert known.startswith("expert-0, ") and "router" not in known

    fit_in_this_process(settings, 5)
    assert read_ensemble(run / "ensemble.json").metas["expert-0"].step == 5
    assert sheet.read_bytes() != drawn
    assert main(["status", *settings, "expert.train.max_steps=5"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(" expert-0 ")][-1:]
    assert row[:3] == ["expert-0", "done", "5/5"]
