"""A router learns a cluster that came later, from its images and a replay of the others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from artifact_files import edit
from tiny_runs import copy_run, prepared

from ddm_lightning.cli.parser import main
from ddm_lightning.encoders.interfaces import StoredForm
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble, write_ensemble
from ddm_lightning.flow.path import interpolate
from ddm_lightning.members.meta import read_meta
from ddm_lightning.shards.manifest import Manifest
from ddm_lightning.shards.mds import open_shards
from ddm_lightning.training.extension import NUM_STEPS


def x_0(run: Path, cluster: int) -> torch.Tensor:
    manifest = Manifest.read(run)
    stored = open_shards([run / "prepared" / "shards" / f"cluster-{cluster}" / "held-out"])
    batch = stored.take(torch.arange(len(stored)).numpy())
    return StoredForm(manifest.stores, manifest.normalisation).mean(batch["x_0"])


@pytest.mark.slow
def test_an_extended_router_knows_the_new_cluster_and_keeps_the_others(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    expert = tmp_path / "expert"
    out = tmp_path / "out"
    prepared(new, "prepare.source.name=digits", "prepare.source.params={}")
    shutil.copytree(finished_run / "members" / "expert-1" / "artifact", expert)
    edit(expert / "member.json", partition_sha256=Manifest.read(new).partition_sha256)
    num_images = 2 * Manifest.read(finished_run).num_samples  # swapped, or of the others alone: 1/3, 2
    add = ["ensemble", "add", str(finished_run), str(expert), "--images", str(num_images)]

    assert main([*add, "--tune-router", str(finished_run), str(new), "--out", str(out)]) == 0
    assert "use the strategy bayes" not in capsys.readouterr().out

    loaded = load_ensemble(read_ensemble(out / "ensemble.json"))
    meta = read_meta(out / "router")

    assert loaded.num_clusters == 3 and meta.num_clusters == 3 and len(meta.clusters) == 3

    before = read_meta(finished_run / "members" / "router" / "artifact")
    assert meta.step - before.step == NUM_STEPS
    # As many of the new cluster in each step, which are no more than it has.
    assert meta.num_samples - before.num_samples == NUM_STEPS * 2 * before.num_samples // before.step
    assert before.metrics and not meta.metrics, "figures and temperatures of another router"

    def of_new(images: torch.Tensor, t: float) -> torch.Tensor:
        times = torch.full((len(images),), t)
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
        return loaded.probabilities(interpolate(images, noise, times), times)[:, 2]

    digits = x_0(new, 1)
    shapes = torch.cat([x_0(finished_run, k) for k in (0, 1)])

    assert of_new(digits, 0.1).mean() > 0.8 and of_new(shapes, 0.1).mean() < 0.2  # its body had 40 steps of training
    assert of_new(torch.zeros(1000, *digits.shape[1:]), 1.0).mean() == pytest.approx(2 / 3, abs=0.2)

    again = tmp_path / "again"
    less = tmp_path / "less"

    assert main(["ensemble", "remove", str(out), "expert-0", "--out", str(less)]) == 0
    assert load_ensemble(read_ensemble(less / "ensemble.json")).router is not None

    other = shutil.copytree(expert, tmp_path / "other")
    edit(other / "member.json", member="expert-0")
    by_noise = copy_run(finished_run, tmp_path / "by_noise")
    of_member = {
        name: by_noise / "members" / name / "artifact" for name in ("expert-0", "expert-1", "router", "expert-2")
    }
    shutil.copytree(of_member["expert-1"], of_member["expert-2"])
    for name, interval in (("expert-1", [0.0, 0.5]), ("expert-2", [0.5, 1.0])):
        edit(of_member[name] / "member.json", member=name, interval=interval)

    write_ensemble(by_noise, [*of_member.values()], [0.5, 0.5], expert_clusters=(0, 1, 1))
    refusals = {
        "--tune-router: does not go with experts by noise level": [str(by_noise), str(expert), str(finished_run)],
        "was extended before; train a router on the shards of all clusters": [str(out), str(other), str(finished_run)],
        "holds other clusters than those of": [str(finished_run), str(expert), str(new)],
    }
    for words, (ensemble, artifact, seen) in refusals.items():
        command = ["ensemble", "add", ensemble, artifact, "--images", "9", "--tune-router", seen, str(new)]
        assert main([*command, "--out", str(again)]) == 2
        assert words in capsys.readouterr().err and not again.exists()


def test_a_router_s_list_of_clusters_is_checked(finished_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished_run / "members" / "router" / "artifact", tmp_path / "router")
    edit(folder / "member.json", clusters=["a"])
    with pytest.raises(Exception, match="'clusters' must name num_clusters clusters"):
        read_meta(folder)
