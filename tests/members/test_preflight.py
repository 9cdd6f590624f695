"""What is refused before a member is started: too few samples, and artifacts of other trainings."""

from __future__ import annotations

from pathlib import Path

import pytest
from artifact_files import edit, put
from tiny_runs import TINY, copy_run, settings

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.preflight import check_networks, refuse_stale
from ddm_lightning.members.run import Run
from ddm_lightning.shards.manifest import Manifest


def test_a_batch_may_be_as_large_as_its_cluster(tiny_prepared: Path) -> None:
    manifest = Manifest.read(tiny_prepared.parent)
    least = min(cluster.train for cluster in manifest.clusters)
    fits, too_large = (
        load_experiment(TINY, [f"expert.train.global_batch_size={2 * num}"]) for num in (least, least + 1)
    )

    check_networks(fits, manifest, "FILE")
    with pytest.raises(UserError, match=f"takes {least + 1} samples, and there are {least} to train"):
        check_networks(too_large, manifest, "FILE")


def test_a_finished_member_belongs_to_its_initial_weights_and_steps(finished_run: Path, tmp_path: Path) -> None:
    run_dir = copy_run(finished_run, tmp_path / "run")

    def check(*more: str, **changes: object) -> None:
        run = Run(load_experiment(TINY, [*settings(run_dir)[2:], *more]))
        edit(run.folder.artifact("expert-0") / "member.json", **changes)
        refuse_stale([run.member("expert-0")], run)

    check()
    check("expert.train.max_steps=61")  # has a checkpoint to go on from
    (run_dir / "members/expert-0/checkpoints").rename(tmp_path / "away")
    with pytest.raises(UserError, match=r"has step = 60 in member\.json, and the experiment asks for 61; copy the"):
        check("expert.train.max_steps=61")

    source = put(tmp_path / "source") / "model.safetensors"
    start = f"expert.init_from={source}"
    run = Run(load_experiment(TINY, [*settings(run_dir)[2:], start]))
    initial = run.member("expert-0").initial
    assert initial is not None
    check(start, init_from=str(source), init_sha256=initial.sha256)
    with pytest.raises(UserError, match=r"has init_sha256 = 'abab.*' in member\.json, and the experiment asks for"):
        check(start, init_sha256="ab" * 32)
