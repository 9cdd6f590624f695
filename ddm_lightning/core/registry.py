"""Find plug-ins by name: built-in ones, and those of other packages through entry points.

Files (experiments, artifacts) carry names, never import paths, so that an untrusted file can only
run code that is installed on this machine.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any, TypeVar

from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError, first_line, line_of

Factory = TypeVar("Factory", bound=Callable[..., Any])


class Registry:
    """Factories of one kind (``expert``, ``source`` …) by name.

    Args:
        kind: word for error lines.
        group: entry-point group in which other packages register factories.
        package: package whose modules register built-in factories when imported, on first use; None for none.
        read_names: whether ``names`` reads the names off the decorators in the modules' source and imports nothing.
    """

    def __init__(self, kind: str, group: str, package: str | None = None, read_names: bool = False) -> None:
        self.kind = kind
        self.group = group
        self._package = package
        self._read_names = read_names
        self._registered: dict[str, Callable[..., Any]] = {}

    @functools.cached_property
    def _built_in(self) -> dict[str, Callable[..., Any]]:
        if self._package is not None:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")

        return self._registered

    def _file_names(self) -> list[str]:
        folder = Path(__file__).parents[2].joinpath(*(self._package or "").split("."))
        code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("[!_]*.py"))
        return re.findall(r'^@[A-Z]+\.register\("(.+)"\)', code, re.MULTILINE)

    def register(self, name: str) -> Callable[[Factory], Factory]:
        """Decorator that registers a class or function as the built-in ``name``."""

        def add(factory: Factory) -> Factory:
            if name in self._registered:
                raise ValueError(f"two built-in {self.kind}s are called {name!r}")

            self._registered[name] = factory
            return factory

        return add

    def names(self) -> list[str]:
        """All known names, sorted."""
        names = {entry.name for entry in entry_points(group=self.group)}
        names.update(self._file_names() if self._read_names else self._built_in)
        return sorted(names)

    def get(self, name: str) -> Callable[..., Any]:
        """Find the factory ``name``; a built-in wins over an entry point.

        Raises:
            UserError: ``name`` is unknown, or its package cannot be imported.
        """
        if name in self._built_in:
            return self._built_in[name]

        for entry in entry_points(group=self.group):
            if entry.name == name:
                try:
                    return entry.load()
                except (ImportError, AttributeError) as error:
                    package = entry.dist.name if entry.dist else entry.value
                    raise UserError(
                        f"{self.kind} {name!r} of the package {package!r} cannot be imported: {error}; "
                        "fix or reinstall that package"
                    ) from error

        raise UserError(f"unknown {self.kind} {name!r}; {self.known()}")

    def known(self) -> str:
        """Known names and how to get others, for error lines."""
        return (
            f"known: {', '.join(self.names()) or 'none'}; check the spelling, "
            f"or install the package that registers it in the entry-point group {self.group!r}"
        )

    def build(self, name: str, params: dict[str, Any], **context: Any) -> Any:
        """Call the factory ``name`` with the user's ``params`` and the trainer's ``context``.

        Raises:
            UserError: ``check`` or the factory refuses ``params``.
        """
        self.check(name, params, **context)
        try:
            return self.get(name)(**context, **params)
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:  # also torch's, for a width of 0
            if line_of(error) is not None:  # out of memory
                raise

            raise UserError(f"{self.kind} {name!r} refuses its params: {first_line(error)}; change them") from error

    def check(self, name: str, params: dict[str, Any], **context: Any) -> None:
        """Check ``params`` against the signature of the factory ``name``, without calling it.

        Only the keys of ``context`` matter. A factory with ``**params`` may name the dataclass of these in its
        attribute ``params``. This one, or a factory that is a dataclass, may limit them by ``checks.option``.

        Raises:
            UserError: unknown name; unknown, missing or wrongly typed parameter, or one outside its choices or range.
        """
        factory = self.get(name)
        named = {}
        is_open = False
        for key, parameter in parameters_of(factory).items():
            if parameter.kind in _BY_NAME:
                named[key] = parameter
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                is_open = True

        for key in params:
            if key in context or not (key in named or is_open):
                offered = ", ".join(key for key in named if key not in context) or "none"
                raise UserError(f"{self.kind} {name!r} has no parameter {key!r}; it takes: {offered}")

        for key in context:
            if not (key in named or is_open):
                raise UserError(f"{self.kind} {name!r} does not take {key!r}, as every {self.kind} must; add it")

        for key, parameter in named.items():
            if parameter.default is inspect.Parameter.empty and key not in params and key not in context:
                raise UserError(f"{self.kind} {name!r} needs the parameter {key!r}; add it to its params")
            if key in params:
                checks.check(params[key], parameter.annotation, f"params.{key}", f"{self.kind} {name!r}")


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters of a factory, with the fields of its dataclass ``params`` in place of its ``**params``."""
    try:
        found = dict(inspect.signature(factory, eval_str=True).parameters)
    except NameError:  # an annotation imported for type checkers only; leave types unchecked
        found = dict(inspect.signature(factory).parameters)

    if is_dataclass(factory):
        for own in fields(factory):
            if own.name in found:
                one = found[own.name]
                found[own.name] = one.replace(annotation=checks.narrowed(one.annotation, own))

    options = getattr(factory, "params", None)
    if isinstance(options, type) and is_dataclass(options):
        found = {name: one for name, one in found.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
        found |= parameters_of(options)

    return found


EXPERTS = Registry("expert", "ddm_lightning.experts", "ddm_lightning.networks")
ROUTERS = Registry("router", "ddm_lightning.routers", "ddm_lightning.networks")
SOURCES = Registry("source", "ddm_lightning.sources", "ddm_lightning.prepare.sources")
IMAGE_ENCODERS = Registry("image encoder", "ddm_lightning.image_encoders", "ddm_lightning.encoders")
CAPTION_ENCODERS = Registry("caption encoder", "ddm_lightning.caption_encoders", "ddm_lightning.encoders")
FEATURES = Registry("feature network", "ddm_lightning.features", "ddm_lightning.encoders")
STRATEGIES = Registry("strategy", "ddm_lightning.strategies", "ddm_lightning.ensemble.strategies", read_names=True)
SOLVERS = Registry("solver", "ddm_lightning.solvers", "ddm_lightning.flow.solvers", read_names=True)
CALLBACKS = Registry("callback", "ddm_lightning.callbacks", "ddm_lightning.training", read_names=True)
LAUNCHERS = Registry("launcher", "ddm_lightning.launchers", "ddm_lightning.islands.launchers", read_names=True)
METRICS = Registry("metric", "ddm_lightning.metrics", "ddm_lightning.evaluation.metrics", read_names=True)


def require(wanted_by: str, *names: str, extra: str = "demo") -> None:
    """Check that the distributions ``names``, which ``extra`` installs, are there.

    Raises:
        UserError: one is not installed.
    """
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            raise UserError(
                f"{wanted_by} needs the package {name!r}; install it with: pip install 'ddm_lightning[{extra}]'"
            ) from None


def file_of(name: str, relative: str) -> Path:
    """Path of a file in the distribution ``name``, which is not imported."""
    return Path(str(distribution(name).locate_file(relative)))
