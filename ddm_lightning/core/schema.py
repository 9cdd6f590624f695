"""Read YAML and check it against dataclasses as a schema, with one-line error messages.

OmegaConf merges and interpolates. Its type conversions are too lenient (a boolean becomes the text
"False", NaN is a valid learning rate) and its messages name no remedy, so check all values first.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import json
import math
import re
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddm_lightning.core.errors import UserError

MISSING_MARK = "???"
"""OmegaConf's mark for a field without a value."""


def read_yaml(path: Path) -> DictConfig:
    """Read a mapping from a YAML file, leaving references unresolved.

    Raises:
        UserError: the file is missing, a folder, not UTF-8, not YAML (with the line) or not a mapping.
    """
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; experiments/ has examples") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; give a YAML file in it") from None
    except yaml.MarkedYAMLError as error:
        where = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}: YAML syntax{where}: {error.problem}; fix the file") from None
    except (ValueError, OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        raise UserError(f"{path}: cannot be read: {problem}; give a YAML file in UTF-8") from None
    if not isinstance(loaded, DictConfig):
        raise UserError(f"{path}: the top level must be a mapping of keys; experiments/ has examples")
    return loaded


def read_override(override: str, source: str) -> DictConfig:
    """Parse ``key=value`` into a nested mapping, the value as YAML.

    Raises:
        UserError: not of this form.
    """
    key, _, _ = override.partition("=")
    if "=" not in override or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", key):
        raise UserError(f"{source}: override {override!r} is not key=value; write for example seed=1")
    try:
        return OmegaConf.from_dotlist([override])
    except (ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        problem = getattr(error, "problem", None) or first_line(error)
        raise UserError(f"{source}: override {override!r}: its value is not YAML: {problem}; quote it") from None


def first_line(error: BaseException) -> str:
    """First line of an error's message, at most 500 characters; its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]


def check(value: Any, kind: Any, key: str, source: str, references: bool = True) -> None:
    """Check ``value`` against ``kind``; missing values pass.

    Args:
        value: parsed YAML: dicts, lists, text, numbers, booleans, None.
        kind: a dataclass, ``int``, ``float``, ``bool``, ``str``, ``list[...]``, ``dict[str, Any]``, ``Any``,
            or a union of one of these and None.
        key: dotted key of ``value``, empty at the top.
        source: begins the error line, such as the file's name.
        references: whether a reference ``${…}`` passes for any kind.

    Raises:
        UserError: an unknown key or a wrong type.
    """
    optional = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    if optional:
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    is_reference = references and isinstance(value, str) and "${" in value
    if is_reference or value == MISSING_MARK or (optional and value is None):
        return
    origin = typing.get_origin(kind) or kind
    if _is_section(kind):
        _check_section(value, kind, key, source, references)
    elif origin is list:
        if not isinstance(value, list):
            _refuse(source, key, "a list", value, "write it as [a, b]")
        for index, item in enumerate(value):
            check(item, typing.get_args(kind)[0], f"{key}[{index}]", source, references)
    elif origin is dict:
        if not isinstance(value, dict):
            _refuse(source, key, "a mapping", value, "write it as {name: value}")
        _check_plain(value, key, source)
    elif kind is Any:
        _check_plain(value, key, source)
    elif problem := _scalar_problem(value, kind):
        _refuse(source, key, *problem)


def _check_section(value: Any, kind: Any, key: str, source: str, references: bool) -> None:
    kinds = hints(kind)
    if not isinstance(value, dict):
        remedy = f"write it as {{name: {value}}}" if "name" in kinds and isinstance(value, str) else _known(kinds)
        _refuse(source, key, "a section of keys", value, remedy)
    for name, inner in value.items():
        below = f"{key}.{name}" if key else str(name)
        if name not in kinds:
            near = difflib.get_close_matches(str(name), list(kinds), n=1)
            guess = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"{source}: unknown key {below!r}; {guess}{_known(kinds)}")
        check(inner, kinds[name], below, source, references)


def _check_plain(value: Any, key: str, source: str) -> None:
    """Check parameters of plug-ins, which are stored as JSON."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                _refuse(source, f"{key}.{name}", "a text as a key", name, "put the key into quotes")
            _check_plain(inner, f"{key}.{name}", source)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(item, f"{key}[{index}]", source)
    elif isinstance(value, float) and not math.isfinite(value):
        _refuse(source, key, "a finite number", value, "change the value")
    elif value is not None and not isinstance(value, str | int | float):
        _refuse(source, key, "text, a number, true, false or null", value, "change the value")


def _scalar_problem(value: Any, kind: type) -> tuple[str, Any, str] | None:
    """Wanted type, value and remedy; None if ``value`` fits."""
    if kind is bool and not isinstance(value, bool):
        return "true or false", value, "write true or false, without quotes"
    if kind is str and not isinstance(value, str):
        is_plain = isinstance(value, bool | int | float)
        remedy = "put it into quotes (YAML reads yes, no, 1e3 and 12:30 as other types)" if is_plain else "give a text"
        return "a text", value, remedy
    if kind is int and (not isinstance(value, int) or isinstance(value, bool)):
        is_whole = isinstance(value, float) and value.is_integer()
        return "a whole number", value, f"write {int(value)}" if is_whole else "give digits only, without quotes"
    if kind is float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return "a number", value, "give a number, without quotes"
        if not abs(value) <= sys.float_info.max:
            return "a finite number", value, "change the value"
    return None


def _refuse(source: str, key: str, wanted: str, value: Any, remedy: str) -> typing.NoReturn:
    shown = "null" if value is None else repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    where = f"key {key!r}: " if key else ""
    raise UserError(f"{source}: {where}must be {wanted}, is {shown}; {remedy}")


def _known(kinds: dict[str, Any]) -> str:
    return f"known there: {', '.join(kinds)}"


def build(value: Any, kind: Any) -> Any:
    """Build the dataclass ``kind`` from checked, resolved and complete dicts."""
    if typing.get_origin(kind) is typing.Union or isinstance(kind, types.UnionType):
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if typing.get_origin(kind) is list:
        return [build(item, typing.get_args(kind)[0]) for item in value]
    if not _is_section(kind) or value is None:
        return float(value) if kind is float and value is not None else value
    kinds = hints(kind)
    return kind(**{name: build(inner, kinds[name]) for name, inner in value.items()})


def check_complete(value: Any, kind: Any, source: str) -> None:
    """Check that no key of ``value``, nested dicts of the dataclass ``kind``, lacks a value.

    Raises:
        UserError: names every missing key, in the order of the schema.
    """
    missing = list(_missing_keys(value, ""))
    if len(missing) == 1:
        meaning = doc(kind, missing[0])
        raise UserError(f"{source}: key {missing[0]!r} is missing; give it a value{f' ({meaning})' if meaning else ''}")
    if missing:
        raise UserError(f"{source}: keys {', '.join(map(repr, missing))} are missing; give them values")


def _missing_keys(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _missing_keys(inner, f"{key}.{name}" if key else str(name))
    elif value == MISSING_MARK:
        yield key


def _is_section(kind: Any) -> bool:
    return is_dataclass(kind)


@functools.cache
def hints(kind: Any) -> dict[str, Any]:
    """Types of a dataclass's fields by name."""
    resolved = typing.get_type_hints(kind)
    return {field.name: resolved[field.name] for field in fields(kind)}


@functools.cache
def docs(kind: type) -> dict[str, str]:
    """Documentation of a dataclass's fields by name: the first paragraph below each, on one line."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
            text = inspect.cleandoc(str(following.value.value))  # type: ignore[attr-defined]
            found[statement.target.id] = " ".join(text.partition("\n\n")[0].split())
    return found


def doc(kind: Any, key: str) -> str:
    """Documentation of the dotted ``key`` of the dataclass ``kind``; empty inside plug-in parameters."""
    head, _, rest = key.partition(".")
    if not _is_section(kind) or head not in hints(kind):
        return ""
    if not rest:
        return docs(kind).get(head, "")
    inner = hints(kind)[head]
    options = [option for option in typing.get_args(inner) if _is_section(option)]
    return doc(options[0] if options else inner, rest)


def describe(section: Any, prefix: str = "") -> Iterator[str]:
    """Type, default and documentation of each key in ``section``, a dataclass with the default values."""
    whole: Any = type(section)
    for name, kind in hints(whole).items():
        key, default, text = prefix + name, getattr(section, name), docs(whole)[name].replace("``", "`")
        inner = next((option for option in (kind, *typing.get_args(kind)) if _is_section(option)), None)
        if inner is not None:
            yield f"{key}:{'' if default else ' null by default'}\n    {text}"
            yield from describe(default or inner(), f"{key}.")
        else:
            form = inspect.formatannotation(kind).replace("typing.", "").replace("None", "null")
            value = ", required" if default == MISSING_MARK else f" = {json.dumps(default)}"
            yield f"{key}: {form}{value}\n    {text}"
