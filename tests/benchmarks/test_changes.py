import json

import changes
import pytest
import torch
from tiny_runs import copy_run, settings

from ddm_lightning.members.artifact import read_artifact
from ddm_lightning.use.saved import manifest_with_about


def test_the_leaver_comes_back_with_its_prior(finished_run, tmp_path, monkeypatch):
    run, out = copy_run(finished_run, tmp_path / "run"), tmp_path / "out.json"
    seen = []

    def sampled(ensemble, given, num, seed):
        seen.append(ensemble)
        return real(ensemble, given, num, seed)

    real = changes.sampled
    monkeypatch.setattr(changes, "sampled", sampled)
    changes.main([*settings(run), "--num", "32", "--json", str(out), "sample.num_steps=4"])
    before, removed, added, *_, extended = seen
    assert [len(one.experts) for one in seen] == [2, 1, 2, 2, 1, 2]
    assert "router" in before.folders and "router" not in added.folders
    assert extended.metas["router"].num_clusters == 3
    assert sorted(added.priors) == pytest.approx(sorted(manifest_with_about(run).priors), abs=0.01)
    same = (read_artifact(one.folders[name])[1] for one, name in ((before, "expert-1"), (removed, "expert-1")))
    assert all(torch.equal(a, b) for a, b in zip(*(weights.values() for weights in same), strict=True))
    assert json.loads(out.read_text())["figures"]["experts_bayes_removed"] == 1
