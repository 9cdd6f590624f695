"""Two caption encoders as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.config.experiment import PluginConfig
from ddm_lightning.core import checks
from ddm_lightning.core.registry import CAPTION_ENCODERS
from ddm_lightning.encoders.interfaces import CaptionEncoder


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
        self.packages = tuple(dict.fromkeys((*self.of_vector.packages, *self.of_tokens.packages)))
        own = self.of_vector.columns
        # Both may store ids, which differ.
        self._column_of = {name: name.replace("text_", "text_vector_") for name in (["text"] if "text" in own else own)}
        """Column of the shards for each column of the first encoder."""
        self.columns = {column: own[name] for name, column in self._column_of.items()}
        self.columns |= {name: encoding for name, encoding in self.of_tokens.columns.items() if name != "text"}

    def provenance(self) -> dict[str, str]:
        found = {"vector": self.of_vector.provenance(), "tokens": self.of_tokens.provenance()}
        return {f"{side}_{name}": text for side, facts in found.items() for name, text in facts.items()}

    def encode(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        rows = self.of_vector.encode(captions)
        both = self.of_tokens.encode(captions) | {column: rows[name] for name, column in self._column_of.items()}
        return {column: both[column] for column in self.columns}

    def vectors(self, captions: Sequence[str]) -> Float[np.ndarray, "n size"]:
        return self.of_vector.vectors(captions)

    def vectors_of_stored(self, stored: Mapping[str, Tensor]) -> Float[Tensor, "n size"]:
        return self.of_vector.vectors_of_stored({name: stored[column] for name, column in self._column_of.items()})

    def tokens(self, captions: Sequence[str]) -> Float[np.ndarray, "n m width"]:
        return self.of_tokens.tokens(captions)

    def tokens_of_stored(self, stored: Mapping[str, Tensor]) -> Float[Tensor, "n m width"]:
        return self.of_tokens.tokens_of_stored(stored)


def _built(given: dict[str, Any], side: str) -> CaptionEncoder:
    checks.check(given, PluginConfig, f"params.{side}", "caption encoder 'pair'")
    return CAPTION_ENCODERS.build(given.get("name", ""), given.get("params", {}))
