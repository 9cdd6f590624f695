"""Load an experiment file: merge ``key=value`` overrides (OmegaConf), check, write it out again, describe its keys."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.config.merge import merge
from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError, first_line, hide_passwords
from ddm_lightning.core.files import sha256_json

RECORD = "experiment.yaml"
"""File of a run folder with its experiment."""


def load_experiment(path: str | Path, overrides: Sequence[str] = (), record: Path | None = None) -> Experiment:
    """Read, merge and check an experiment file.

    Args:
        path: the YAML file, or a run folder. ``run_dir`` of a record is its folder, because a run may have been moved.
        overrides: ``key=value`` pairs in OmegaConf's dot-list form; they win over the file. Mappings merge, but a
            plug-in with another ``name`` keeps none of the previous params.
        record: a resolved experiment to start from; only ``island``, ``sample``, ``evaluate`` of ``path`` then count.

    Returns:
        The experiment as plain dataclasses, every interpolation resolved.

    Raises:
        UserError: missing file, YAML syntax, unknown key, wrong type, missing value or contradiction.
    """
    path = Path(path)
    if is_record(path / RECORD):
        path = path / RECORD

    written = read_yaml(path)
    if is_record(path):
        written = _without_old_keys(written)

    changes = [(str(path), written)]
    if record is not None:
        free = OmegaConf.masked_copy(written, ["island", "sample", "evaluate"])
        changes = [(str(record), _without_old_keys(read_yaml(record))), (str(path), free)]

    # Names first: a new name drops the former params, but must keep those typed before it.
    ordered = sorted(overrides, key=lambda text: not text.partition("=")[0].endswith(".name"))
    changes += [(f"{path} with {text!r}", read_override(text, str(path))) for text in ordered]
    try:
        merged: Any = copy.deepcopy(_defaults())
        for source, change in changes:
            given = OmegaConf.to_container(change, resolve=False)
            _refuse_resolvers(given, source)
            checks.check(given, Experiment, "", source)
            merged = merge(merged, change)

        _check_complete(OmegaConf.to_container(merged, resolve=False), str(record or path))
        resolved = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{path}: key {error.full_key!r}: {first_line(error)}; fix the reference ${{…}} in it"
        ) from None

    # ``expert_section`` resolves references again, and two resolved strings may join into a resolver.
    _refuse_resolvers(resolved, str(path))
    experiment: Experiment = OmegaConf.to_object(merged)  # type: ignore[assignment]  # may be of any dataclass
    check_experiment(experiment, path, overrides)
    if is_record(path) and not any(text.startswith("run_dir=") for text in overrides):
        experiment.run_dir = str(path.parent)

    return experiment


@functools.cache
def _defaults() -> DictConfig:
    """All keys with their defaults: made once, because a copy takes a sixth of the time."""
    return OmegaConf.structured(Experiment)


def is_record(path: Path) -> bool:
    """Whether a run folder records its experiment in this file."""
    return path.name == RECORD and (path.parent / "prepared").is_dir()


def _without_old_keys(record: DictConfig) -> DictConfig:
    """A record without the keys that only earlier releases had."""
    return OmegaConf.create(checks.kept(OmegaConf.to_container(record), Experiment))


def read_yaml(path: Path, remedy: str = "the command init writes one") -> DictConfig:
    """Read a mapping from a YAML file, leaving references unresolved.

    Args:
        path: the file.
        remedy: ends the error line of a file that is missing or no mapping.

    Raises:
        UserError: the file is missing, a folder, not UTF-8, not YAML (with the line) or not a mapping, or a number is
            in base 8 or 60.
    """
    try:
        text = hide_passwords(path.read_text(encoding="utf-8"))
        loaded = OmegaConf.load(io.StringIO(text))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or folder; {remedy}") from None
    except yaml.MarkedYAMLError as error:
        where = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}: YAML syntax{where}: {error.problem}; fix the file") from None
    except (ValueError, OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        problem = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{path}: cannot be read: {problem}; give a YAML file in UTF-8") from None

    if not isinstance(loaded, DictConfig):
        raise UserError(f"{path}: the top level must be a mapping of keys; {remedy}")

    _refuse_other_bases(loaded, text, "", str(path))
    return loaded


def read_override(override: str, source: str) -> DictConfig:
    """Parse ``key=value`` into a nested mapping, the value as YAML.

    Raises:
        UserError: not of this form, or a number in base 8 or 60.
    """
    override = hide_passwords(override)
    if not re.match(r"[A-Za-z_][\w-]*(\.[\w-]+)*=", override):
        raise UserError(f"{source}: override {override!r} is not key=value; write for example seed=1")

    key, _, text = override.partition("=")
    try:
        if "#" in text:
            override = f"{key}={_with_comment(text)}"

        parsed = OmegaConf.from_dotlist([override])
        _refuse_other_bases(parsed, text, key, f"{source} with {override!r}")
        return parsed
    except (ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        problem = getattr(error, "problem", None) or first_line(error)
        raise UserError(f"{source}: override {override!r}: its value is not YAML: {problem}; quote it") from None


def _with_comment(text: str) -> str:
    """Put a value in quotes if YAML would take its end for a comment, as in ``runs/take #2``.

    Raises:
        ValueError: a comment follows a value that is not plain text.
    """
    node = yaml.compose(text)
    if node is not None and not text[node.end_mark.index :].strip():
        return text
    if node is not None and (not isinstance(node, yaml.ScalarNode) or node.style is not None):
        raise ValueError("it has a comment behind it")

    return json.dumps(text, ensure_ascii=False)


def _refuse_other_bases(loaded: DictConfig, text: str, key: str, source: str) -> None:
    """Refuse numbers that YAML 1.1 reads in base 8 (060 is 48) or 60 (1:30 is 90).

    Args:
        loaded: the parsed YAML.
        text: its source.
        key: dotted key whose value ``text`` is; empty for a whole file.
        source: begins the error line.

    Raises:
        UserError: names the key and the number.
    """
    written = dict(leaves(yaml.load(text, yaml.BaseLoader), key))  # every value as text
    for name, value in leaves(OmegaConf.to_container(loaded)):
        if isinstance(value, int | float) and re.match(r"[-+]?0[\d_]|.*:", str(written.get(name))):
            raise UserError(
                f"{source}: key {name!r}: YAML reads {written[name]} as {value}; "
                "write a number without ':' or a leading 0, or quote it"
            )


def leaves(value: Any, key: str = "", *, lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of a tree of dicts and, with ``lists``, lists."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name), lists=lists)
    elif lists and isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{key}[{index}]")
    else:
        yield key, value


def _refuse_resolvers(value: Any, source: str) -> None:
    """Refuse references other than ``${a.b}``: a resolver, as in ``${resolver:…}``, could read the environment.

    Raises:
        UserError: names the key and its text.
    """
    for key, text in leaves(value):
        if isinstance(text, str) and "${" in re.sub(r"\$\{[^${}:]*\}", "", text):
            raise UserError(
                f"{source}: key {key!r} = {text[:60]!r}: a reference may only name another key, such as ${{name}}; "
                "write the value itself"
            )


def _check_complete(merged: Any, source: str) -> None:
    """Check that no key lacks a value.

    Raises:
        UserError: names every missing key, in the order of the schema.
    """
    missing = [key for key, value in leaves(merged) if value == checks.MISSING_MARK]
    if len(missing) == 1:
        meanings = {key: f" ({text})" for key, _, text in describe()}
        raise UserError(f"{source}: key {missing[0]!r} is missing; give it a value{meanings.get(missing[0], '')}")

    if missing:
        raise UserError(f"{source}: keys {', '.join(map(repr, missing))} are missing; give them values")


def to_yaml(experiment: Experiment) -> str:
    """The resolved experiment as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(experiment)))


