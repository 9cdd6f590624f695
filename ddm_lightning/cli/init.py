"""``init``: list the experiments that come with the package, or write one into a file of the user's."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

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
    """Write the experiment ``options.name`` to a new file, and print what to do next; without a name, list all.

    Raises:
        UserError: unknown name, an experiment that reads no folder of images, no such folder, or a file that exists.
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
    text = file.read_text(encoding="utf-8")
    if options.images is not None:
        text = _with_images(text, options.images)

    out = options.out or Path(file.name)
    if out.exists():
        raise UserError(f"{out}: exists; give another file: --out FILE")

    text = text.replace(f"experiments/{file.name}", shlex.quote(str(out)))
    create_file(out, text.encode())
    print(f"experiment: {out}")
    # The header names an extra to install, if one is needed, and the first command.
    for word, pattern in (("needs", r"pip install '.+?'"), ("next", r"python -m ddm_lightning .+?(?=  |$)")):
        found = re.search(pattern, text, re.MULTILINE)
        if found is not None:
            print(f"{word}: {found[0]}")


def _summary(text: str) -> str:
    """What an experiment trains, on which hardware and for how long, by the header of its file."""
    words = " ".join(text.replace("#", " ").split())
    found = re.match(r"(.+?)[.:] .*? Hardware, time (.+?)[.;] ", words)
    assert found is not None
    return f"{found[1]}. {found[2]}."


def _with_images(text: str, images: str) -> str:
    """Put the folder or URL ``images`` into an experiment that reads one."""
    path = json.dumps(images, ensure_ascii=False)
    text, count = re.subn(r"(name: imagefolder, params: {path: )[^,}]+", lambda found: found[1] + path, text)
    if not count:
        raise UserError("--images: this experiment reads no folder of images; use folder_4x")

    return text
