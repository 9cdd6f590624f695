"""Checks of an experiment before anything is written or started: its plug-ins, networks, strategy and weights.

Error lines begin with ``source`` (the experiment's file or an option) and the override that caused the error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ddm_lightning.config.experiment import Experiment, PluginConfig, SampleConfig
from ddm_lightning.config.merge import expert_section
from ddm_lightning.config.validate import blamed
from ddm_lightning.core import registry
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.artifact import described
from ddm_lightning.members.flops import flops_by_shape
from ddm_lightning.members.member import Member
from ddm_lightning.members.meta import read_meta
from ddm_lightning.members.roles import MONOLITH, ROUTER
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import MEMBER_FILE
from ddm_lightning.networks.blocks import is_muon_matrix, moment_block
from ddm_lightning.shards.manifest import DataSizes, Manifest


def check_plugins(experiment: Experiment, source: str, overrides: Sequence[str] = ()) -> None:
    """Check names and params of all plug-ins.

    Raises:
        UserError: unknown name, or params that the plug-in does not take.
    """

    def check(key: str, plugins: registry.Registry, plugin: PluginConfig | None, *context: str) -> None:
        if plugin is not None:
            with _blaming(key, source, overrides):
                plugins.check(plugin.name, plugin.params, **dict.fromkeys(context))

    prepare = experiment.prepare
    check("prepare.source", registry.SOURCES, prepare.source)
    check("prepare.image_encoder", registry.IMAGE_ENCODERS, prepare.image_encoder)
    check("prepare.caption_encoder", registry.CAPTION_ENCODERS, prepare.caption_encoder)
    check("prepare.features", registry.FEATURES, prepare.features)
    for key, name in _expert_networks(experiment):
        check(key, registry.EXPERTS, expert_section(name, experiment).network, "x_shape", "condition")

    check("router.network", registry.ROUTERS, experiment.router.network, "x_shape", "condition", "num_clusters")
    for plugin in experiment.island.callbacks:
        check("island.callbacks", registry.CALLBACKS, plugin)

    check_strategy(experiment.sample, source, overrides)


def _expert_networks(experiment: Experiment) -> list[tuple[str, str]]:
    """Key of each different network of an expert, and a member that has it."""
    return [
        ("expert.network", MONOLITH),
        *((f"expert.overrides.{name}.network", name) for name in experiment.expert.overrides),
    ]


@contextmanager
def _blaming(key: str, source: str, overrides: Sequence[str], value: str = "") -> Iterator[None]:
    """Begin the line of a ``UserError`` with ``source``, ``key`` and its ``value``."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{blamed(source, overrides, key, str(error))}: key {key!r}{value}: {error}") from None


def check_strategy(sample: SampleConfig, source: str, overrides: Sequence[str] = ()) -> None:
    """Refuse a routing strategy whose params or solver do not fit, and params of the solver.

    Raises:
        UserError: naming ``source`` and the key.
    """
    with _blaming("sample.strategy", source, overrides, f" = {sample.strategy!r}"):
        strategy = registry.STRATEGIES.build(sample.strategy, sample.strategy_params)
        strategy.check_solver(sample.solver)

    with _blaming("sample.solver", source, overrides, f" = {sample.solver!r}"):
        registry.SOLVERS.build(sample.solver, sample.solver_params)


def check_networks(
    experiment: Experiment,
    sizes: DataSizes | Manifest,
    source: str,
    overrides: Sequence[str] = (),
    *,
    initial: bool = False,
) -> None:
    """Check values that a network refuses only when it is built, such as heads that do not divide its width.

    Prepared samples must have the condition, and fill a batch of each member of the ensemble.

    Args:
        experiment: the experiment.
        sizes: of its data.
        source: begins error lines.
        overrides: those of the experiment.
        initial: whether to fetch the weights that members start from, and check that they fit.

    Raises:
        UserError: a network cannot be built or takes no samples of a bucket, the optimizer cannot train it, or initial
            weights are missing, damaged or another network's; or the samples lack the condition, or are fewer than a
            batch.
    """
    run = Run(experiment)
    if isinstance(sizes, Manifest):
        _check_samples(run, sizes)

    for key, name in (*_expert_networks(experiment), ("router.network", ROUTER)):
        member = run.resolve(name, sizes)
        with _blaming(key, source, overrides):
            network = member.plan_network()

        if initial and member.initial is not None:
            with _blaming(f"{key.removesuffix('network')}init_from", source, overrides):
                member.initial.check(network)

        with _blaming(key, source, overrides):
            if member.buckets:
                with suppress(RuntimeError, NotImplementedError):  # operations of a plug-in that need data
                    flops_by_shape(network, member, backward=False)

            member.add_adapters(network)

        lacks = None
        if member.train.optimizer == "muon" and not any(is_muon_matrix(*named) for named in network.named_parameters()):
            lacks = "matrices in 'blocks'"
        if member.train.optimizer == "adamw-8bit" and not any(map(moment_block, network.parameters())):
            lacks = "matrix of at least 4096 weights to store moments of in eight bits"
        if lacks is not None:
            train = f"{key.removesuffix('.network')}.train.optimizer"
            raise UserError(
                f"{blamed(source, overrides, train, key)}: key {train!r} = {member.train.optimizer!r}: {key} has no "
                f"{lacks}; set adamw"
            )


