"""Caption encoders: text to one pooled vector, and to one vector per token.

Vectors are L2-normalised, then multiplied by sqrt(size), so that an entry has unit variance and a
network can read them as they are.
"""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CAPTION_ENCODERS, require
from ddm_lightning.encoders.interfaces import (
    CaptionEncoder,
    Provenance,
    TextTokens,
    TextVectors,
    TokenVectors,
    Vectors,
    array_encoding,
    parse_encoding,
)
from ddm_lightning.encoders.pretrained import EXTRA, Pretrained, loading
from ddm_lightning.flow.condition import Condition

_CAPTIONS_AT_ONCE = {"cpu": 32, "cuda": 256}


class StoredVectors:
    """A caption encoder that stores one vector per caption, and perhaps one per token."""

    token_shape: tuple[int, int] | None = None

    def vectors_of_stored(self, stored: Mapping[str, Tensor]) -> TextVectors:
        return stored["text"].float()

    def tokens_of_stored(self, stored: Mapping[str, Tensor]) -> TextTokens:
        return stored["text_tokens"].float()


def encode_texts(texts: Sequence[str], encoder: CaptionEncoder, kind: str) -> Condition:
    """Encode captions or prompts as a condition of ``kind``: vectors, tokens or both, float32, on the CPU."""
    parts = []
    for part in kind.split("+"):
        # An encoder may have only one of the two methods.
        if part == "tokens":
            values = encoder.tokens(texts)
        else:
            values = encoder.vectors(texts)

        parts.append(torch.from_numpy(values))

    return Condition.of(*parts)


