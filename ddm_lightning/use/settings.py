"""Settings of sampling, in one place: defaults < experiment file or record < overrides < arguments.

Modules that need torch are imported where they are used, so that a bad file is refused at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ddm_lightning.config.experiment import Experiment, SampleConfig
from ddm_lightning.config.load import read_override
from ddm_lightning.config.merge import merge
from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core import checks, remote
from ddm_lightning.core.errors import DOWNLOADS, UserError
from ddm_lightning.members.run_folder import RunFolder, load_run, refuse_changed

# Sections that may be overridden for a saved ensemble.
_FREE = ("island", "sample", "evaluate")


def load_settings(place: str | Path, overrides: Sequence[str] = (), *, allow_paths: bool = False) -> Experiment:
    """Load the experiment of a file, a run folder, a saved ensemble, or a URL of one of the last two, for sampling.

    A URL is downloaded. For a saved ensemble, or a run at a URL, the experiment holds only what sampling needs.

    Args:
        place: where it is.
        overrides: ``key=value`` pairs.
        allow_paths: whether to skip ``refuse_paths``.

    Raises:
        UserError: as ``load_run``, ``refuse_changed`` or ``fetched``; or, for a saved ensemble, a key outside of
            ``island``, ``sample`` and ``evaluate``, ``sample.member``, or as ``refuse_paths``.
    """
    is_file = not remote.is_url(place) and not Path(place).is_dir()
    record = RunFolder(Path(place)).experiment
    if is_file or (record.exists() and str(place) not in DOWNLOADS):
        experiment = load_run(place if is_file else record, overrides)
        refuse_changed(experiment)
        return experiment

    from ddm_lightning.use.saved import experiment_of, fetched, manifest_with_about, refuse_paths

    folder = fetched(place)
    manifest = manifest_with_about(folder, partial=True)
    if not allow_paths:
        refuse_paths(manifest)
    experiment = experiment_of(manifest)
    experiment.run_dir = str(folder)
    for text in overrides:
        source = f"{place} with {text!r}"
        change = read_override(text, str(place))
        (section,) = change
        if section not in _FREE:
            raise UserError(f"{source}: a saved ensemble takes only {', '.join(_FREE)}; leave it out")
        checks.check(OmegaConf.to_container(change), Experiment, "", source, references=False)
        merged = merge(OmegaConf.structured(getattr(experiment, section)), change[section])
        setattr(experiment, section, OmegaConf.to_object(merged))
    if experiment.sample.member is not None:
        raise UserError(f"{place}: key 'sample.member': a saved ensemble is sampled as a whole; leave it out")
    check_experiment(experiment, place, overrides, sampling_only=True)
    return experiment


def resolve(
    experiment: Experiment, overrides: Sequence[str] = (), source: str = "sample", **arguments: Any
) -> Experiment:
    """Give an experiment the arguments of one call, and check its settings of sampling.

    Another strategy keeps only the params that an override names, and gets its own solver if none is given; another
    solver keeps no params.

    Args:
        experiment: from ``load_settings``, overrides included.
        overrides: those of the experiment.
        source: begins error lines.
        arguments: ``seed`` and keys of the section ``sample``; None is the experiment's.

    Returns:
        A changed copy.

    Raises:
        UserError: an unknown key, a value out of range, or settings that do not go together.
    """
    from ddm_lightning.ensemble.routing import with_strategy
    from ddm_lightning.members.preflight import check_strategy

    arguments = {key: value for key, value in arguments.items() if value is not None}
    seed, before = arguments.pop("seed", experiment.seed), experiment.sample
    known = [field.name for field in fields(SampleConfig) if field.name != "member"]
    if unknown := arguments.keys() - known:
        raise UserError(f"{source}: no setting {min(unknown)!r}; known: {', '.join(known)}")
    sample = replace(before, **arguments)
    given = {text.partition("=")[0] for text in overrides} | {f"sample.{key}" for key in arguments}
    if sample.strategy != before.strategy and "strategy_params" not in arguments:
        params = before.strategy_params.items()
        sample.strategy_params = {key: value for key, value in params if f"sample.strategy_params.{key}" in given}
    if sample.solver != before.solver and "solver_params" not in arguments:
        sample.solver_params = {}
    resolved = replace(experiment, sample=sample, seed=seed)
    check_experiment(resolved, source, overrides, sampling_only=True)
    if "strategy" in arguments and "sample.solver" not in given:
        resolved.sample = with_strategy(sample, sample.strategy, sample.strategy_params)
    check_strategy(resolved, source, overrides)
    return resolved