def _check_samples(run: Run, manifest: Manifest) -> None:
    kind = run.experiment.condition.kind
    is_missing = manifest.num_without_caption == manifest.num_samples
    if kind == "class":
        is_missing = sum(map(any, zip(*manifest.class_counts, strict=True))) == 1
    if kind != "none" and is_missing:
        raise missing_condition(kind, manifest.num_samples)

    for name in run.names:
        member = run.resolve(name, manifest)
        num = sum(manifest.clusters[cluster].train for cluster in member.clusters)
        if num < member.batch_size:
            raise UserError(
                f"key '{member.role.section}.train.global_batch_size': a step of {name} takes {member.batch_size:,} "
                f"samples, and there are {num:,} to train on in clusters {', '.join(map(str, member.clusters))}; lower "
                "it or prepare.partition.num_clusters"
            )


def missing_condition(kind: str, num: int) -> UserError:
    """Return the refusal of data of which none of ``num`` samples has the condition."""
    found = f"none of {num:,} samples has a caption"
    remedy = "caption_column, or a text file beside each image"
    if kind == "class":
        found = f"all of {num:,} samples have one label"
        remedy = "label_column, or one folder for each class"

    return UserError(
        f"key 'condition.kind' = {kind!r}: {found}; tell the source where it is (prepare.source.params.{remedy}; "
        "docs/data.md), or set condition.kind=none"
    )


def is_collected(members: Sequence[str], run: Run) -> bool:
    """Whether the folder holds a manifest that was prepared elsewhere, and artifacts of all ``members``.

    Raises:
        UserError: some artifacts are missing. The user expects to copy them, not to prepare and train here.
    """
    manifest = run.folder.prepared / "manifest.json"
    if not manifest.exists() or manifest.with_name("parts.json").exists():
        return False

    if missing := [name for name in members if not run.folder.has_artifact(name)]:
        raise UserError(
            f"{manifest}: was prepared elsewhere, and the artifacts of {', '.join(missing)} are not here; copy them to "
            f"{run.folder.root / 'members'}/NAME/artifact, or train one with member={missing[0]}"
        )

    return True


def refuse_stale(members: Sequence[Member], run: Run) -> None:
    """Check that the artifacts of finished members belong to the experiment of ``run``.

    One with fewer steps is allowed if its training can continue: with a constant schedule and a checkpoint.

    Raises:
        UserError: an artifact is another member's or was trained with other settings.
    """
    for member in members:
        name = member.name
        if not run.folder.has_artifact(name):
            continue

        folder = run.folder.artifact(name)
        meta = read_meta(folder)
        wanted = described(member, run.manifest)
        start = member.initial
        if start is not None and start.is_recorded():
            wanted["init_sha256"] = start.sha256

        steps = member.train.max_steps
        has_checkpoint = any((run.folder.member(name) / "checkpoints").glob("step-*.ckpt"))
        can_continue = meta.asked_steps < steps and member.train.schedule == "constant" and has_checkpoint
        if meta.asked_steps != steps and not can_continue:
            wanted["step"] = steps

        wanted["num_samples"] = meta.step * member.batch_size
        for key, value in wanted.items():
            if getattr(meta, key) != value:
                raise UserError(
                    f"{folder}: has {key} = {getattr(meta, key)!r} in {MEMBER_FILE}, and the experiment asks for "
                    f"{value!r}; copy the right one there, remove {folder.parent} to train {name} anew, or use "
                    "another folder with run_dir=…"
                )
