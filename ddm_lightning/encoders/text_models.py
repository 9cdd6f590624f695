"""Caption encoders of the transformers library: the text towers of CLIP, and T5's encoder.

``store`` chooses the stored columns, because text can outweigh the images (a latent of SD takes 8 KB, 77 states of
CLIP ViT-L 118 KB):

- ``pooled``: ``text``, one float16 vector of L2 norm sqrt(size).
- ``tokens``: also ``text_tokens``, the states of the last layer after its norm, float16, zero after the caption's
  end, and ``text_length``, the number of tokens.
- ``ids``: ``text_ids`` and ``text_length``; training then computes the vectors.

A caption is cut to ``max_tokens``; its end-of-text token is always kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from ddm_lightning.encoders.interfaces import array_encoding
from ddm_lightning.encoders.pretrained import EXTRA, Pretrained, loading, locate

_CAPTIONS_AT_ONCE = {"cpu": 32, "cuda": 256}


class _TextModel(Pretrained):
    """Base of both encoders.

    Args:
        path, revision, device, compute_dtype: see ``Pretrained``.
        subfolder: folder of the model in a pipeline, such as ``text_encoder``.
        tokenizer: the tokenizer's folder inside ``path``; None is the model's own, or in a pipeline the one that
            belongs to ``subfolder``: ``tokenizer_2`` to ``text_encoder_2``.
        store: ``pooled``, ``tokens`` or ``ids``.
        max_tokens: tokens per caption, begin and end included; longer captions are cut.

    Raises:
        UserError, ValueError: see ``Pretrained``.
    """

    packages: tuple[str, ...] = ("transformers", "tokenizers")
    name: ClassVar[str]
    config_class: ClassVar[str]
    tokenizer_class: ClassVar[str]
    tokenizer_files: ClassVar[tuple[tuple[str, ...], ...]]
    """Sets of files; each set makes a tokenizer."""
    has_positions: ClassVar[bool]
    """Whether the number of positions limits the tokens."""

    def __init__(
        self,
        path: str,
        subfolder: str | None = None,
        tokenizer: str | None = None,
        revision: str | None = None,
        store: str = "pooled",
        max_tokens: int | None = None,
        device: str = "cpu",
        compute_dtype: str = "float32",
    ) -> None:
        if store not in ("pooled", "tokens", "ids"):
            raise ValueError(f"store = {store!r} must be pooled, tokens or ids")
        self.store = store
        super().__init__(path, subfolder, revision, device, compute_dtype)
        names = sorted({name for files in self.tokenizer_files for name in files} | {"*token*.json"})
        folder = tokenizer or (subfolder or "").replace("text_encoder", "tokenizer") or None
        self.tokenizer_folder = locate(self.place, path, folder, revision, names, self._has_tokenizer)
        if not any((self.tokenizer_folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            require(f"{self.place}, whose tokenizer is a SentencePiece model,", "sentencepiece", extra=EXTRA)
        with loading(self.model.folder, f"a configuration of {self.name}"):
            config_class = getattr(import_module("transformers"), self.config_class)
            self.config = config_class.from_pretrained(self.model.folder, local_files_only=True)
        self.size, self.width, limit = self._sizes()
        self.max_tokens = limit if max_tokens is None else max_tokens
        most = limit if self.has_positions else self.max_tokens
        if not 2 <= self.max_tokens <= most:
            at_most = f" and at most {limit}, the positions that the model has" if self.has_positions else ""
            raise ValueError(f"max_tokens = {max_tokens} must be at least 2{at_most}")
        self._networks: dict[torch.device, Any] = {}

    def _sizes(self) -> tuple[int, int, int]:
        """Return the entries of the vector, the entries of a token's state, and the default of ``max_tokens``."""
        raise NotImplementedError

    def _model_class(self) -> str:
        raise NotImplementedError

    def _pooled(
        self, network: Any, states: Float[Tensor, "n m width"], mask: Bool[Tensor, "n m"]
    ) -> Float[Tensor, "n size"]:
        """Return the vector of each caption, of any norm."""
        raise NotImplementedError

    def _has_tokenizer(self, folder: Path) -> Path:
        if not any(all((folder / name).is_file() for name in files) for files in self.tokenizer_files):
            wanted = ", or ".join(" and ".join(files) for files in self.tokenizer_files)
            raise UserError(
                f"{folder}: no tokenizer ({wanted}), needed by {self.place}; set its parameter 'tokenizer' to the "
                f"folder inside 'path' that has one"
            )
        return folder

    @property
    def columns(self) -> dict[str, str]:
        """Column -> MDS encoding."""
        vector = {"text": array_encoding("float16", [self.size])}
        states = {"text_tokens": array_encoding("float16", [self.max_tokens, self.width])}
        ids, length = {"text_ids": array_encoding("int32", [self.max_tokens])}, {"text_length": "int32"}
        return {"pooled": vector, "tokens": vector | states | length, "ids": ids | length}[self.store]

    @property
    def token_shape(self) -> tuple[int, int] | None:
        """Tokens per caption and entries of each; None if a single vector is stored."""
        return None if self.store == "pooled" else (self.max_tokens, self.width)

    def provenance(self) -> dict[str, str]:
        """Return the hashes of the weights and of the configuration with the tokenizer, and the hub's commit."""
        names = {name for files in self.tokenizer_files for name in files}
        files = {path for path in self.tokenizer_folder.iterdir() if path.name in names or "token" in path.name}
        return self.model.provenance(sorted(path for path in files if path.suffix != ".safetensors"))

    @cached_property
    def _tokenizer(self) -> Any:
        with loading(self.tokenizer_folder, f"a tokenizer of {self.name}"):
            tokenizer_class = getattr(import_module("transformers"), self.tokenizer_class)
            tokenizer = tokenizer_class.from_pretrained(
                self.tokenizer_folder, local_files_only=True, padding_side="right"
            )
        if len(tokenizer) > self.config.vocab_size:
            raise UserError(
                f"{self.tokenizer_folder}: its tokenizer has {len(tokenizer)} words, but {self.model.folder} knows "
                f"{self.config.vocab_size}; set the parameter 'tokenizer' of {self.place}"
            )
        return tokenizer

    def _network(self, device: torch.device) -> Any:
        if device not in self._networks:
            network = self._load("transformers", self._model_class(), config=self.config, dtype=self.compute_dtype)
            self._networks[device] = network.to(device)
        return self._networks[device]

    def _tokens(self, captions: Sequence[str]) -> tuple[Int[Tensor, "n max_tokens"], Int[Tensor, "n"]]:
        """Return padded ids and the number of tokens of each caption."""
        # Tokenizers refuse lone surrogates, which broken JSON may hold.
        clean = [caption.encode("utf-8", "replace").decode("utf-8") for caption in captions]
        found = self._tokenizer(
            clean, truncation=True, max_length=self.max_tokens, padding="max_length", return_tensors="pt"
        )
        return found["input_ids"], found["attention_mask"].sum(1)

    def _run(
        self, ids: Int[Tensor, "n m"], lengths: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n m width"], Float[Tensor, "n size"]]:
        """Return the tokens' states, zero after the end, and vectors, both float32, on the device of ``ids``."""
        network = self._network(ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        states = network(input_ids=ids.long(), attention_mask=mask.long()).last_hidden_state
        states = states.masked_fill(~mask[:, :, None], 0)
        vectors = torch.nn.functional.normalize(self._pooled(network, states, mask).float(), dim=1)
        return states.float(), vectors * self.size**0.5

    def _batches(self, captions: Sequence[str], device: torch.device) -> Any:
        """Yield the rows of each batch, its states [n m width] up to its longest caption, and its vectors."""
        at_once = _CAPTIONS_AT_ONCE.get(device.type, _CAPTIONS_AT_ONCE["cuda"])
        for start in range(0, len(captions), at_once):
            ids, lengths = self._tokens(captions[start : start + at_once])
            ids = ids[:, : int(lengths.max())]
            states, vectors = self._run(ids.to(device), lengths.to(device))
            yield slice(start, start + len(ids)), states.cpu().numpy(), vectors.cpu().numpy()

    @torch.inference_mode()
    def encode(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """Encode captions to one row per column and caption.

        Raises:
            UserError: the weights do not load, or the device is missing.
        """
        out: dict[str, np.ndarray] = {}
        if self.store in ("tokens", "ids"):
            ids, lengths = self._tokens(captions) if captions else (torch.zeros(0, self.max_tokens), torch.zeros(0))
            out = {"text_ids": ids.int().numpy(), "text_length": lengths.int().numpy()}
        if self.store in ("tokens", "pooled"):
            self._require_device()
            out["text"] = np.empty((len(captions), self.size), np.float16)
            if self.store == "tokens":
                out["text_tokens"] = np.zeros((len(captions), self.max_tokens, self.width), np.float16)
            for rows, states, vectors in self._batches(captions, self.device):
                out["text"][rows] = vectors
                if self.store == "tokens":
                    with np.errstate(over="ignore"):  # prepare refuses infinite numbers
                        out["text_tokens"][rows, : states.shape[1]] = states
        return {name: out[name] for name in self.columns}

    @torch.inference_mode()
    def vectors(self, captions: Sequence[str]) -> Float[np.ndarray, "n size"]:
        """Encode captions to vectors, float32; on the CPU if the machine lacks the device."""
        out = np.empty((len(captions), self.size), np.float32)
        for rows, _, vectors in self._batches(captions, self._device_or_cpu()):
            out[rows] = vectors
        return out

    @torch.inference_mode()
    def tokens(self, captions: Sequence[str]) -> Float[np.ndarray, "n m width"]:
        """Encode captions to their tokens' states, float32, zero after the end; on the CPU without the device."""
        out = np.zeros((len(captions), self.max_tokens, self.width), np.float32)
        for rows, states, _ in self._batches(captions, self._device_or_cpu()):
            out[rows, : states.shape[1]] = states
        return out

    @torch.no_grad()
    def tokens_of_stored(self, stored: Mapping[str, Tensor]) -> Float[Tensor, "n m width"]:
        """Turn stored columns into states, float32, on their device; stored ids move the model there."""
        if "text_tokens" in stored:
            return stored["text_tokens"].float()
        return self._run(stored["text_ids"], stored["text_length"])[0]

    @torch.no_grad()
    def vectors_of_stored(self, stored: Mapping[str, Tensor]) -> Float[Tensor, "n size"]:
        """Turn stored columns into vectors, float32, on their device; stored ids move the model there."""
        if "text" in stored:
            return stored["text"].float()
        return self._run(stored["text_ids"], stored["text_length"])[1]


@CAPTION_ENCODERS.register("clip-text")
class CLIPText(_TextModel):
    """CLIP's text tower (Radford et al. 2021, arXiv 2103.00020); for its parameters see ``_TextModel``.

    The vector is the end-of-text token's state after the last norm, multiplied by the text projection if the
    files have one (a whole CLIP, SDXL's second tower; SD's towers have none). ``max_tokens``: None is the model's 77.
    """

    name, place, loaded_as = "clip-text", "caption encoder 'clip-text'", "a model of clip-text"
    kinds = {"model_type": ("clip", "clip_text_model")}  # noqa: RUF012  never changed
    config_class, tokenizer_class = "CLIPTextConfig", "CLIPTokenizerFast"
    tokenizer_files = (("tokenizer.json",), ("vocab.json", "merges.txt"))
    has_positions = True

    def _sizes(self) -> tuple[int, int, int]:
        # Some configurations of whole CLIPs state another size than their weights have.
        projection = self.model.shapes.get("text_projection.weight")
        config = self.config
        config.projection_dim = projection[0] if projection else 0
        return config.projection_dim or config.hidden_size, config.hidden_size, config.max_position_embeddings

    def _model_class(self) -> str:
        return "CLIPTextModelWithProjection" if self.config.projection_dim else "CLIPTextModel"

    def _pooled(
        self, network: Any, states: Float[Tensor, "n m width"], mask: Bool[Tensor, "n m"]
    ) -> Float[Tensor, "n size"]:
        # End of text is the last token; its id does not locate it, because some tokenizers pad with it.
        last = states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
        return network.text_projection(last) if self.config.projection_dim else last


@CAPTION_ENCODERS.register("t5-text")
class T5Text(_TextModel):
    """T5's encoder (Raffel et al. 2020, arXiv 1910.10683); for its parameters see ``_TextModel``.

    The vector is the mean of the states of the caption's tokens, end of text included.
    ``max_tokens``: None is 128, longer than most captions; T5 itself has no limit.
    """

    name, place, loaded_as = "t5-text", "caption encoder 't5-text'", "a model of t5-text"
    kinds = {"model_type": ("t5",)}  # noqa: RUF012  never changed
    config_class, tokenizer_class = "T5Config", "T5TokenizerFast"
    tokenizer_files = (("tokenizer.json",), ("spiece.model",))
    has_positions = False

    def _sizes(self) -> tuple[int, int, int]:
        return self.config.d_model, self.config.d_model, 128

    def _model_class(self) -> str:
        return "T5EncoderModel"

    def _pooled(
        self, network: Any, states: Float[Tensor, "n m width"], mask: Bool[Tensor, "n m"]
    ) -> Float[Tensor, "n size"]:
        return states.float().sum(1) / mask.sum(1, keepdim=True)
