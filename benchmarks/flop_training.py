"""Train an ensemble and its monolith under one budget of FLOPs, at several budgets and seeds.

The budget is what the ensemble costs: its experts, its router, and the partition (features of all images, k-means). A
monolith takes as many steps as that pays for. With a constant learning rate one training passes through all budgets:
each member trains on from budget to budget, and its artifact is kept at each.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from common import all_of, call, load, start
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.config.load import read_yaml
from ddm_lightning.config.merge import expert_clusters
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_folder
from ddm_lightning.core.registry import FEATURES
from ddm_lightning.ensemble.manifest import write_ensemble
from ddm_lightning.islands.plan_data import data_of
from ddm_lightning.members.cost import MemberCost
from ddm_lightning.members.member import Member
from ddm_lightning.members.meta import read_meta
from ddm_lightning.members.roles import MONOLITH, ROUTER, batch_size_of, ensemble_members
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.manifest import manifest_path

ENSEMBLE = "ensemble"
TRAIN = {"both": (ENSEMBLE, MONOLITH), ENSEMBLE: (ENSEMBLE,), MONOLITH: (MONOLITH,)}
"""What a variant trains."""
_FORM = "benchmarks/variants_….yaml show the form"


@dataclass(frozen=True)
class Costs:
    """FLOPs of one experiment; a multiply-add counts as 2."""

    expert: float
    """One expert, one training sample, forward and backward."""
    router: float
    """The router, one training sample, forward and backward; 0 for K = 1."""
    partition: float
    """Features of all images, and k-means on them; 0 for a partition that needs no features."""

    @classmethod
    def of(cls, experiment: Experiment, num_samples: int) -> Costs:
        """Count the operations of the networks, and the multiply-adds of k-means."""
        sizes = data_of(experiment).sizes
        expert = MemberCost(Member.resolve(MONOLITH, experiment, sizes)).flops()
        router = 0.0
        if ROUTER in ensemble_members(experiment):
            router = MemberCost(Member.resolve(ROUTER, experiment, sizes)).flops()

        return cls(expert, router, partition_flops(experiment, num_samples))


def partition_flops(experiment: Experiment, num_samples: int) -> float:
    """FLOPs of the features of all samples, of k-means on the fitted ones, and of assigning all of them."""
    config = experiment.prepare.partition
    if config.kind != "kmeans":
        return 0.0

    plugin = experiment.prepare.features
    network = FEATURES.build(plugin.name, plugin.params)
    size = experiment.prepare.images.size or 32
    with FlopCounterMode(display=False) as counter:
        features = network.encode(np.zeros((1, size, size, 3), np.uint8))

    passes = config.fit_fraction * config.num_iterations + 1
    distances = 2.0 * num_samples * min(config.num_fine_centroids, num_samples) * features.shape[1]
    return counter.get_total_flops() * num_samples + passes * distances


@dataclass(frozen=True)
class Variant:
    """Settings under which the ensemble, the monolith or both are trained."""

    name: str = ""
    overrides: Sequence[str] = ()
    """Settings ``key=value`` that differ from the experiment's."""
    train: Annotated[str, checks.one_of(TRAIN)] = "both"
    """A key of ``TRAIN``."""
    budgets: Sequence[float] = (1.0,)
    """Shares of the experiment's budget, ascending."""
    seeds: Sequence[int] = ()
    """Seeds of the experiment; each is one training of every member. Empty for those of the main comparison."""
    branch_at: float = 0.0
    """Share of the budget at which the experts branch off the main monolith of their seed, whose FLOPs are charged to
    them; 0 for random initial weights."""

    def __post_init__(self) -> None:
        if min(self.budgets) <= 0 or max(self.budgets) > 1:
            raise UserError(f"budgets = {self.budgets}: give shares above 0 and at most 1")


def variants_of(words: Sequence[str]) -> list[Variant]:
    """Read variants from a YAML file: all of them, or those named behind the file.

    Args:
        words: ``FILE NAME…``, as given to ``--variants``; empty for none.

    Raises:
        UserError: no such file or variant, an unknown key, or a bad value.
    """
    if not words:
        return []

    path, *names = words
    document = OmegaConf.to_container(read_yaml(Path(path), _FORM))
    known = checks.record(document, dict[str, Variant], path, _FORM)
    chosen = []
    for name in names or known:
        if name not in known:
            raise UserError(f"{path}: no variant {name!r}; known: {', '.join(known)}")

        chosen.append(replace(known[name], name=name))

    return chosen


@dataclass(frozen=True)
class Job:
    """One member of one variant and seed, trained from budget to budget."""

    variant: Variant
    seed: int
    member: str
    steps: list[int]
    """Optimizer steps at each of the variant's budgets."""
    flops: float
    """Training FLOPs up to the last budget."""


