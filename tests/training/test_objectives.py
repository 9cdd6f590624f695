"""Experts with different networks, paths and predictions in one ensemble."""

import json

import pytest
from shards.mds import WARNINGS
from tiny_runs import TINY

from ddm_lightning.cli.parser import main
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble

pytestmark = WARNINGS


@pytest.mark.slow
def test_two_networks_and_objectives_in_one_ensemble(tiny_run, capsys):
    unet = "{network: {name: unet, params: {width: 8, multipliers: [1, 2], prediction: epsilon}}, path: cosine}"
    own = [
        *("-c", str(TINY), f"run_dir={tiny_run}", f"expert.overrides.expert-1={unet}", "island.compile=false"),
        *("expert.train.max_steps=4", "router.train.max_steps=4", "island.validate_every_n_steps=4"),
        *("sample.num_steps=3", "sample.strategy=full", "sample.solver=dpm++2m", "sample.num_per_prompt=1"),
    ]
    for member in ("expert-0", "expert-1", "router"):
        assert main(["fit", *own, f"member={member}"]) == 0

    assert main(["fit", *own]) == 0

    metas = {
        member: json.loads((tiny_run / "members" / member / "artifact" / "member.json").read_text())
        for member in ("expert-0", "expert-1", "router")
    }
    said = [(meta["network"], meta["prediction"], meta["path"]) for meta in metas.values()]

    assert said == [("dit", "velocity", "linear"), ("unet", "epsilon", "cosine"), ("router-dit", None, "linear")]
    assert load_ensemble(read_ensemble(tiny_run / "ensemble.json")).paths == ["linear", "cosine"]
    assert (tiny_run / "samples" / "full.png").exists()
    assert "without sample images" not in capsys.readouterr().err
    # Another path is another experiment.
    assert main(["fit", *own, "expert.overrides.expert-1.path=vp", "member=expert-1"]) == 2
    assert "expert.overrides.expert-1.path" in capsys.readouterr().err
