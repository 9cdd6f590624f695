"""Several sources as one."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.records import BrokenSample, Part, Record, Source, count_samples
from ddm_lightning.prepare.sources.urls import PARAMS


@dataclass(frozen=True)
class _Entry:
    """An entry of the list."""

    name: str
    params: dict[str, Any] | None = None
    prefix: str | None = None
    max_samples: int | None = checks.option(None, low=1)


class _Child(NamedTuple):
    name: str
    """Unique in the mixture: the prefix, or else the name of the source, with a number from the second of its kind."""
    source: Source
    entry: _Entry


class Mixture:
    """Several sources as one; the label is the number of the source in the list.

    Samples of equal groups are held out together, even if they come from different sources. Keys begin with the prefix,
    or else with the name of the source; from the second of a kind on with a number, too ("emoji-2"). Sources of
    different image sizes need ``prepare.images.size``.

    Args:
        sources: one mapping per source: ``name`` and ``params`` as of ``prepare.source``; ``prefix``, a word put before
            each caption ("photo: a cat"); ``max_samples``, the number of samples to use at most. A hash of the keys
            chooses them. Each part gives its share, which is kept in memory while the part is read; all parts give
            equal shares if the size of one is unknown before reading.
        max_samples: number of samples to use at most of all sources together, each in proportion; null for all.
    """

    least_size: Any = None
    """Handed on to the sources that take it."""

    def __init__(self, sources: Sequence[Mapping[str, Any]], max_samples: int | None = None) -> None:
        if max_samples is not None and max_samples < 1:
            raise ValueError(f"max_samples = {max_samples} must be at least 1")

        self.max_samples = max_samples
        self._children: list[_Child] = []
        times = Counter[str]()
        names = set[str]()
        for number, given in enumerate(sources):
            place = f"{PARAMS}.sources[{number}]"
            checks.check(given, _Entry, place, "source 'mixture'")
            if "name" not in given:
                raise UserError(f"key {place!r}: needs the name of a source; write {{name: …, params: …}}")

            entry = _Entry(**given)
            label = entry.prefix or entry.name
            times[label] += 1
            unique = label if times[label] == 1 else f"{label}-{times[label]}"
            if unique in names:
                raise UserError(f"key '{place}': another source is called {unique!r}; give each a prefix of its own")

            names.add(unique)
            self._children.append(_Child(unique, SOURCES.build(entry.name, entry.params or {}), entry))

        if not self._children:
            raise UserError(f"key '{PARAMS}.sources': is empty; list the sources to mix")

        self.num_classes = len(self._children)
        self.class_names = [child.name for child in self._children]
        self.packages = tuple(dict.fromkeys(name for child in self._children for name in child.source.packages))
        credits = dict.fromkeys(child.source.attribution for child in self._children if child.source.attribution)
        self.attribution = "; ".join(credits)

    def parts(self) -> list[Part]:
        """List the parts of all sources, one source after the other."""
        parts = []
        for number, child in enumerate(self._children):
            wrapped = []
            for part in child.source.parts():
                where = {"source": number, "part": asdict(part)}
                wrapped.append(replace(part, name=f"{child.name}/{part.name}", where=where))

            parts += _limit(wrapped, child.entry.max_samples)

        return _limit(parts, self.max_samples)

    def read(self, part: Part) -> Iterator[Record | BrokenSample]:
        """Yield the samples of one part of one source."""
        number = part.where["source"]
        quota = part.where.get("quota")
        child = self._children[number]
        if hasattr(child.source, "least_size"):
            child.source.least_size = self.least_size

        found: Iterable[Record | BrokenSample] = child.source.read(Part(**part.where["part"]))
        if quota is not None:
            found = _choose(found, quota)

        for one in found:
            key = f"{child.name}/{one.key}"
            if isinstance(one, BrokenSample):
                yield replace(one, key=key)
                continue

            caption = ": ".join(filter(None, [child.entry.prefix, one.caption]))
            yield replace(one, key=key, caption=caption, label=number)


def _limit(parts: list[Part], max_samples: int | None) -> list[Part]:
    """Divide ``max_samples`` among parts in proportion to their sizes."""
    total = count_samples(parts)
    if max_samples is None or (total is not None and total <= max_samples):
        return parts

    sizes = [1 if total is None else part.num_samples or 0 for part in parts]
    limited = []
    before = 0
    for part, size in zip(parts, sizes, strict=True):
        # Differences of rounded sums add up to ``max_samples``.
        quota = (before + size) * max_samples // sum(sizes) - before * max_samples // sum(sizes)
        before += size
        if quota:
            num = None if part.num_samples is None else quota
            fingerprint = f"{part.fingerprint}; {quota} of its samples"
            where = {**part.where, "quota": quota}
            limited.append(replace(part, fingerprint=fingerprint, num_samples=num, where=where))

    return limited


def _choose(found: Iterable[Record | BrokenSample], num: int) -> list[Record | BrokenSample]:
    """Return the ``num`` samples whose keys have the lowest hashes, in their order."""
    numbered = heapq.nsmallest(num, enumerate(found), key=lambda item: hashlib.sha256(item[1].key.encode()).digest())
    return [one for _, one in sorted(numbered, key=lambda item: item[0])]
