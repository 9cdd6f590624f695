"""Two caption encoders as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ddm_lightning.config.experiment import PluginConfig
from ddm_lightning.core import checks
from ddm_lightning.core.registry import CAPTION_ENCODERS
from ddm_lightning.encoders.interfaces import CaptionEncoder, TextTokens, TextVectors, TokenVectors, Vectors


@CAPTION_ENCODERS.register("pair")
class Pair:
    """One encoder for the vector and one for the tokens, as CLIP and T5 in Stable Diffusion 3 (arXiv 2403.03206).

    The shards hold the columns of both. What one makes beside its own, such as the mean vector of T5, is not stored.

    Args:
        vector: name and params of the encoder of the vector.
        tokens: name and params of the encoder of the tokens.

    Raises:
        UserError: an encoder refuses its params.
        ValueError: the second one makes no tokens.
    """

    def __init__(self, vector: dict[str, Any], tokens: dict[str, Any]) -> None:
        self.of_vector = _built(vector, "vector")
        self.of_tokens = _built(tokens, "tokens")
        if self.of_tokens.token_shape is None:
            raise ValueError(f"tokens: {tokens['name']!r} makes no tokens; set its param 'store' or 'max_tokens'")

        self.size = self.of_vector.size
        self.token_shape = self.of_tokens.token_shape
        self.packages = (*self.of_vector.packages, *self.of_tokens.packages)
        own = self.of_vector.columns
        stored = ["text"] if "text" in own else own
        # Both may store ids, which differ.
        self._column_of = {name: name.replace("text_", "text_vector_") for name in stored}
        """Column of the shards for each column of the first encoder."""
        self.columns = {column: own[name] for name, column in self._column_of.items()}
        for name, encoding in self.of_tokens.columns.items():
            if name != "text":
                self.columns[name] = encoding

    def provenance(self) -> dict[str, str]:
        facts = {f"vector_{name}": text for name, text in self.of_vector.provenance().items()}
        for name, text in self.of_tokens.provenance().items():
            facts[f"tokens_{name}"] = text

        return facts

    def encode(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        vectors = self.of_vector.encode(captions)
        rows = self.of_tokens.encode(captions)
        for name, column in self._column_of.items():
            rows[column] = vectors[name]

        return {column: rows[column] for column in self.columns}

    def vectors(self, captions: Sequence[str]) -> Vectors:
        return self.of_vector.vectors(captions)

    def vectors_of_stored(self, stored: Mapping[str, Tensor]) -> TextVectors:
        return self.of_vector.vectors_of_stored({name: stored[column] for name, column in self._column_of.items()})

    def tokens(self, captions: Sequence[str]) -> TokenVectors:
        return self.of_tokens.tokens(captions)

    def tokens_of_stored(self, stored: Mapping[str, Tensor]) -> TextTokens:
        return self.of_tokens.tokens_of_stored(stored)


def _built(given: dict[str, Any], side: str) -> CaptionEncoder:
    checks.check(given, PluginConfig, f"params.{side}", "caption encoder 'pair'")
    return CAPTION_ENCODERS.build(given.get("name", ""), given.get("params", {}))