class Study:
    """All trainings of one benchmark.

    Args:
        options: of the benchmark: ``config`` and ``overrides``.
        variants: the first is the main comparison, whose ensemble defines the budget.

    Raises:
        UserError: bad settings, experts that differ, several budgets without a constant learning rate, or a variant
            that starts from what the main comparison does not train.
    """

    def __init__(self, options: Namespace, variants: Sequence[Variant]) -> None:
        seeds = variants[0].seeds
        self.options = options
        self.variants = [replace(variant, seeds=variant.seeds or seeds) for variant in variants]
        self.experiment = load(options)
        self.root = RunFolder.of(self.experiment).root / "flop_matched"
        for variant in self.variants:
            self._check(variant)

    def _check(self, variant: Variant) -> None:
        main = self.variants[0]
        at = variant.branch_at
        if at and not (at in main.budgets and at < min(variant.budgets)):
            raise UserError(
                f"variant {variant.name}: branch_at = {at:g} must be below its own budgets and one of the main "
                f"comparison's ({' '.join(map('{:g}'.format, main.budgets))}); see --budgets"
            )

        missing = {*variant.seeds} - {*main.seeds}
        if at and missing:
            raise UserError(
                f"variant {variant.name}: starts from the main comparison, which lacks seed {min(missing)}; "
                "add it with --seeds, or change the variant's seeds"
            )

        experiment = self.prepared(variant).experiment
        if experiment.expert.overrides:
            raise UserError(f"variant {variant.name}: FLOPs are matched for equal experts; remove expert.overrides")

        schedules = {experiment.expert.train.schedule, experiment.router.train.schedule}
        if len(variant.budgets) > 1 and schedules != {"constant"}:
            raise UserError(
                f"variant {variant.name}: {len(variant.budgets)} budgets of one training need a constant "
                "learning rate; set expert.train.schedule and router.train.schedule, or give one budget"
            )

    def prepared(self, variant: Variant) -> Run:
        """The variant's run: shards are those of the experiment, or its own if it prepares otherwise."""
        settings = [*variant.overrides]
        if any(override.startswith("prepare.") for override in settings):
            settings.append(f"run_dir={self.root / variant.name / 'data'}")

        return Run(load(self.options, *settings))

    @property
    def main(self) -> Run:
        """The run of the main comparison."""
        return self.prepared(self.variants[0])

    def prepare(self) -> None:
        """Prepare the shards of all variants.

        Raises:
            UserError: ``prepare`` failed.
        """
        for variant in self.variants:
            folder = self.prepared(variant).folder
            if not manifest_path(folder.root).exists():
                call("prepare", self.options, *variant.overrides, f"run_dir={folder.root}")

    @cached_property
    def costs(self) -> Costs:
        """Costs of the main experiment."""
        return Costs.of(self.experiment, self.main.manifest.num_samples)

    def budget(self, share: float) -> float:
        """Training FLOPs of the ensemble at a share of its steps, with router and partition."""
        expert = self.experiment.expert.train
        router = self.experiment.router.train
        experts = self.costs.expert * expert.global_batch_size * expert.max_steps
        routers = self.costs.router * router.global_batch_size * router.max_steps
        return share * (experts + routers) + self.costs.partition

    def jobs(self) -> list[Job]:
        """All trainings, in the order in which they start: the longest first, so that none is left over at the end."""
        jobs = []
        for variant in self.variants:
            jobs += sorted(self._jobs_of(variant), key=lambda job: (-job.flops, job.seed))

        return jobs

    def _jobs_of(self, variant: Variant) -> Iterator[Job]:
        experiment = self.prepared(variant).experiment
        costs = Costs.of(experiment, self.main.manifest.num_samples)
        members: list[str] = []
        for model in TRAIN[variant.train]:
            members += ensemble_members(experiment) if model == ENSEMBLE else [model]

        for member in members:
            per_sample = costs.router if member == ROUTER else costs.expert
            steps = [self._steps(variant, member, experiment, costs, share) for share in variant.budgets]

            flops = per_sample * batch_size_of(member, experiment) * steps[-1]
            for seed in variant.seeds:
                yield Job(variant, seed, member, steps, flops)

    def _steps(self, variant: Variant, member: str, experiment: Experiment, costs: Costs, share: float) -> int:
        """Steps that the budget pays for; all experts together pay for router, partition and what they branch off."""
        router = experiment.router.train
        router_steps = round(share * router.max_steps)
        if member == ROUTER:
            return max(1, router_steps)

        budget = self.budget(share)
        if variant.branch_at:
            budget -= self.budget(variant.branch_at)

        if member != MONOLITH:
            # The partition of the main experiment is charged to every ensemble, however its clusters are made.
            budget -= self.costs.partition
            budget -= costs.router * router.global_batch_size * router_steps

        per_step = costs.expert * experiment.expert.train.global_batch_size
        return max(1, round(budget / per_step))

    def at_budget(self, variant: Variant, seed: int, share: float) -> RunFolder:
        """Folder of the artifacts at one budget: an ensemble, a monolith, or both."""
        return RunFolder(self.root / f"{variant.name}/seed-{seed}/budget-{share:g}")

    def losses(self, variant: Variant, seed: int, share: float, model: str) -> dict[str, float]:
        """Held-out loss of ``model`` at one budget, over all noise levels and at each.

        An ensemble's is the mean of its experts', each on its own cluster, weighted by the held-out samples there. Its
        router's accuracy and cross-entropy, with and without the condition, say how much the condition tells.
        """
        run = self.at_budget(variant, seed, share)
        names = [model]
        weights = [1]
        if model == ENSEMBLE:
            weights = [cluster.held_out for cluster in self.prepared(variant).manifest.clusters]
            names = list(map("expert-{}".format, range(len(weights))))

        metrics = [read_meta(run.artifact(name)).metrics for name in names]
        _, _, noisiest = max(key for key in metrics[0] if key.startswith("held_out/loss_t")).rpartition("_")
        found = {}
        for key in metrics[0]:
            if key.startswith("held_out/loss"):
                score = key.replace("/", "_").replace(noisiest, "at_high_noise")
                found[score] = float(np.average([one[key] for one in metrics], weights=weights))

        if model == ENSEMBLE and run.has_artifact(ROUTER):
            for key, value in read_meta(run.artifact(ROUTER)).metrics.items():
                if key.startswith(("held_out/accuracy", "held_out/cross_entropy")):
                    found[key.replace("held_out/", "router_").replace(noisiest, "at_high_noise")] = value

        return found

    def train(self, num_jobs: int) -> None:
        """Train what is not trained, ``num_jobs`` members at a time, and assemble the ensembles.

        Raises:
            UserError: a training failed.
            KeyboardInterrupt: Ctrl-C; the next call continues from the checkpoints.
        """
        for is_branched in (False, True):
            jobs = [job for job in self.jobs() if bool(job.variant.branch_at) == is_branched]
            with ThreadPoolExecutor(num_jobs) as pool:
                all_of([pool.submit(self._train, job) for job in jobs], "trainings")

        for variant, seed, share in self.points():
            if ENSEMBLE in TRAIN[variant.train]:
                run = self.prepared(variant)
                kept = self.at_budget(variant, seed, share)
                folders = list(map(kept.artifact, run.names))
                clusters = expert_clusters(run.experiment)
                write_ensemble(kept.root, folders, run.manifest.priors, expert_clusters=clusters)

    def points(self) -> Iterator[tuple[Variant, int, float]]:
        """Variant, seed and share of every comparison."""
        for variant in self.variants:
            for seed in variant.seeds:
                for share in variant.budgets:
                    yield variant, seed, share

    def _train(self, job: Job) -> None:
        """Train one member from budget to budget, by the command line, as a user would."""
        run = RunFolder(self.root / f"{job.variant.name}/seed-{job.seed}/{job.member}")
        prepared = self.prepared(job.variant).folder
        section = "router" if job.member == ROUTER else "expert"
        fixed = [*job.variant.overrides, f"seed={job.seed}", f"run_dir={run.root}"]
        fixed.append(f"island.shards={prepared.shards.resolve()}")
        if job.variant.branch_at:
            trunk = self.at_budget(self.variants[0], job.seed, job.variant.branch_at)
            fixed.append(f"expert.init_from={trunk.artifact(MONOLITH)}")

        run.prepared.mkdir(parents=True, exist_ok=True)
        shutil.copy(prepared.prepared / "manifest.json", run.prepared)
        for share, steps in zip(job.variant.budgets, job.steps, strict=True):
            kept = self.at_budget(job.variant, job.seed, share)
            if not kept.has_artifact(job.member):
                # Validating takes as long as hundreds of these small steps.
                settings = [*fixed, f"{section}.train.max_steps={steps}", f"island.validate_every_n_steps={steps}"]
                start("fit", self.options, *settings, f"member={job.member}").ended()
                with atomic_folder(kept.artifact(job.member)) as temporary:
                    shutil.copytree(run.artifact(job.member), temporary, dirs_exist_ok=True)

            found = read_meta(kept.artifact(job.member)).step
            if found != steps:
                raise UserError(f"{kept.root}: has {found} steps, the budget asks for {steps}; move it away")
