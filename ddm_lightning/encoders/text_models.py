"""Caption encoders of the transformers library: the text towers of CLIP, and T5's encoder.

What is stored of a caption is chosen by ``store``, because text can outweigh the pictures (a latent of SD takes 8 KB,
77 states of CLIP ViT-L 118 KB):

- ``pooled``: ``text``, one float16 vector of L2 norm sqrt(size).
- ``tokens``: also ``text_tokens``, the states of the last layer after its norm, float16, zero behind the caption's
  end, and ``text_length``, the number of tokens.
- ``ids``: ``text_ids`` and ``text_length``; vectors are then computed while training.

A caption is cut to ``max_tokens``; its end-of-text token is always kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CAPTION_ENCODERS, require
from ddm_lightning.encoders.interfaces import array_encoding
from ddm_lightning.encoders.pretrained import (
    EXTRA,
    ModelFolder,
    compute_type,
    find_model,
    is_there,
    loading,
    locate,
    parse_device,
    refuse_absent,
    refuse_missing,
)

_CAPTIONS_AT_ONCE = {"cpu": 32, "cuda": 256}


class _TextModel(ABC):
    """What the two have in common.

    Args:
        path: folder of the model or of a pipeline that has one, or ``owner/name`` on the Hugging Face hub.
        subfolder: where it lies in a pipeline, such as ``text_encoder``.
        tokenizer: the tokenizer's folder inside ``path``; None is the model's own, or in a pipeline the one that
            belongs to ``subfolder``: ``tokenizer_2`` to ``text_encoder_2``.
        revision: commit, tag or branch on the hub.
        store: ``pooled``, ``tokens`` or ``ids``.
        max_tokens: tokens of a caption, begin and end included; what is beyond is cut off.
        device: torch device that computes.
        compute_dtype: type in which it computes.

    Raises:
        UserError: a package, a folder or a file is missing, cut short, or of another kind.
        ValueError: a value outside its choices.
    """

    packages: tuple[str, ...] = ("transformers", "tokenizers")
    name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    tokenizer_files: ClassVar[tuple[tuple[str, ...], ...]]
    """Sets of files, any one of which makes a tokenizer."""
    has_positions: ClassVar[bool]
    """Whether the model knows no more tokens than it has positions."""

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
        self.device, self.compute_dtype = parse_device(device), compute_type(compute_dtype)
        self.place = f"caption encoder {self.name!r}"
        require(self.place, *self.packages, extra=EXTRA)
        kinds = {"model_type": self.model_types}
        self.model: ModelFolder = find_model(self.place, path, subfolder, revision, "model", kinds)
        names = sorted({name for files in self.tokenizer_files for name in files} | {"*token*.json"})
        folder = tokenizer or (subfolder or "").replace("text_encoder", "tokenizer") or None
        self.tokenizer_folder = locate(self.place, path, folder, revision, names, self._has_tokenizer)
        if not any((self.tokenizer_folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            require(f"{self.place}, whose tokenizer is a SentencePiece model,", "sentencepiece", extra=EXTRA)
        with loading(self.model.folder, f"a configuration of {self.name}"):
            self.config = self._read_config()
        self.size, self.width, limit = self._sizes()
        self.max_tokens = limit if max_tokens is None else max_tokens
        most = limit if self.has_positions else self.max_tokens
        if not 2 <= self.max_tokens <= most:
            at_most = f" and at most {limit}, the positions that the model has" if self.has_positions else ""
            raise ValueError(f"max_tokens = {max_tokens} must be at least 2{at_most}")
        self._networks: dict[torch.device, Any] = {}

    @abstractmethod
    def _read_config(self) -> Any: ...

    @abstractmethod
    def _sizes(self) -> tuple[int, int, int]:
        """Entries of the vector, entries of a token's state, and tokens unless ``max_tokens`` says otherwise."""
        ...

    @abstractmethod
    def _load(self) -> tuple[Any, Sequence[str]]:
        """The network and the names of weights that its files lack."""
        ...

    @abstractmethod
    def _load_tokenizer(self) -> Any: ...

    @abstractmethod
    def _pooled(
        self, network: Any, states: Float[Tensor, "n m width"], mask: Bool[Tensor, "n m"]
    ) -> Float[Tensor, "n size"]:
        """The vector of each caption, of any length."""
        ...

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
        """Tokens and entries of each; None where a single vector is stored."""
        return None if self.store == "pooled" else (self.max_tokens, self.width)

    def provenance(self) -> dict[str, str]:
        """Hashes of the weights, of the configuration with the tokenizer, and the hub's commit."""
        names = {name for files in self.tokenizer_files for name in files}
        files = {path for path in self.tokenizer_folder.iterdir() if path.name in names or "token" in path.name}
        return self.model.provenance(sorted(path for path in files if path.suffix != ".safetensors"))

    @cached_property
    def _tokenizer(self) -> Any:
        with loading(self.tokenizer_folder, f"a tokenizer of {self.name}"):
            tokenizer = self._load_tokenizer()
        if len(tokenizer) > self.config.vocab_size:
            raise UserError(
                f"{self.tokenizer_folder}: its tokenizer has {len(tokenizer)} words, but {self.model.folder} knows "
                f"{self.config.vocab_size}; set the parameter 'tokenizer' of {self.place}"
            )
        return tokenizer

    def _network(self, device: torch.device) -> Any:
        if device not in self._networks:
            with loading(self.model.folder, f"a model of {self.name}"):
                network, missing = self._load()
                refuse_missing(missing)
            self._networks[device] = network.eval().requires_grad_(False).to(device)
        return self._networks[device]

    def _tokens(self, captions: Sequence[str]) -> tuple[Int[Tensor, "n max_tokens"], Int[Tensor, "n"]]:
        """Ids, padded, and the number of tokens of each caption."""
        # A lone surrogate, as broken JSON may hold, is no text that a tokenizer takes.
        clean = [caption.encode("utf-8", "replace").decode("utf-8") for caption in captions]
        found = self._tokenizer(
            clean, truncation=True, max_length=self.max_tokens, padding="max_length", return_tensors="pt"
        )
        return found["input_ids"], found["attention_mask"].sum(1)

    def _run(
        self, ids: Int[Tensor, "n m"], lengths: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n m width"], Float[Tensor, "n size"]]:
        """States of the tokens, zero behind the end, and vectors, both float32, on the device of ``ids``."""
        network = self._network(ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        states = network(input_ids=ids.long(), attention_mask=mask.long()).last_hidden_state
        states = states.masked_fill(~mask[:, :, None], 0)
        vectors = torch.nn.functional.normalize(self._pooled(network, states, mask).float(), dim=1)
        return states.float(), vectors * self.size**0.5

    def _batches(self, captions: Sequence[str], device: torch.device) -> Any:
        """Rows of each batch, its states [n m width] with m its longest caption, and its vectors."""
        at_once = _CAPTIONS_AT_ONCE.get(device.type, _CAPTIONS_AT_ONCE["cuda"])
        for start in range(0, len(captions), at_once):
            ids, lengths = self._tokens(captions[start : start + at_once])
            ids = ids[:, : int(lengths.max())]
            states, vectors = self._run(ids.to(device), lengths.to(device))
            yield slice(start, start + len(ids)), states.cpu().numpy(), vectors.cpu().numpy()

    @torch.inference_mode()
    def encode(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """Captions to one row of each column a caption.

        Raises:
            UserError: the weights do not load, or no such device.
        """
        out: dict[str, np.ndarray] = {}
        if self.store in ("tokens", "ids"):
            ids, lengths = self._tokens(captions) if captions else (torch.zeros(0, self.max_tokens), torch.zeros(0))
            out = {"text_ids": ids.int().numpy(), "text_length": lengths.int().numpy()}
        if self.store in ("tokens", "pooled"):
            refuse_absent(self.device, self.place)
            out["text"] = np.empty((len(captions), self.size), np.float16)
            if self.store == "tokens":
                out["text_tokens"] = np.zeros((len(captions), self.max_tokens, self.width), np.float16)
            for rows, states, vectors in self._batches(captions, self.device):
                out["text"][rows] = vectors
                if self.store == "tokens":
                    with np.errstate(over="ignore"):  # prepare refuses what is not finite
                        out["text_tokens"][rows, : states.shape[1]] = states
        return {name: out[name] for name in self.columns}

    @torch.inference_mode()
    def vectors(self, captions: Sequence[str]) -> Float[np.ndarray, "n size"]:
        """Captions to vectors, float32; on the CPU where the machine lacks the device."""
        device = self.device if is_there(self.device) else torch.device("cpu")
        out = np.empty((len(captions), self.size), np.float32)
        for rows, _, vectors in self._batches(captions, device):
            out[rows] = vectors
        return out

    @torch.inference_mode()
    def tokens(self, captions: Sequence[str]) -> Float[np.ndarray, "n m width"]:
        """Captions to the states of their tokens, float32, zero behind the end; on the CPU without the device."""
        device = self.device if is_there(self.device) else torch.device("cpu")
        out = np.zeros((len(captions), self.max_tokens, self.width), np.float32)
        for rows, states, _ in self._batches(captions, device):
            out[rows, : states.shape[1]] = states
        return out

    @torch.no_grad()
    def tokens_of_stored(self, stored: Mapping[str, Tensor]) -> Float[Tensor, "n m width"]:
        """Rows of the columns to states, float32, on their device; stored ids bring the model there too."""
        if "text_tokens" in stored:
            return stored["text_tokens"].float()
        return self._run(stored["text_ids"], stored["text_length"])[0]

    @torch.no_grad()
    def vectors_of_stored(self, stored: Mapping[str, Tensor]) -> Float[Tensor, "n size"]:
        """Rows of the columns to vectors, float32, on their device; stored ids bring the model there too."""
        if "text" in stored:
            return stored["text"].float()
        return self._run(stored["text_ids"], stored["text_length"])[1]


@CAPTION_ENCODERS.register("clip-text")
class CLIPText(_TextModel):
    """CLIP's text tower (Radford et al. 2021, arXiv 2103.00020); for its parameters see ``_TextModel``.

    The vector is the end-of-text token's state after the last norm, multiplied with the text projection where
    the files have one (a whole CLIP, SDXL's second tower), as it is where they do not (SD's towers).
    ``max_tokens``: None is the model's 77.
    """

    name = "clip-text"
    model_types = ("clip", "clip_text_model")
    tokenizer_files = (("tokenizer.json",), ("vocab.json", "merges.txt"))
    has_positions = True

    def _read_config(self) -> Any:
        from transformers import CLIPTextConfig

        config = CLIPTextConfig.from_pretrained(self.model.folder, local_files_only=True)
        # Some configurations of whole CLIPs state another size here than their weights have.
        projection = self.model.shapes.get("text_projection.weight")
        config.projection_dim = projection[0] if projection else 0
        return config

    def _sizes(self) -> tuple[int, int, int]:
        config = self.config
        return config.projection_dim or config.hidden_size, config.hidden_size, config.max_position_embeddings

    def _load(self) -> tuple[Any, Sequence[str]]:
        from transformers import CLIPTextModel, CLIPTextModelWithProjection

        kind = CLIPTextModelWithProjection if self.config.projection_dim else CLIPTextModel
        return _load(kind, self.model, self.config, self.compute_dtype)

    def _load_tokenizer(self) -> Any:
        from transformers import CLIPTokenizerFast

        return CLIPTokenizerFast.from_pretrained(self.tokenizer_folder, local_files_only=True, padding_side="right")

    def _pooled(
        self, network: Any, states: Float[Tensor, "n m width"], mask: Bool[Tensor, "n m"]
    ) -> Float[Tensor, "n size"]:
        # The end of text is the last token. Its id does not tell where it is: some tokenizers pad with it too.
        last = states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
        return network.text_projection(last) if self.config.projection_dim else last


@CAPTION_ENCODERS.register("t5-text")
class T5Text(_TextModel):
    """T5's encoder (Raffel et al. 2020, arXiv 1910.10683); for its parameters see ``_TextModel``.

    The vector is the mean of the states of the caption's tokens, end of text included.
    ``max_tokens``: None is 128, which few captions reach; T5 itself knows no limit.
    """

    name = "t5-text"
    model_types = ("t5",)
    tokenizer_files = (("tokenizer.json",), ("spiece.model",))
    has_positions = False

    def _read_config(self) -> Any:
        from transformers import T5Config

        return T5Config.from_pretrained(self.model.folder, local_files_only=True)

    def _sizes(self) -> tuple[int, int, int]:
        return self.config.d_model, self.config.d_model, 128

    def _load(self) -> tuple[Any, Sequence[str]]:
        from transformers import T5EncoderModel

        return _load(T5EncoderModel, self.model, self.config, self.compute_dtype)

    def _load_tokenizer(self) -> Any:
        from transformers import T5TokenizerFast

        return T5TokenizerFast.from_pretrained(self.tokenizer_folder, local_files_only=True, padding_side="right")

    def _pooled(
        self, network: Any, states: Float[Tensor, "n m width"], mask: Bool[Tensor, "n m"]
    ) -> Float[Tensor, "n size"]:
        return states.float().sum(1) / mask.sum(1, keepdim=True)


def _load(kind: Any, model: ModelFolder, config: Any, dtype: torch.dtype) -> tuple[Any, Sequence[str]]:
    network, info = kind.from_pretrained(
        model.folder,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    return network, info["missing_keys"]
