"""Folders of MDS shards, the format of MosaicML Streaming, version 2."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ddm_lightning.core.compat import ensure_torchvision_importable
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.records import Broken, Part, Record
from ddm_lightning.prepare.sources.columns import Columns, Labels
from ddm_lightning.prepare.sources.urls import Files, block_of, block_parts, is_absolute, read_anywhere

_INDEX = "index.json"
_PICTURES = ("jpeg", "png", "bytes", "pil", "str")


@SOURCES.register("mds")
class Mds:
    """Samples of the shards that an ``index.json`` in the folder, or in folders in it, lists.

    The key is ``<shard>:<sample>`` or what ``key_column`` says; compressed shards are decompressed in memory.

    Args:
        path: the folder, local or a URL.
        image_column: pictures as ``jpeg``, ``png``, ``pil``, as ``bytes`` of an encoded picture, or as paths (``str``).
        caption_column: text; of several columns the first that is not empty; null for none.
        label_column: class; null for none.
        key_column: unique name of a sample; null for its place.
        group_column: what is held out together; null for none.
        num_classes: labels are numbers below it.
        class_names: labels are these words, numbered from 0.
    """

    packages: tuple[str, ...] = ("pillow", "mosaicml-streaming")
    attribution = ""

    def __init__(
        self,
        path: str,
        image_column: str = "image",
        caption_column: str | Sequence[str] | None = "caption",
        label_column: str | None = None,
        key_column: str | None = None,
        group_column: str | None = None,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
    ) -> None:
        self.columns = Columns(image_column, caption_column, label_column, key_column, group_column)
        self.labels = Labels(label_column, num_classes, class_names)
        self.num_classes, self.class_names = self.labels.num_classes, self.labels.class_names
        self.files = Files(path)

    def parts(self) -> list[Part]:
        """Blocks of samples of one shard.

        Raises:
            UserError: no index, a missing shard, or one that lacks a column.
        """
        parts: list[Part] = []
        for raw, shard in self._shards.items():
            stored = self._stored(raw, shard)
            fingerprint = f"{self.files.states[stored]}; {shard['raw_data']}"
            parts += [
                replace(block, where={**block.where, "shard": raw})
                for block in block_parts(shard["samples"], fingerprint, prefix=raw)
            ]
        return parts

    def read(self, part: Part) -> Iterator[Record | Broken]:
        """Samples of the block; all are ``Broken`` if the shard is damaged."""
        raw, numbers = part.where["shard"], block_of(part)
        shard = self._shards[raw]
        try:
            samples = self._samples(raw, shard, numbers)
        except Exception as error:  # each compression has errors of its own
            if isinstance(error, UserError):
                raise
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            yield from (Broken(f"{raw}:{number}", "damaged shard", problem) for number in numbers)
            return
        for number, sample in zip(numbers, samples, strict=True):
            yield self._record(sample, shard, f"{raw}:{number}")

    @cached_property
    def _shards(self) -> dict[str, dict[str, Any]]:
        """Path of the uncompressed shard -> its entry in the index."""
        shards = {}
        for index in self.files.ending(_INDEX):
            folder = index.removesuffix(_INDEX)
            place = self.files.shown(index)
            try:
                entries = json.loads(self.files.content(index))["shards"]
                for entry in entries:
                    shards[folder + entry["raw_data"]["basename"]] = {**entry, "folder": folder}
                    is_known = (entry["format"], entry["version"]) == ("mds", 2)
                    encodings = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
                    if not is_known:
                        raise UserError(f"{place}: only MDS of version 2 is known; write the shards anew")
                    self._check(encodings, place)
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{place} is no index of MDS shards: {error!r}; change the path") from None
        return shards

    def _check(self, encodings: dict[str, str], place: str) -> None:
        self.columns.check(encodings, place)
        encoding = encodings[self.columns.image]
        if encoding not in _PICTURES:
            raise UserError(
                f"key 'prepare.source.params.image_column': {self.columns.image!r} of {place} holds {encoding}; "
                f"pictures are {', '.join(_PICTURES)}"
            )
        for name in self.columns.names:
            if encodings[name] == "pkl":  # unpickling runs what a stranger wrote
                raise UserError(f"{place}: column {name!r} is pickled; write the shards anew without pkl")

    def _stored(self, raw: str, shard: dict[str, Any]) -> str:
        """The file in which the shard is there."""
        zipped = shard.get("zip_data")
        for name in (raw, shard["folder"] + zipped["basename"] if zipped else raw):
            if name in self.files.states:
                return name
        raise self.files.unreadable(FileNotFoundError(), raw)

    def _samples(self, raw: str, shard: dict[str, Any], numbers: range) -> list[bytes]:
        """The samples as they are stored."""
        stored = self._stored(raw, shard)
        if stored == raw:
            with self.files.open(raw) as file:
                num_samples = int.from_bytes(file.read(4), "little")
                offsets = np.frombuffer(file.read(4 * (num_samples + 1)), np.uint32).astype(np.int64)
                start = int(offsets[numbers.start])
                file.seek(start)
                data = file.read(int(offsets[numbers.stop]) - start)
        else:
            ensure_torchvision_importable()
            from streaming.base.compression import decompress

            whole = decompress(shard["compression"], self.files.content(stored))
            num_samples = int.from_bytes(whole[:4], "little")
            offsets = np.frombuffer(whole[4 : 8 + 4 * num_samples], np.uint32).astype(np.int64)
            start = int(offsets[numbers.start])
            data = whole[start : int(offsets[numbers.stop])]
        bounds = offsets[numbers.start : numbers.stop + 1] - start
        if num_samples != shard["samples"] or (np.diff(bounds) < 0).any() or bounds[-1] != len(data):
            raise ValueError("its length is not what it says")
        return [data[first:last] for first, last in pairwise(bounds.tolist())]

    def _record(self, sample: bytes, shard: dict[str, Any], place: str) -> Record | Broken:
        sizes, at = [], 0
        for size in shard["column_sizes"]:
            sizes.append(size or int.from_bytes(sample[at : at + 4], "little"))
            at += 0 if size else 4
        if at + sum(sizes) != len(sample):
            return Broken(place, "damaged sample", "its length is not what it says")
        row = {}
        for name, encoding, size in zip(shard["column_names"], shard["column_encodings"], sizes, strict=True):
            if name in self.columns.names:
                try:
                    row[name] = _cell(encoding, sample[at : at + size])
                except (ValueError, TypeError) as error:
                    return Broken(place, "damaged sample", f"column {name!r}: {error}")
            at += size
        return self.columns.record(row, place, self.labels, self._fetch)

    def _fetch(self, path: str) -> bytes:
        return read_anywhere(path) if is_absolute(path) else self.files.content(path)


def _cell(encoding: str, data: bytes) -> Any:
    if encoding in ("jpeg", "png", "bytes"):
        return data
    if encoding == "str":
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data  # a caption is then counted as one that is no UTF-8
    ensure_torchvision_importable()
    from streaming.base.format.mds.encodings import mds_decode

    value = mds_decode(encoding, data)
    return value.item() if isinstance(value, np.generic) else value
