import json

import pytest
import soak
from tiny_runs import TINY


def test_memory_counts_from_where_it_is_to_have_settled():
    found = {
        "train/loss": [(1, 3.0), (100, 1.0)],
        "train/gradient_norm": [(1, 9.0), (50, 11.0), (100, 1.0)],
        "held_out/loss": [(50, 2.0), (100, 1.5)],
        "train/memory_gb": [(1, 0.2), (9, 0.5), (10, 0.75), (50, 0.75), (100, 1.0)],
    }
    assert soak.figures(found, 100) == {
        "memory_gb": 1.0,
        "memory_growth_gb": 0.25,
        "memory_growth_last_half_gb": 0.25,
        "highest_gradient_norm": 11.0,
        "held_out_loss": 1.5,
    }


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Streaming, which hashes files without closing them
def test_a_short_one_leaves_its_figures(tiny_run, tmp_path, capsys):
    out = tmp_path / "soak.json"
    arguments = ["-c", str(TINY), "--steps", "10", "--json", str(out), f"run_dir={tiny_run}"]
    soak.main([*arguments, "island.log_every_n_steps=2", "sample.num_steps=2"])
    figures = json.loads(out.read_text())["figures"]
    assert (figures["steps"], figures["skipped_steps"], figures["weights_not_finite"]) == (10, 0, 0)
    assert figures["memory_gb"] > figures["memory_growth_gb"] >= 0
    assert "10 steps of expert-0 of tiny_2x in bf16-mixed" in capsys.readouterr().out
