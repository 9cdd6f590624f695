"""Noise that depends on what it is for and on nothing else: not on order, batch size or earlier draws."""

from __future__ import annotations

import json
from hashlib import blake2b

import torch


def keyed_generator(seed: int, *key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for ``(seed, *key)``, such as ``keyed_generator(0, "noise", rank, step)``.

    Equal keys give equal streams on every machine with the same kind of device; ``1`` and ``"1"`` are different
    keys. The generator is seeded with 63 bits of a BLAKE2b hash, so that nearby keys have unrelated streams.
    PyTorch's CPU generator uses 32 of them: two given keys share a stream with probability 2**-32.

    Args:
        seed: the experiment's seed.
        key: what the stream is for: purpose, rank, step, picture.
        device: where the generator draws; a CPU and a GPU generator of one key differ.
    """
    generator = torch.Generator(device)
    generator.manual_seed(keyed_seed(seed, *key))
    return generator


def keyed_seed(seed: int, *key: int | str) -> int:
    """The seed of ``keyed_generator``, 63 bits, for a generator that is there already."""
    digest = blake2b(json.dumps([seed, *key]).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
