"""Check every plug-in that an experiment names, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

from ddm_lightning.config import Experiment, PluginConfig, blamed
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CALLBACKS, CAPTION_ENCODERS, FEATURES, IMAGE_ENCODERS, SOURCES, Registry
from ddm_lightning.ensemble.routing import strategy_of
from ddm_lightning.members.member import ROUTER, Member, expert_name
from ddm_lightning.networks import EXPERTS, ROUTERS
from ddm_lightning.shards.manifest import DataSizes, Manifest
from ddm_lightning.training.optimizer import has_muon_matrices


def check_plugins(experiment: Experiment, source: str, overrides: Sequence[str] = ()) -> None:
    """Check names and params of all plug-ins.

    Args:
        experiment: the resolved experiment.
        source: its file, for error lines.
        overrides: its overrides, for error lines.

    Raises:
        UserError: unknown name, or params that the plug-in does not take.
    """
    prepare = experiment.prepare
    network = {"x_shape": None, "condition": None}
    named: list[tuple[str, Registry, PluginConfig | None, dict[str, None]]] = [
        ("prepare.source", SOURCES, prepare.source, {}),
        ("prepare.image_encoder", IMAGE_ENCODERS, prepare.image_encoder, {}),
        ("prepare.caption_encoder", CAPTION_ENCODERS, prepare.caption_encoder, {}),
        ("prepare.features", FEATURES, prepare.features, {}),
        ("expert.network", EXPERTS, experiment.expert.network, network),
        ("router.network", ROUTERS, experiment.router.network, {**network, "num_clusters": None}),
        *(("island.callbacks", CALLBACKS, plugin, {}) for plugin in experiment.island.callbacks),
    ]
    for key, registry, plugin, context in named:
        if plugin is None:
            continue
        try:
            registry.check(plugin.name, plugin.params, **context)
        except UserError as error:
            raise UserError(f"{blamed(source, overrides, key)}: key {key!r}: {error}") from None
    check_strategy(experiment, source, overrides)


def check_strategy(experiment: Experiment, source: str, overrides: Sequence[str] = ()) -> None:
    """Refuse a routing strategy whose params, solver or number of experts do not fit.

    Args:
        experiment: the resolved experiment.
        source: the file it came from, for the error line.
        overrides: settings on the command line, for the same.

    Raises:
        UserError: naming ``source`` and the key.
    """
    key, settings = "sample.strategy", experiment.sample
    try:
        strategy = strategy_of(settings)
        strategy.check_solver(settings.solver)
        strategy.check_num_clusters(experiment.prepare.partition.num_clusters)
    except UserError as error:
        where = blamed(source, overrides, key, str(error))
        raise UserError(f"{where}: key {key!r} = {settings.strategy!r}: {error}") from None


def check_networks(
    experiment: Experiment, sizes: DataSizes | Manifest, source: str, overrides: Sequence[str] = ()
) -> None:
    """Check values that a network refuses only when it is built, such as heads that do not divide its width.

    Args:
        experiment: the resolved experiment.
        sizes: sizes of the data.
        source: the experiment's file, for error lines.
        overrides: its overrides, for error lines.

    Raises:
        UserError: a network cannot be built, or the optimizer cannot train it.
    """
    for key, name in (("expert.network", expert_name(0)), ("router.network", ROUTER)):
        member = Member.resolve(name, experiment, sizes)
        try:
            network = member.plan_network()
        except UserError as error:
            raise UserError(f"{blamed(source, overrides, key)}: key {key!r}: {error}") from None
        except (RuntimeError, ArithmeticError) as error:  # torch's, for a width of 0 and the like
            problem = str(error).partition("\n")[0]
            raise UserError(
                f"{blamed(source, overrides, key)}: key {key!r}: cannot be built: {problem}; change its params"
            ) from None
        if member.train.optimizer == "muon" and not has_muon_matrices(network):
            section = key.partition(".")[0]
            raise UserError(
                f"{blamed(source, overrides, f'{section}.train.optimizer', key)}: "
                f"key '{section}.train.optimizer' = 'muon': {key} has no matrices in 'blocks'; set adamw"
            )
