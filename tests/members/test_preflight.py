"""What is refused before a member is started: too few samples, and artifacts of other trainings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from artifact_files import edit, put
from tiny_runs import TINY, copy_run, settings
from torch import Tensor, nn

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.preflight import check_networks, refuse_stale
from ddm_lightning.members.run import Run
from ddm_lightning.shards.manifest import DataSizes, Manifest


def test_a_batch_may_be_as_large_as_its_cluster(tiny_prepared: Path) -> None:
    manifest = Manifest.read(tiny_prepared.parent)
    least = min(cluster.train for cluster in manifest.clusters)
    fits, too_large = (
        load_experiment(TINY, [f"expert.train.global_batch_size={2 * num}"]) for num in (least, least + 1)
    )

    check_networks(fits, manifest, "FILE")
    with pytest.raises(UserError, match=f"takes {least + 1} samples, and there are {least} to train"):
        check_networks(too_large, manifest, "FILE")


class Square(nn.Module):
    """An expert of one shape, which it tells of or not; or one that no operation can be counted of."""

    prediction = "velocity"

    def __init__(self, *, x_shape: tuple[int, int, int], condition: ConditionSpec, problem: str) -> None:
        super().__init__()
        self.problem = problem
        self.table = nn.Parameter(torch.zeros(x_shape))

    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        if self.problem == "needs data":
            return x_t * float(t.sum())
        if self.problem == "tells" and x_t.shape[1:] != self.table.shape:
            raise ValueError(f"one shape, {tuple(self.table.shape)}")

        return x_t + self.table


def test_a_network_that_does_not_take_a_bucket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Bucket(32, 96, (3, 4, 12))
    sizes = DataSizes((3, 8, 8), 16, None, 4, (wide, Bucket(64, 64, (3, 8, 8))))
    dit = "{name: dit, params: {width: 16, depth: 1, num_heads: 2, patch_size: %d}}"

    def check(network: str, of: DataSizes = sizes) -> None:
        settings = ["router.network.params.patch_size=2"]
        check_networks(load_experiment(TINY, [f"expert.network={network}", *settings]), of, "FILE")

    check(dit % 4)
    check(dit % 8, replace(sizes, buckets=()))
    odd = replace(sizes, buckets=(Bucket(32, 80, (3, 4, 10)),))
    refusal = r"FILE: key 'expert\.network': expert 'dit' takes no images of 32x80 pixels \(patch_size = 4 must divide"
    with pytest.raises(UserError, match=refusal):
        check(dit % 4, odd)

    monkeypatch.setitem(EXPERTS._built_in, "square", Square)
    for problem, line in (("tells", r"one shape, \(3, 8, 8\)"), ("breaks", "Attempting to broadcast")):
        with pytest.raises(UserError, match=rf"takes no images of 32x96 pixels \({line}.*; take another network, or"):
            check(f"{{name: square, params: {{problem: {problem}}}}}")

    check("{name: square, params: {problem: needs data}}")


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
