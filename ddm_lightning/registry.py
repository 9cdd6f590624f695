"""Plug-ins by name: built-in ones and those that other packages offer through entry points.

A name is all that files carry (experiments, artifacts), never an import path, so a file from a
stranger can start nothing that this machine's owner did not install.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from ddm_lightning.errors import UserError

Factory = TypeVar("Factory", bound=Callable[..., Any])


class Registry:
    """Factories of one kind (``"expert"``, ``"source"`` …) by name.

    Args:
        kind: the word used in error lines.
        group: the entry-point group in which other packages register factories.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._built_in: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Factory], Factory]:
        """Class or function decorator that adds a built-in under ``name``."""

        def add(factory: Factory) -> Factory:
            if name in self._built_in:
                raise ValueError(f"two built-in {self.kind}s are called {name!r}")
            self._built_in[name] = factory
            return factory

        return add

    def names(self) -> list[str]:
        """All known names, sorted."""
        return sorted({*self._built_in, *(entry.name for entry in entry_points(group=self.group))})

    def get(self, name: str) -> Callable[..., Any]:
        """The factory called ``name``; a built-in wins over an entry point of the same name.

        Raises:
            UserError: nobody registered ``name``.
        """
        if name in self._built_in:
            return self._built_in[name]
        for entry in entry_points(group=self.group):
            if entry.name == name:
                factory: Callable[..., Any] = entry.load()
                return factory
        raise UserError(
            f"unknown {self.kind} {name!r}; known: {', '.join(self.names()) or 'none'} "
            f"(other packages add to the entry-point group {self.group!r})"
        )

    def build(self, name: str, params: dict[str, Any], **context: Any) -> Any:
        """Call the factory ``name`` with the user's ``params`` and the trainer's ``context``.

        Raises:
            UserError: unknown name, unknown or missing parameter, or a ``ValueError`` of the factory.
        """
        factory = self.get(name)
        self.check(name, params, **context)
        try:
            return factory(**context, **params)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.kind} {name!r} refuses its params: {error}") from error

    def check(self, name: str, params: dict[str, Any], **context: Any) -> None:
        """Refuse ``params`` that the factory ``name`` does not take, without calling it."""
        factory = self.get(name)
        accepted = inspect.signature(factory).parameters
        offered = [key for key in accepted if key not in context]
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
            return
        for key in params:
            if key in context or key not in accepted:
                raise UserError(f"{self.kind} {name!r} has no parameter {key!r}; it takes: {', '.join(offered) or 'none'}")
