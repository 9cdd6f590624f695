"""Icons of the npm package @iconify/json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import require
from ddm_lightning.prepare.records import BrokenSample, Part, Record, block_of, block_parts

_LICENSES = ("MIT", "Apache-2.0", "CC-BY-4.0", "CC0-1.0")
_CATEGORIES = ("Logos", "Programming", "Flags / Maps")
# Styles and sizes of one icon: "cake-flat", "people-48". Skin tones: "artist-dark", "waving-hand-light-skin-tone".
_VARIANT = re.compile(r"(-(flat|duo|fill|\d+|\dx\d))+$")
_SKIN_TONE = re.compile(r"-(medium-light|medium-dark|light|medium|dark)(-skin-tone|$)")

_TRADEMARK = re.compile(
    "logo|brand|adobe|amazon|android|^apple-(1|2|flat|one)|chrome|facebook|google|instagram|linkedin|microsoft|paypal"
    "|spotify|tiktok|twitter|whatsapp|youtube"
)
_ALMOST_WHITE = 240


def concept(name: str) -> str:
    """Return what an icon shows, without its style, number or spelling: "japan" for "flag-for-japan-2"."""
    return re.sub("[^a-z]|^flag-(for-)?(flag-)?", "", _VARIANT.sub("", name.lower())) or name


class Icons:
    """Icons on white, with free licences and without trademarks, from the npm package ``@iconify/json``.

    Taken are the multicolour icon sets with one of ``licenses``, except those in ``skip_categories``. Within a set,
    brands, logos and skin-tone variants are skipped. The caption is the name in words ("red apple"). Many sets show
    the same concept, so all icons of one name are held out together.

    Args:
        path: the unpacked package, which holds ``collections.json`` and the folder ``json``.
        sets: names of icon sets, also of one colour; null for all multicolour ones that pass the filter.
        size: height and width in pixels.
        licenses: allowed licences, as SPDX identifiers.
        skip_categories: categories of icon sets, as in ``collections.json``: logos (trademarks), and flags, which the
            emoji sets have, too.
    """

    packages: tuple[str, ...] = ("resvg-py", "pillow")
    num_classes = 1

    def __init__(
        self,
        path: str,
        sets: Sequence[str] | None = None,
        size: int = 48,
        licenses: Sequence[str] = _LICENSES,
        skip_categories: Sequence[str] = _CATEGORIES,
    ) -> None:
        require("source 'icons'", "resvg-py", extra="mix")
        if size < 8:
            raise ValueError("size must be at least 8")

        self.path = Path(path)
        self.size = size
        try:
            self.version = json.loads((self.path / "package.json").read_text(encoding="utf-8"))["version"]
            collections = json.loads((self.path / "collections.json").read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UserError(
                f"source 'icons': {error.filename} is missing; "
                f"fetch and unpack the package: npm pack @iconify/json && mkdir -p {path} && tar -xzf "
                f"iconify-json-*.tgz -C {path} --strip-components=1"
            ) from None

        wanted = set(sets or ())
        allowed = {}
        for name, about in collections.items():
            is_free = about["license"].get("spdx") in licenses
            has_colours = about.get("palette") or name in wanted
            if is_free and has_colours and about.get("category") not in skip_categories:
                allowed[name] = about

        unknown = sorted(wanted - set(allowed))
        if unknown:
            raise ValueError(
                f"sets: {unknown[0]!r} is unknown or does not pass the filter; known: {', '.join(sorted(allowed))}"
            )

        self.sets: dict[str, Any] = {name: about for name, about in allowed.items() if sets is None or name in wanted}

    @cached_property
    def attribution(self) -> str:
        """The icon sets with their authors and licences."""
        credits = []
        for one in self.sets.values():
            credits.append(f"{one['name']} by {one['author']['name']} ({one['license']['spdx']})")

        return f"Icons: {', '.join(credits)}"

    def parts(self) -> list[Part]:
        """List blocks of the icons of each set."""
        parts: list[Part] = []
        for name in self.sets:
            names, _ = _icons(self.path, name)
            parts += block_parts(len(names), self.version, name, set=name)

        return parts

    def read(self, part: Part) -> Iterator[Record | BrokenSample]:
        """Render the icons of the block."""
        from resvg_py import svg_to_bytes

        names, icons = _icons(self.path, part.where["set"])
        block = block_of(part)
        for name in names[block.start : block.stop]:
            key = f"{part.where['set']}/{name}"
            svg = _svg({**icons, **icons["icons"][name]})
            try:
                png = svg_to_bytes(svg_string=svg, width=self.size, background="#ffffff", skip_system_fonts=True)
            except ValueError as error:
                yield BrokenSample(key, "damaged image", str(error))
                continue

            with Image.open(BytesIO(bytes(png))) as image:
                pixels = np.asarray(image.convert("RGB"))

            if pixels.min() > _ALMOST_WHITE:
                yield BrokenSample(key, "blank image")
                continue

            yield Record(key, pixels, _VARIANT.sub("", name).replace("-", " "), 0, concept(name))


# Parts of one set are read one after the other.
@lru_cache(maxsize=1)
def _icons(path: Path, name: str) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the icons to use, and the icon set."""
    icons = json.loads((path / "json" / f"{name}.json").read_text(encoding="utf-8"))
    categories = icons.get("categories", {})
    brands = {*categories.get("Brand", ()), *categories.get("Logos", ())}
    used = []
    for icon, about in icons["icons"].items():
        if not (about.get("hidden") or icon in brands or _TRADEMARK.search(icon) or _SKIN_TONE.search(icon)):
            used.append(icon)

    return used, icons


def _svg(icon: dict[str, Any]) -> str:
    """Return an SVG with the icon in the middle of a square."""
    width = icon.get("width", 16)
    height = icon.get("height", 16)
    side = max(width, height)
    left = icon.get("left", 0) - (side - width) / 2
    top = icon.get("top", 0) - (side - height) / 2
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {spaces} width="{side}" height="{side}" viewBox="{left} {top} {side} {side}">{icon["body"]}</svg>'
