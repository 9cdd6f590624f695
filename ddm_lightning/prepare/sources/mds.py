"""Folders of MDS shards, version 2 of MosaicML Streaming's format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from io import BytesIO
from typing import Any

import numpy as np

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import parse_json
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.records import BrokenSample, Part, Record, block_of, block_parts
from ddm_lightning.prepare.sources.decode import one_line
from ddm_lightning.prepare.sources.tables import TableSource
from ddm_lightning.shards import mosaic
from ddm_lightning.shards.mds import read_samples, split_sample

_INDEX = "index.json"


@SOURCES.register("mds")
class Mds(TableSource):
    """Samples of the shards listed by the ``index.json`` of the folder or of folders in it.

    Images are ``jpeg``, ``png``, ``pil``, encoded ``bytes``, or paths (``str``). Compressed shards are decompressed in
    memory. The key is ``<shard>:<sample>``, unless ``key_column`` is set.
    """

    packages = ("pillow", "mosaicml-streaming")

    def parts(self) -> list[Part]:
        """List blocks of samples, each of one shard.

        Raises:
            UserError: no index, a missing shard, or one without a column.
        """
        parts: list[Part] = []
        total = sum(shard["samples"] for shard in self._shards.values())
        for raw, shard in self._shards.items():
            stored = self._stored(raw, shard)
            if stored not in self.files.states:
                raise UserError(f"{self.files.shown(stored)} does not exist; write the shards again")

            fingerprint = f"{self.files.states[stored]}; {shard['raw_data']}"
            parts += block_parts(shard["samples"], fingerprint, raw, total, shard=raw)

        return parts

    def read(self, part: Part) -> Iterator[Record | BrokenSample]:
        """Yield the samples of the block; all are ``BrokenSample`` if the shard is damaged."""
        raw = part.where["shard"]
        numbers = block_of(part)
        shard = self._shards[raw]
        try:
            samples = self._samples(raw, shard, numbers)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001  each compression raises its own errors
            for number in numbers:
                yield BrokenSample(f"{raw}:{number}", "damaged shard", one_line(error))

            return

        for number, sample in zip(numbers, samples, strict=True):
            yield self._decode(sample, shard, f"{raw}:{number}")

    @cached_property
    def _shards(self) -> dict[str, dict[str, Any]]:
        """Entries of the index by the path of the uncompressed shard."""
        shards = {}
        for index in self.files.ending(_INDEX):
            folder = index.removesuffix(_INDEX)
            place = self.files.shown(index)
            try:
                for entry in parse_json(self.files.content(index))["shards"]:
                    shards[folder + entry["raw_data"]["basename"]] = {**entry, "folder": folder}
                    encodings = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
                    if (entry["format"], entry["version"]) != ("mds", 2):
                        raise ValueError("not of version 2")

                    self.check_columns(encodings, place)
                    for name in self.columns:
                        if encodings[name] == "pkl":  # unpickling can run code
                            raise UserError(f"{place}: column {name!r} is pickled; write the shards again without pkl")
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{place} is not an index of MDS shards: {error!r}; change the path") from None

        return shards

    def _stored(self, raw: str, shard: dict[str, Any]) -> str:
        """Return the name of the shard's file, compressed or not."""
        zipped = shard.get("zip_data")
        if raw in self.files.states or not zipped:
            return raw

        return str(shard["folder"] + zipped["basename"])

    def _samples(self, raw: str, shard: dict[str, Any], numbers: range) -> list[bytes]:
        """Read the encoded samples."""
        stored = self._stored(raw, shard)
        with self.files.open(stored) as file:
            samples: Any = file if stored == raw else BytesIO(mosaic.decompress(shard["compression"], file.read()))
            return read_samples(samples, shard["samples"], numbers)

    def _decode(self, sample: bytes, shard: dict[str, Any], place: str) -> Record | BrokenSample:
        row = {}
        try:
            values = split_sample(sample, shard["column_sizes"])
            for name, encoding, value in zip(shard["column_names"], shard["column_encodings"], values, strict=True):
                if name in self.columns:
                    row[name] = _cell(encoding, value)
        except Exception as error:  # noqa: BLE001  each encoding raises its own errors
            return BrokenSample(place, "damaged sample", one_line(error))

        return self.record(row, place)


def _cell(encoding: str, data: bytes) -> Any:
    if encoding in ("jpeg", "png", "bytes"):
        return data
    if encoding == "str":
        return data.decode(errors="surrogateescape")  # counted later as a text that UTF-8 cannot hold

    value = mosaic.mds_decode(encoding, data)
    if isinstance(value, np.generic):
        return value.item()

    return value
