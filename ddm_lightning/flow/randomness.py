"""Noise keyed by its purpose: it depends on no order, batch size or earlier random number."""

from __future__ import annotations

import json
from hashlib import blake2b

import torch


def keyed_generator(seed: int, *key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A random generator for ``(seed, *key)``.

    >>> noise = [torch.randn(3, generator=keyed_generator(0, "noise", rank)) for rank in (0, 1, 0)]
    >>> torch.equal(noise[0], noise[1]), torch.equal(noise[0], noise[2])
    (False, True)

    Equal keys give equal streams on every machine with the same kind of device; ``1`` and ``"1"`` are different keys.
    The seed is 63 bits of a BLAKE2b hash, so that nearby keys have unrelated streams. PyTorch's CPU generator uses 32
    of them: two given keys share a stream with probability 2**-32.

    Args:
        seed: the experiment's seed.
        key: purpose of the stream, then rank, step or image number.
        device: device of the generator; CPU and GPU streams of one key differ.
    """
    return torch.Generator(device).manual_seed(keyed_seed(seed, *key))


def keyed_seed(seed: int, *key: int | str) -> int:
    """The 63-bit seed of ``keyed_generator``, to reseed an existing generator."""
    digest = blake2b(json.dumps([seed, *key]).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
