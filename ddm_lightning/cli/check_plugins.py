"""Check every plug-in that an experiment names, before anything is written.

Error lines begin with ``source`` (the experiment's file or an option) and the override that caused the error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ddm_lightning.config.experiment import Experiment, PluginConfig
from ddm_lightning.config.merge import expert_section
from ddm_lightning.config.validate import blamed
from ddm_lightning.core import registry
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.ensemble.routing import strategy_of
from ddm_lightning.members.member import Member
from ddm_lightning.members.roles import MONOLITH, ROUTER
from ddm_lightning.shards.manifest import DataSizes, Manifest
from ddm_lightning.training.optimizer import has_muon_matrices


def check_plugins(experiment: Experiment, source: str, overrides: Sequence[str] = ()) -> None:
    """Check names and params of all plug-ins.

    Raises:
        UserError: unknown name, or params that the plug-in does not take.
    """
    prepare = experiment.prepare
    named: list[tuple[str, registry.Registry, PluginConfig | None, tuple[str, ...]]] = [
        ("prepare.source", registry.SOURCES, prepare.source, ()),
        ("prepare.image_encoder", registry.IMAGE_ENCODERS, prepare.image_encoder, ()),
        ("prepare.caption_encoder", registry.CAPTION_ENCODERS, prepare.caption_encoder, ()),
        ("prepare.features", registry.FEATURES, prepare.features, ()),
        *(
            (key, registry.EXPERTS, expert_section(name, experiment).network, ("x_shape", "condition"))
            for key, name in _expert_networks(experiment)
        ),
        ("router.network", registry.ROUTERS, experiment.router.network, ("x_shape", "condition", "num_clusters")),
        *(("island.callbacks", registry.CALLBACKS, plugin, ()) for plugin in experiment.island.callbacks),
    ]
    for key, plugins, plugin, context in named:
        if plugin is not None:
            with _blaming(key, source, overrides):
                plugins.check(plugin.name, plugin.params, **dict.fromkeys(context))
    check_strategy(experiment, source, overrides)


def _expert_networks(experiment: Experiment) -> list[tuple[str, str]]:
    """Key of each different network of an expert, and a member that has it."""
    overridden = ((f"expert.overrides.{name}.network", name) for name in experiment.expert.overrides)
    return [("expert.network", MONOLITH), *overridden]


@contextmanager
def _blaming(key: str, source: str, overrides: Sequence[str], value: str = "") -> Iterator[None]:
    """Begin the line of a ``UserError`` with ``source``, ``key`` and its ``value``."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{blamed(source, overrides, key, str(error))}: key {key!r}{value}: {error}") from None


def check_strategy(experiment: Experiment, source: str, overrides: Sequence[str] = ()) -> None:
    """Refuse a routing strategy whose params, solver or number of experts do not fit, and params of the solver.

    Raises:
        UserError: naming ``source`` and the key.
    """
    with _blaming("sample.strategy", source, overrides, f" = {experiment.sample.strategy!r}"):
        strategy = strategy_of(experiment.sample)
        strategy.check_solver(experiment.sample.solver)
        strategy.check_num_clusters(experiment.prepare.partition.num_clusters)
    with _blaming("sample.solver", source, overrides, f" = {experiment.sample.solver!r}"):
        registry.SOLVERS.build(experiment.sample.solver, experiment.sample.solver_params)


def check_networks(
    experiment: Experiment, sizes: DataSizes | Manifest, source: str, overrides: Sequence[str] = ()
) -> None:
    """Check values that a network refuses only when it is built, such as heads that do not divide its width.

    Raises:
        UserError: a network cannot be built, or the optimizer cannot train it.
    """
    for key, name in (*_expert_networks(experiment), ("router.network", ROUTER)):
        member = Member.resolve(name, experiment, sizes)
        with _blaming(key, source, overrides):
            try:
                network = member.plan_network()
            except (RuntimeError, ArithmeticError) as error:  # torch's, for a width of 0 and the like
                raise UserError(f"cannot be built: {first_line(error)}; change its params") from None
        train = f"{key.removesuffix('.network')}.train.optimizer"
        if member.train.optimizer == "muon" and not has_muon_matrices(network):
            where = blamed(source, overrides, train, key)
            raise UserError(f"{where}: key {train!r} = 'muon': {key} has no matrices in 'blocks'; set adamw")
