"""Which members an experiment has, and with which of its settings each one trains."""

from __future__ import annotations

import pytest
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.roles import all_members, ensemble_members, parse_members
from ddm_lightning.members.run import Run
from ddm_lightning.shards.manifest import DataSizes

SIZES = DataSizes((3, 8, 8), 16, (7, 16), 4)


def test_a_member_that_is_named_twice_is_one() -> None:
    experiment = load_experiment(TINY)
    assert parse_members("router, expert-1,router", experiment) == ["router", "expert-1"]
    assert parse_members("all", experiment) == ["expert-0", "expert-1", "router"]
    with pytest.raises(UserError, match=r"--only=expert-0,x: unknown member 'x'; known: expert-0, .*, student, all"):
        parse_members("expert-0,x", experiment, "--only")


def test_one_cluster_needs_no_router_however_many_experts_share_its_noise_levels() -> None:
    own = ["prepare.partition.num_clusters=1", "expert.num_experts=2", "expert.train.global_batch_size=8"]
    own += ["expert.overrides.expert-0.interval=[0.0,0.5]", "expert.overrides.expert-1.interval=[0.5,1.0]"]
    experiment = load_experiment(TINY, own)
    assert ensemble_members(experiment) == ["expert-0", "expert-1"]
    assert all_members(experiment) == ["expert-0", "expert-1", "monolith", "student"]


def test_a_student_has_the_steps_and_the_batch_of_its_distillation() -> None:
    plain = load_experiment(TINY).expert.train
    for overrides, steps, batch in (
        ([], plain.max_steps, plain.global_batch_size),
        (["distill.max_steps=7"], 7, plain.global_batch_size),
        (["distill.global_batch_size=6"], plain.max_steps, 6),
    ):
        run = Run(load_experiment(TINY, overrides))
        student = run.resolve("student", SIZES)
        assert (student.train.max_steps, run.max_steps("student"), student.batch_size) == (steps, steps, batch)
        assert run.resolve("monolith", SIZES).batch_size == plain.global_batch_size


@pytest.mark.parametrize(
    ("kind", "size", "length", "vector"),
    [("none", 0, 0, 0), ("class", 4, 0, 0), ("text", 16, 0, 0), ("tokens", 16, 7, 0), ("tokens+text", 16, 7, 16)],
)
def test_a_condition_has_the_sizes_of_its_kind(kind: str, size: int, length: int, vector: int) -> None:
    prompts = ["sample.prompts=[]"] if kind in ("none", "class") else []
    run = Run(load_experiment(TINY, [f"condition.kind={kind}", *prompts, "router.conditional=false"]))
    spec = run.resolve("expert-0", SIZES).condition
    assert (spec.kind, spec.size, spec.length, spec.vector_size) == (kind, size, length, vector)
    assert run.resolve("router", SIZES).condition.kind == "none"
