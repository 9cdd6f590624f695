"""``init``: list the experiments that come with the package, or write one into a file of the user's."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from omegaconf import OmegaConf

from ddm_lightning.config.load import load_experiment, read_override
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import create_file


def shipped() -> dict[str, Path]:
    """Files of the experiments that come with the package, by name."""
    package = Path(__file__).parents[1]
    folder = package / "experiments"
    if not folder.exists():  # a checkout has them beside the package
        folder = package.parent / "experiments"

    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def init(options: argparse.Namespace) -> None:
    """Write the experiment ``options.name`` with the given settings to a new file; without a name, list all.

    Raises:
        UserError: unknown name, a setting that is refused, no folder of images, or a file that exists.
    """
    files = shipped()
    if options.name is None:
        for name, file in files.items():
            print(f"{name:<12} {_summary(file.read_text(encoding='utf-8'))}")

        return

    if options.name not in files:
        guess = checks.guess(options.name, files)
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
    for override in overrides:
        text = _edited(text, override)

    with TemporaryDirectory() as folder:
        draft = Path(folder, file.name)
        draft.write_text(text, encoding="utf-8")
        if load_experiment(draft) != experiment:
            raise UserError(f"{file.name}: {' '.join(overrides)}: write it without, then change the file by hand")

    create_file(out, text.encode())
    print(f"experiment: {out}")
    _print_next(text)


def _summary(text: str) -> str:
    """What an experiment trains, on which hardware and for how long, by the header of its file."""
    words = " ".join(text.replace("#", " ").split())
    found = re.match(r"(.+?)[.:] .*? Hardware, time (.+?)[.;] ", words)
    assert found is not None
    return f"{found[1]}. {found[2]}."


def _check_images(images: str, source: str) -> None:
    if source != "imagefolder":
        raise UserError(f"--images: its source is {source!r}, which reads no folder of images; use folder_4x")

    is_there = "://" in images or Path(images).is_dir()
    if not images or not is_there:
        raise UserError(f"--images {images}: no such folder; give the one that holds your images")


def _print_next(text: str) -> None:
    """Print the extra that the header names, if a package of it is missing, and the header's first command."""
    extra = re.search(r"ddm_lightning\[([\w,]+)\]", text)
    if extra is not None:
        names = extra[1].replace(",", "|")
        try:
            required = "\n".join(requires("ddm_lightning") or ())
            for package in re.findall(rf"^([\w.-]+).*; extra == .(?:{names}).$", required, re.MULTILINE):
                distribution(package)
        except PackageNotFoundError:
            print(f"first: pip install '{extra[0]}'")

    command = re.search(r"python -m ddm_lightning .+?(?=  |$)", text, re.MULTILINE)
    assert command is not None
    print(f"next: {command[0]}")


def _edited(text: str, override: str) -> str:
    """Set ``key=value`` in the YAML ``text`` and leave its other lines, comments too, as they are."""
    node: Any = yaml.compose(text)
    value: Any = OmegaConf.to_container(read_override(override, "init"))
    section = node
    name = ""
    while isinstance(node, yaml.MappingNode) and value and isinstance(value, dict):
        section = node
        name, value = next(iter(value.items()))
        node = {key.value: inner for key, inner in section.value}.get(name)

    new = json.dumps(value, ensure_ascii=False)
    if node is not None:
        start = node.start_mark.index
        old = text[start : node.end_mark.index].rstrip()
        return text[:start] + new + text[start + len(old) :]

    start = section.start_mark.index  # a new key comes first
    if section.flow_style:
        return f"{text[: start + 1]}{name}: {new}, {text[start + 1 :]}"

    return f"{text[:start]}{name}: {new}\n{' ' * section.start_mark.column}{text[start:]}"
