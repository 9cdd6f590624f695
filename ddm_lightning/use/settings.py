"""Settings of sampling: of a run, a saved ensemble or a URL of either, and of one call.

Defaults < experiment file or record < overrides < arguments.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from ddm_lightning.config.experiment import Experiment, SampleConfig
from ddm_lightning.config.load import read_override
from ddm_lightning.config.merge import changed
from ddm_lightning.config.validate import check_sampling
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.manifest import EnsembleManifest
from ddm_lightning.ensemble.routing import strategy_of
from ddm_lightning.members.preflight import check_strategy
from ddm_lightning.members.run_folder import MEMBER_FILE, load_recorded
from ddm_lightning.use.download import fetched
from ddm_lightning.use.saved import manifest_with_about

# Sections that may be overridden for a saved ensemble.
_FREE = ("island", "sample", "evaluate")
# Those that a call takes by other names, or not at all.
_NOT_OF_CALLS = ("member", "num_per_prompt", "prompts", "resident_experts", "size")
KEYS = [field.name for field in fields(SampleConfig) if field.name not in _NOT_OF_CALLS]
"""Keys of the section ``sample`` that a call takes besides its own arguments."""
# Arguments of diffusers whose names do not resemble ours.
_OF_DIFFUSERS = {"scheduler": "solver", "size": "height", "use_resolution_binning": "exact"}


def load_settings(place: str, overrides: Sequence[str], *, allow_paths: bool) -> Experiment:
    """Load the experiment of a file, a run folder, a saved ensemble, or a URL of one of the last two, for sampling.

    A URL is downloaded. For a saved ensemble, or a run at a URL, the experiment holds only settings of sampling.

    Args:
        place: where it is.
        overrides: ``key=value`` pairs.
        allow_paths: whether to skip ``refuse_paths``.

    Raises:
        UserError: as ``load_run``, ``refuse_changed`` or ``fetched``; or, for a saved ensemble, a key outside of
            ``island``, ``sample`` and ``evaluate``, ``sample.member``, or as ``refuse_paths``.
    """
    if recorded := load_recorded(place, overrides):
        return recorded

    folder = fetched(place)
    manifest = manifest_with_about(folder, partial=True)
    if not allow_paths:
        refuse_paths(manifest)

    about = manifest.description
    experiment = Experiment(
        name=about.name,
        run_dir=str(folder),
        seed=about.seed,
        sample=replace(about.sample, member=None),
        condition=manifest.condition,
    )
    for text in overrides:
        source = f"{place} with {text!r}"
        change = read_override(text, place)
        (section,) = change
        if section not in _FREE:
            raise UserError(f"{source}: a saved ensemble takes only {', '.join(_FREE)}; leave it out")

        checks.check(OmegaConf.to_container(change), Experiment, "", source, references=False)
        setattr(experiment, section, changed(getattr(experiment, section), change[section]))

    if experiment.sample.member is not None:
        raise UserError(f"{place}: key 'sample.member': a saved ensemble is sampled as a whole; leave it out")

    check_sampling(experiment.sample, experiment.condition, place, overrides)
    return experiment


def refuse_paths(manifest: EnsembleManifest) -> None:
    """Refuse encoders that load a local path or hub model named by the artifacts, perhaps a stranger's.

    Raises:
        UserError: an encoder's params name a path or a model of the hub.
    """
    name, meta = next(iter(manifest.metas.items()))
    for encoder in filter(None, (meta.image_encoder, meta.caption_encoder)):
        params = json.dumps(encoder.params, ensure_ascii=False)
        if re.search(r'[/\\]|"path":', params):
            raise UserError(
                f"{manifest.folders[name] / MEMBER_FILE}: the encoder {encoder.name!r} would load what {params} "
                "names; if you trust the author, add --allow-paths or allow_paths=True"
            )


def refuse_unknown(source: str, given: Iterable[str], function: Callable[..., Any], keys: Sequence[str] = ()) -> None:
    """Refuse arguments that a function does not know, and say which one resembles them.

    Args:
        source: begins the error line.
        given: names that the function's last argument has taken.
        function: its other arguments are known.
        keys: known, too.

    Raises:
        UserError: there is such an argument.
    """
    known = dict.fromkeys([*[*inspect.signature(function).parameters][:-1], *keys])
    for name in given:
        if name not in known:
            guess = checks.guess(_OF_DIFFUSERS.get(name, name), known)
            raise UserError(f"{source}: no setting {name!r}; {guess}known: {', '.join(known)}")


def resolve(
    ensemble: EnsembleManifest,
    overrides: Sequence[str] = (),
    source: str = "sample",
    **arguments: Any,
) -> EnsembleManifest:
    """Give an ensemble the settings of one call, and check them.

    A change of strategy drops the former params, except those that an override names, and takes the new strategy's own
    solver if none is given. A change of solver drops the former one's params.

    Args:
        ensemble: from ``manifest_with_about``.
        overrides: ``key=value`` pairs that the experiment was loaded with.
        source: begins error lines.
        arguments: ``seed`` and keys of the section ``sample``; None is the ensemble's.

    Returns:
        A changed copy.

    Raises:
        UserError: a value out of range, or settings that do not go together.
    """
    given = {}
    for key, value in arguments.items():
        if value is not None:
            given[key] = value.item() if isinstance(value, np.generic) else value

    about = ensemble.description
    seed = given.pop("seed", about.seed)
    checks.check({"seed": seed}, Experiment, "", source, references=False)
    before = about.sample
    sample = replace(before, **given)
    overridden = [text.partition("=")[0] for text in overrides]
    if sample.strategy != before.strategy and "strategy_params" not in given:
        sample.strategy_params = {}
        for key, value in before.strategy_params.items():
            if f"sample.strategy_params.{key}" in overridden:
                sample.strategy_params[key] = value

    if sample.solver != before.solver and "solver_params" not in given:
        sample.solver_params = {}

    check_sampling(sample, ensemble.condition, source, overrides)
    if "strategy" in given and "solver" not in given and "sample.solver" not in overridden:
        solvers = strategy_of(sample).solvers
        if solvers and sample.solver not in solvers:
            sample.solver = solvers[0]
            sample.solver_params = {}

    check_strategy(sample, source, overrides)
    return replace(ensemble, about=replace(about, seed=seed, sample=sample))
