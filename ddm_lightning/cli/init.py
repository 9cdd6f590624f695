"""``init``: list the experiments that come with the package, or write one into a file of the user's."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shlex
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from omegaconf import OmegaConf

from ddm_lightning.config.load import leaves, load_experiment, read_override
from ddm_lightning.core.errors import UserError, note
from ddm_lightning.core.files import create_file
from ddm_lightning.core.registry import require


def shipped() -> dict[str, Path]:
    """Files of the experiments that come with the package, by name."""
    package = Path(__file__).parents[1]
    folder = package / "experiments"
    if not folder.exists():  # a checkout has them beside the package
        folder = package.parent / "experiments"

    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def list_experiments() -> None:
    """Print a line on each shipped experiment: its name, what it trains, hardware and time."""
    for name, path in shipped().items():
        words = " ".join(path.read_text(encoding="utf-8").replace("#", " ").split())
        found = re.match(r"(.+?)[.:] .*? Hardware, time (.+?)[.;] ", words)
        assert found is not None
        print(f"{name:<12} {found[1]}. {found[2]}.")

    print("to write one into this folder: python -m ddm_lightning init NAME")


def write_experiment(options: argparse.Namespace) -> None:
    """Write the experiment ``options.name`` with the given settings to a new file, and say what to do next.

    Raises:
        UserError: unknown name, a setting that is refused, no folder of images, or a file that exists.
    """
    files = shipped()
    if options.name not in files:
        near = difflib.get_close_matches(options.name, files, n=1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"no experiment is called {options.name!r}; {guess}known: {', '.join(files)}")

    file = files[options.name]
    overrides = list(options.overrides)
    if options.images is not None:
        overrides.append(f"prepare.source.params.path={json.dumps(options.images, ensure_ascii=False)}")

    experiment = load_experiment(file, overrides)
    if options.images is not None:
        _check_images(options.images, experiment.prepare.source.name)

    out = options.out or Path(file.name)
    if out.exists():
        raise UserError(f"{out}: exists; give another file: --out FILE")

    text = file.read_text(encoding="utf-8").replace(f"experiments/{file.name}", shlex.quote(str(out)))
    written = with_settings(text, overrides)
    with TemporaryDirectory() as folder:
        draft = Path(folder, file.name)
        draft.write_text(written, encoding="utf-8")
        if load_experiment(draft) != experiment:
            raise UserError(f"{file.name}: {' '.join(overrides)}: write it without, then change the file by hand")

    create_file(out, written.encode())
    print(f"experiment: {out}")
    _print_next(options.name, text)


def _check_images(images: str, source: str) -> None:
    if source != "imagefolder":
        raise UserError(f"--images: its source is {source!r}, which reads no folder of images; use folder_4x")

    is_there = "://" in images or Path(images).is_dir()
    if not images or not is_there:
        raise UserError(f"--images {images}: no such folder; give the one that holds your images")


def _print_next(name: str, text: str) -> None:
    """Print the first command of the header, and whether an extra is missing that the header names."""
    extras = re.search(r"ddm_lightning\[([\w,]+)\]", text)
    if extras is not None:
        condition = extras[1].replace(",", "|")
        with suppress(PackageNotFoundError):  # in a checkout that is not installed
            required = "\n".join(requires("ddm_lightning") or ())
            packages = re.findall(rf"^([\w.-]+).*; extra == .(?:{condition}).$", required, re.MULTILINE)
            try:
                require(name, *packages, extra=extras[1])
            except UserError as error:
                note(str(error))

    command = re.search(r"python -m ddm_lightning .+?(?=  |$)", text, re.MULTILINE)
    assert command is not None
    print(f"next: {command[0]}")


def with_settings(text: str, overrides: list[str]) -> str:
    """Set ``key=value`` pairs in the YAML ``text`` and leave its other lines, comments too, as they are."""
    # Names first, as a new plug-in drops the params of the former one.
    for override in sorted(overrides, key=lambda text: not text.partition("=")[0].endswith(".name")):
        for key, value in leaves(OmegaConf.to_container(read_override(override, "init")), lists=False):
            if key.endswith(".name"):
                key = key.removesuffix(".name")
                value = {"name": value}

            text = _with_value(text, key.split("."), value)

    return text


def _with_value(text: str, names: list[str], value: Any) -> str:
    """Set one key, given by the names of its sections and its own."""
    node = yaml.compose(text)
    while names and isinstance(node, yaml.MappingNode):
        inner = {key.value: child for key, child in node.value}
        if names[0] not in inner:
            break

        node = inner[names[0]]
        names = names[1:]

    assert node is not None
    start = node.start_mark.index
    if isinstance(node, yaml.MappingNode) and names:
        new = f"{names[0]}: {_flow(names[1:], value)}"
        if node.flow_style:
            return f"{text[: start + 1]}{new}, {text[start + 1 :]}"

        return f"{text[:start]}{new}\n{' ' * node.start_mark.column}{text[start:]}"

    old = text[start : node.end_mark.index].rstrip()
    return text[:start] + _flow(names, value) + text[start + len(old) :]


def _flow(names: list[str], value: Any) -> str:
    """YAML of a value within sections that the file lacks, on one line."""
    for name in reversed(names):
        value = {name: value}

    return json.dumps(value, ensure_ascii=False)