def _schema(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any], Any, bool]]:
    """Yield key, class, field, default and whether it is a section, of each field of ``section`` and those within."""
    kind: Any = type(section)
    for own in fields(section):
        default = getattr(section, own.name)
        inner, _ = checks.without_none(checks.hints(kind)[own.name])
        is_section = is_dataclass(inner)
        yield prefix + own.name, kind, own, default, is_section
        if is_section:
            yield from _schema(default or inner(), f"{prefix}{own.name}.")


def describe() -> Iterator[tuple[str, str, str]]:
    """Describe every key of the schema.

    Yields:
        The dotted key; type, default and limits; documentation.
    """
    for key, kind, own, default, is_section in _schema(Experiment()):
        text = _docs(kind)[own.name].replace("``", "`")
        if is_section:
            yield key, "" if default else " null by default", text
            continue

        form = str(own.type).replace("None", "null").replace("PluginConfig", "{name, params}")
        if default == checks.MISSING_MARK:
            form += ", required"
        else:
            form += f" = {json.dumps(default, default=asdict)}"

        if "check" in own.metadata:
            _, wanted = own.metadata["check"]
            form += f", {wanted}"

        yield key, f" {form}", text


@functools.cache
def changeable_keys() -> tuple[str, ...]:
    """Dotted keys of fields and sections that the schema lets differ between two starts."""
    return tuple(key for key, _, own, *_ in _schema(Experiment()) if own.metadata.get("changeable"))


def fingerprint(experiment: Experiment) -> str:
    """Hash of the settings that shape a result: neither ``changeable_keys`` nor numbers of steps.

    Keys at their defaults do not count, so that a release with more keys gives the same hash.
    """
    free = tuple(f"{key}." for key in changeable_keys())
    defaults = dict(leaves(asdict(Experiment()), lists=False))
    own = {}
    for key, value in leaves(asdict(experiment), lists=False):
        is_free = f"{key}.".startswith(free) or key.endswith(".max_steps")
        if value != defaults.get(key) and not is_free:
            own[key] = value

    return sha256_json(own)


@functools.cache
def _docs(kind: type) -> dict[str, str]:
    """Documentation of a dataclass's fields by name: the first paragraph below each, on one line."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    parent = kind.__base__
    found = dict(_docs(parent)) if is_dataclass(parent) else {}
    for statement, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = inspect.cleandoc(str(below.value.value))  # type: ignore[attr-defined]
            found[statement.target.id] = " ".join(text.partition("\n\n")[0].split())

    return found