@CAPTION_ENCODERS.register("hashed-words")
class HashedWords(Provenance, StoredVectors):
    """Sum of one fixed random vector per word, for tests: no weights, no meaning.

    Args:
        size: entries of the vector.
        max_tokens: words per caption whose vectors are stored, too; 0 for none.

    Raises:
        ValueError: a size below 1, or a negative ``max_tokens``.
    """

    def __init__(self, size: int = 64, max_tokens: int = 0) -> None:
        if size < 1 or max_tokens < 0:
            raise ValueError(f"size = {size}, max_tokens = {max_tokens}: give at least 1 and 0")

        self.size = size
        self.max_tokens = max_tokens
        self.columns = {"text": f"ndarray:float16:{size}"}
        if max_tokens:
            self.token_shape = (max_tokens, size)
            self.columns["text_tokens"] = f"ndarray:float16:{max_tokens},{size}"

    def vectors(self, captions: Sequence[str]) -> Vectors:
        """Encode captions to vectors, float32; a caption without words counts as one empty word."""
        sums = [sum(map(self._vector, _words(caption))) for caption in captions]
        return unit_variance(np.stack(sums))

    def encode(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        stored = {"text": self.vectors(captions).astype(np.float16)}
        if self.max_tokens:
            stored["text_tokens"] = self.tokens(captions).astype(np.float16)

        return stored

    def tokens(self, captions: Sequence[str]) -> TokenVectors:
        """Return the vector of each word, float32, zero after the last."""
        found = np.zeros((len(captions), self.max_tokens, self.size), np.float32)
        for row, caption in enumerate(captions):
            for place, word in enumerate(_words(caption)[: self.max_tokens]):
                found[row, place] = self._vector(word)

        return found

    def _vector(self, word: str) -> Float[np.ndarray, "size"]:
        seed = int.from_bytes(hashlib.blake2b(word.encode("utf-8"), digest_size=8).digest(), "little")
        return np.random.default_rng(seed).standard_normal(self.size)


def _words(caption: str) -> list[str]:
    return re.findall(r"\w+", caption.lower()) or [""]


def unit_variance(vectors: Vectors) -> Vectors:
    """Scale vectors to a norm of sqrt(size), float32."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / norms * np.sqrt(vectors.shape[1])).astype(np.float32)


class _TextModel(Pretrained):
    """Base of the text towers of the transformers library.

    ``store`` chooses the stored columns, because text can outweigh the images (a latent of SD takes 8 KB, 77 states of
    CLIP ViT-L 118 KB):

    - ``pooled``: ``text``, one float16 vector of L2 norm sqrt(size).
    - ``tokens``: also ``text_tokens``, the states of the last layer after its norm, float16, zero after the caption's
      end, and ``text_length``, the number of tokens.
    - ``ids``: ``text_ids`` and ``text_length``; training then computes the vectors.

    A caption is cut to ``max_tokens``; its end-of-text token is always kept.

    Args:
        path: see ``Pretrained``.
        tokenizer: the tokenizer's folder inside ``path``; None is the model's own or, in a pipeline, the one of
            ``subfolder``: ``tokenizer_2`` for ``text_encoder_2``.
        store: ``pooled``, ``tokens`` or ``ids``.
        max_tokens: tokens per caption, begin and end included; longer captions are cut.
        params: see ``Pretrained``. In a pipeline, ``subfolder`` is ``text_encoder`` or the like.

    Raises:
        UserError, RuntimeError: see ``Pretrained``.
        ValueError: a wrong ``store`` or ``max_tokens``.
    """

    packages: tuple[str, ...] = ("transformers", "tokenizers")
    config_class: ClassVar[str]
    tokenizer_class: ClassVar[str]
    tokenizer_files: ClassVar[tuple[str, ...]]
    """One of them is needed."""
    has_positions: ClassVar[bool]
    """Whether the number of positions limits the tokens."""
    is_safe_in_bfloat16 = True

    def __init__(
        self,
        path: str,
        tokenizer: str | None = None,
        store: str = "pooled",
        max_tokens: int | None = None,
        **params: Any,
    ) -> None:
        if store not in ("pooled", "tokens", "ids"):
            raise ValueError(f"store = {store!r} must be pooled, tokens or ids")

        self.store = store
        super().__init__(path, **params)
        self._tokenizer_names = [*self.tokenizer_files, "merges.txt", "*token*.json"]
        folder = tokenizer or (params.get("subfolder") or "").replace("text_encoder", "tokenizer")
        self.tokenizer_folder = self._find(folder, self._tokenizer_names, self._check_tokenizer)
        if not any((self.tokenizer_folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            require(f"{self.place}, whose tokenizer is a SentencePiece model,", "sentencepiece", extra=EXTRA)

        with loading(self.folder, self.place):
            config_class = getattr(import_module("transformers"), self.config_class)
            self.text_config = config_class.from_pretrained(self.folder, local_files_only=True)

        self.size, width, limit = self._sizes()
        self.max_tokens = limit if max_tokens is None else max_tokens
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens = {max_tokens} must be at least 2")
        if self.has_positions and self.max_tokens > limit:
            raise ValueError(f"max_tokens = {max_tokens} must be at most {limit}, the model's number of positions")

        self.token_shape = None
        self.columns = {"text": array_encoding("float16", [self.size])}
        if store == "tokens":
            self.columns["text_tokens"] = array_encoding("float16", [self.max_tokens, width])
        if store == "ids":
            self.columns = {"text_ids": array_encoding("int32", [self.max_tokens])}
        if store != "pooled":
            self.columns["text_length"] = "int32"
            self.token_shape = (self.max_tokens, width)

    @abstractmethod
    def _sizes(self) -> tuple[int, int, int]:
        """Return the entries of the vector and of a state, and the default of ``max_tokens``."""

    @abstractmethod
    def _pooled(self, network: Any, states: TextTokens, mask: Bool[Tensor, "n m"]) -> TextVectors:
        """Return the vector of each caption, of any norm."""

    def _check_tokenizer(self, folder: Path) -> None:
        if not any((folder / name).is_file() for name in self.tokenizer_files):
            raise UserError(
                f"{folder}: no tokenizer ({' or '.join(self.tokenizer_files)}), needed by {self.place}; "
                "set its parameter 'tokenizer' to the folder inside 'path' that has one"
            )

    def _config_files(self) -> list[Path]:
        of_tokenizer = {path for name in self._tokenizer_names for path in self.tokenizer_folder.glob(name)}
        return super()._config_files() + sorted(of_tokenizer)

    @cached_property
    def _tokenizer(self) -> Any:
        folder = self.tokenizer_folder
        with loading(folder, self.place):
            tokenizer_class = getattr(import_module("transformers"), self.tokenizer_class)
            tokenizer = tokenizer_class.from_pretrained(folder, local_files_only=True, padding_side="right")

        known = self.text_config.vocab_size
        if len(tokenizer) > known:
            raise UserError(
                f"{folder}: its tokenizer has {len(tokenizer)} words, but {self.folder} knows {known}; "
                f"set the parameter 'tokenizer' of {self.place}"
            )

        return tokenizer

    def _load(self, **settings: Any) -> Any:
        return super()._load(config=self.text_config, **settings)

    def _tokens(self, captions: Sequence[str]) -> tuple[Int[Tensor, "n max_tokens"], Int[Tensor, "n"]]:
        """Return padded ids and the number of tokens of each caption."""
        # Tokenizers refuse lone surrogates, which broken JSON may hold.
        texts = [caption.encode("utf-8", "replace").decode("utf-8") for caption in captions]
        found = self._tokenizer(
            texts,
            truncation=True,
            max_length=self.max_tokens,
            padding="max_length",
            return_tensors="pt",
        )
        return found["input_ids"], found["attention_mask"].sum(1)

    def _run(self, ids: Int[Tensor, "n m"], lengths: Int[Tensor, "n"]) -> tuple[TextTokens, TextVectors]:
        """Return the tokens' states, zero after the end, and vectors, both float32, on the device of ``ids``."""
        network = self._network(ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        with torch.autocast(ids.device.type, enabled=False):  # a training's would override ``compute_dtype``
            states = network(input_ids=ids.long(), attention_mask=mask.long()).last_hidden_state
            states = states.masked_fill(~mask[:, :, None], 0)
            vectors = torch.nn.functional.normalize(self._pooled(network, states, mask).float(), dim=1)

        return states.float(), vectors * self.size**0.5

    @torch.inference_mode()
    def _encoded(
        self, captions: Sequence[str], columns: Mapping[str, tuple[Any, Any]], or_cpu: bool = True
    ) -> dict[str, np.ndarray]:
        """Encode captions, batch by batch, to columns (name -> type and shape of a row).

        ``text`` and ``text_tokens`` need the network.
        """
        device = self._found_device(or_cpu)
        out = {}
        for name, (dtype, shape) in columns.items():
            out[name] = np.zeros((len(captions), *shape), dtype)

        at_once = _CAPTIONS_AT_ONCE.get(device.type, _CAPTIONS_AT_ONCE["cuda"])
        for start in range(0, len(captions), at_once):
            rows = slice(start, start + at_once)
            ids, lengths = self._tokens(captions[rows])
            found = {"text_ids": ids, "text_length": lengths}
            if not out.keys() <= found.keys():
                ids = ids[:, : int(lengths.max())]
                found["text_tokens"], found["text"] = self._run(ids.to(device), lengths.to(device))

            for name, column in out.items():
                values = found[name].cpu().numpy()
                region = (rows, *map(slice, values.shape[1:]))  # a batch's longest caption may be short
                with np.errstate(over="ignore"):  # prepare refuses infinite numbers
                    column[region] = values

        return out

    def encode(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """Encode captions to one row per column and caption.

        Raises:
            UserError: the weights do not load, or the device is missing.
        """
        columns = {name: parse_encoding(encoding) for name, encoding in self.columns.items()}
        return self._encoded(captions, columns, or_cpu=self.store == "ids")

    def vectors(self, captions: Sequence[str]) -> Vectors:
        """Encode captions to vectors, float32; on the CPU if the machine lacks the device."""
        return self._encoded(captions, {"text": (np.float32, [self.size])})["text"]

    def tokens(self, captions: Sequence[str]) -> TokenVectors:
        """Encode captions to their tokens' states, float32, zero after the end; on the CPU without the device."""
        return self._encoded(captions, {"text_tokens": (np.float32, self.token_shape)})["text_tokens"]

    @torch.no_grad()
    def tokens_of_stored(self, stored: Mapping[str, Tensor]) -> TextTokens:
        """Turn stored columns into states, float32, on their device, to which the model moves if ids are stored."""
        if "text_tokens" in stored:
            return stored["text_tokens"].float()

        return self._run(stored["text_ids"], stored["text_length"])[0]

    @torch.no_grad()
    def vectors_of_stored(self, stored: Mapping[str, Tensor]) -> TextVectors:
        """Turn stored columns into vectors, float32, on their device, to which the model moves if ids are stored."""
        if "text" in stored:
            return stored["text"].float()

        return self._run(stored["text_ids"], stored["text_length"])[1]


@CAPTION_ENCODERS.register("clip-text")
class CLIPText(_TextModel):
    """CLIP's text tower (Radford et al. 2021, arXiv 2103.00020); for its parameters see ``_TextModel``.

    The vector is the end-of-text token's state after the last norm, multiplied by the text projection if the
    files have one (a whole CLIP, SDXL's second tower; SD's towers have none). ``max_tokens``: None is the model's 77.
    """

    place = "caption encoder 'clip-text'"
    kinds = dict.fromkeys(("clip", "clip_text_model"), "CLIPTextModel")
    config_class = "CLIPTextConfig"
    tokenizer_class = "CLIPTokenizerFast"
    tokenizer_files = ("tokenizer.json", "vocab.json")
    has_positions = True

    def _sizes(self) -> tuple[int, int, int]:
        # Some configurations of whole CLIPs state another size than their weights have.
        config = self.text_config
        config.projection_dim, *_ = self.shapes.get("text_projection.weight", [0])
        if config.projection_dim:
            self.model_class = "CLIPTextModelWithProjection"
        else:
            self.model_class = "CLIPTextModel"

        return config.projection_dim or config.hidden_size, config.hidden_size, config.max_position_embeddings

    def _pooled(self, network: Any, states: TextTokens, mask: Bool[Tensor, "n m"]) -> TextVectors:
        # End of text is the last token; its id does not locate it, because some tokenizers pad with it.
        last = states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
        if self.text_config.projection_dim:
            return network.text_projection(last)

        return last


@CAPTION_ENCODERS.register("t5-text")
class T5Text(_TextModel):
    """T5's encoder (Raffel et al. 2020, arXiv 1910.10683); for its parameters see ``_TextModel``.

    The vector is the mean of the states of the caption's tokens, end of text included.
    ``max_tokens``: None is 128, longer than most captions; T5 itself has no limit.
    """

    place = "caption encoder 't5-text'"
    kinds = {"t5": "T5EncoderModel"}  # noqa: RUF012  never changed
    config_class = "T5Config"
    tokenizer_class = "T5TokenizerFast"
    tokenizer_files = ("tokenizer.json", "spiece.model")
    has_positions = False
    default_tokens = 128

    def _sizes(self) -> tuple[int, int, int]:
        return self.text_config.hidden_size, self.text_config.hidden_size, self.default_tokens

    def _pooled(self, network: Any, states: TextTokens, mask: Bool[Tensor, "n m"]) -> TextVectors:
        return states.float().sum(1) / mask.sum(1, keepdim=True)


@CAPTION_ENCODERS.register("t5gemma-text")
class T5GemmaText(T5Text):
    """T5Gemma's encoder (Zhang et al. 2025, arXiv 2504.06225) as PRX reads it; for its parameters see ``_TextModel``.

    Takes the encoder alone, as in ``text_encoder`` of a PRX. Captions are cleaned by PRX's own pipeline: lower case, no
    links, ``#`` or ``@``, and more. ``max_tokens``: None is the pipeline's 256. The vector is that of ``T5Text``.
    """

    packages = ("transformers", "tokenizers", "diffusers", "ftfy")
    place = "caption encoder 't5gemma-text'"
    kinds = {"t5_gemma_module": "T5GemmaEncoder"}  # noqa: RUF012  never changed
    module = "transformers.models.t5gemma.modeling_t5gemma"
    config_class = "T5GemmaModuleConfig"
    tokenizer_class = "GemmaTokenizerFast"
    tokenizer_files = ("tokenizer.json", "tokenizer.model")
    default_tokens = 256

    @cached_property
    def _clean(self) -> Callable[[str], str]:
        return import_module("diffusers.pipelines.prx.pipeline_prx").TextPreprocessor().clean_text

    def _tokens(self, captions: Sequence[str]) -> tuple[Int[Tensor, "n max_tokens"], Int[Tensor, "n"]]:
        return super()._tokens([self._clean(caption) for caption in captions])
