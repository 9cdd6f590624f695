import json
import shutil

import numpy as np
import pytest
import torch
from encoders.tiny_models import save_clip, save_t5, save_t5gemma

from ddm_lightning.core import registry
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CAPTION_ENCODERS
from ddm_lightning.encoders import captions
from ddm_lightning.encoders.interfaces import CaptionEncoder, bytes_per_sample

CAPTIONS = [
    "red apple",
    "",
    "a dog on the table",
    "🍎 שלום تفاحة",
    "flag: Côte d'Ivoire\n",
    "dog " * 25_000,
    "dog \ud83d",
]
TOKENIZERS = {"clip-text": "CLIPTokenizer", "t5-text": "T5TokenizerFast"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name of the encoder, folder and the library's model of each kind."""
    root = tmp_path_factory.mktemp("text")
    return {
        "projected": ("clip-text", root / "projected", save_clip(root / "projected")),
        "plain": ("clip-text", root / "plain", save_clip(root / "plain", projected=False)),
        "whole": ("clip-text", root / "whole", save_clip(root / "whole", whole=True)),
        "t5": ("t5-text", root / "t5", save_t5(root / "t5")),
    }


def build(entry, **params):
    name, folder, _ = entry
    return CAPTION_ENCODERS.build(name, {"path": str(folder), **params})


def by_hand(entry, caption, max_tokens):
    """Ids, states and pooled vector of one caption alone, by the library's own model and slow tokenizer."""
    import transformers

    name, folder, model = entry
    tokenizer = getattr(transformers, TOKENIZERS[name]).from_pretrained(folder)
    ids = tokenizer(caption, truncation=True, max_length=max_tokens, return_tensors="pt").input_ids
    with torch.no_grad():
        if name == "t5-text":
            states = model(ids).last_hidden_state
            pooled = states.mean(1)
        elif hasattr(model, "get_text_features"):
            states = model.text_model(ids).last_hidden_state
            pooled = model.get_text_features(ids)
            pooled = getattr(pooled, "pooler_output", pooled)  # from transformers 5 on
        else:
            out = model(ids)
            states = out.last_hidden_state
            pooled = out.text_embeds if "text_embeds" in out else out.pooler_output

    return ids[0].numpy(), states[0].numpy(), pooled[0].numpy()


def tensors(arrays):
    return {name: torch.from_numpy(values) for name, values in arrays.items()}


@pytest.mark.parametrize(("kind", "size"), [("projected", 12), ("plain", 16), ("whole", 10), ("t5", 16)])
def test_states_and_vectors_match_the_librarys_model(saved, kind, size):
    encoder = build(saved[kind], store="tokens", max_tokens=20)
    found = encoder.encode(CAPTIONS)
    vectors = encoder.vectors(CAPTIONS)

    assert isinstance(encoder, CaptionEncoder)
    assert encoder.size == size
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(found["text"], vectors.astype(np.float16))
    for row, caption in enumerate(CAPTIONS):
        ids, states, pooled = by_hand(saved[kind], caption.encode("utf-8", "replace").decode(), 20)
        assert found["text_length"][row] == len(ids) <= 20
        np.testing.assert_allclose(found["text_tokens"][row, : len(ids)], states, atol=4e-3)
        assert (found["text_tokens"][row, len(ids) :] == 0).all()
        expected = pooled / np.linalg.norm(pooled) * np.sqrt(size)
        np.testing.assert_allclose(vectors[row], expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["projected", "plain", "t5"])
def test_training_on_ids_and_on_stored_states_and_prompts_see_the_same(saved, kind):
    pooled, states, online = (build(saved[kind], store=store, max_tokens=20) for store in ("pooled", "tokens", "ids"))
    ids = online.encode(CAPTIONS)
    for row, caption in enumerate(CAPTIONS[:5]):
        expected, _, _ = by_hand(saved[kind], caption, 20)
        np.testing.assert_array_equal(ids["text_ids"][row, : ids["text_length"][row]], expected)

    vectors = online.vectors_of_stored(tensors(ids))
    tokens = online.tokens_of_stored(tensors(ids))
    for found in (vectors, tokens):
        assert found.dtype == torch.float32
        assert not found.requires_grad

    np.testing.assert_allclose(vectors, pooled.vectors(CAPTIONS), atol=1e-5)
    np.testing.assert_allclose(tokens, states.tokens(CAPTIONS), atol=1e-5)
    torch.nn.Linear(online.size, 1)(vectors).sum().backward()  # they can be trained upon

    text = pooled.encode(CAPTIONS)["text"]
    np.testing.assert_array_equal(pooled.vectors_of_stored(tensors({"text": text})), text.astype(np.float32))
    stored = states.tokens_of_stored(tensors(states.encode(CAPTIONS)))
    np.testing.assert_allclose(stored, states.tokens(CAPTIONS), atol=4e-3)
    assert online.token_shape == states.token_shape == tokens.shape[1:] == (20, 16)
    assert pooled.token_shape is None


@pytest.mark.parametrize("kind", ["projected", "t5"])
@pytest.mark.parametrize("store", ["pooled", "tokens", "ids"])
def test_columns_declare_the_stored_arrays(saved, kind, store):
    from streaming.base.format.mds.encodings import mds_decode, mds_encode

    encoder = build(saved[kind], store=store)
    found = encoder.encode(CAPTIONS[:2])
    nothing = encoder.encode([])

    assert list(found) == list(nothing) == list(encoder.columns)
    num_bytes = 0
    for name, encoding in encoder.columns.items():
        written = mds_encode(encoding, found[name][1])
        num_bytes += len(written)
        np.testing.assert_array_equal(mds_decode(encoding, written), found[name][1])
        assert (nothing[name].dtype, nothing[name].shape) == (found[name].dtype, (0, *found[name].shape[1:]))

    assert num_bytes == bytes_per_sample(encoder.columns)
    assert encoder.vectors([]).shape == (0, encoder.size)


@pytest.mark.parametrize("kind", ["projected", "t5"])
def test_batch_size_and_process_do_not_matter(saved, kind, monkeypatch):
    encoder = build(saved[kind], store="tokens")
    together = encoder.encode(CAPTIONS)
    for name, value in build(saved[kind], store="tokens").encode(CAPTIONS).items():
        assert value.tobytes() == together[name].tobytes()

    monkeypatch.setitem(captions._CAPTIONS_AT_ONCE, "cpu", 2)
    for name, value in encoder.encode(CAPTIONS).items():
        np.testing.assert_allclose(value.astype(float), together[name].astype(float), atol=4e-3)


def test_a_pipelines_tokenizer_is_found_beside_its_encoder(saved, tmp_path):
    """As in SDXL, whose second tower is ``text_encoder_2`` and pads with another token than it ends with."""
    for number in ("", "_2"):
        save_clip(tmp_path / f"text_encoder{number}", tokenizer=tmp_path / f"tokenizer{number}", hidden_size=8)
    tokens = {"pad_token": "!", "eos_token": "<|endoftext|>", "bos_token": "<|startoftext|>"}
    (tmp_path / "tokenizer_2" / "tokenizer_config.json").write_text(json.dumps(tokens))
    entry = ("clip-text", tmp_path, None)
    first, second = (build(entry, subfolder=f"text_encoder{number}", store="ids") for number in ("", "_2"))
    chosen = build(entry, subfolder="text_encoder", tokenizer="tokenizer_2")
    ids = first.encode(["red dog"])["text_ids"][0]
    others = second.encode(["red dog"])["text_ids"][0]

    assert second.tokenizer_folder == chosen.tokenizer_folder == tmp_path / "tokenizer_2"
    assert (ids == others).tolist() == [True] * 4 + [False] * 16
    np.testing.assert_array_equal(first.vectors(["red dog"]), second.vectors(["red dog"]))
    assert first.provenance()["weights_sha256"] == second.provenance()["weights_sha256"]
    assert first.provenance()["config_sha256"] != second.provenance()["config_sha256"]


def test_a_whole_t5_gives_its_encoder(saved, tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    folder = shutil.copytree(saved["t5"][1], tmp_path / "t5")
    torch.manual_seed(5)
    whole = T5ForConditionalGeneration(T5Config.from_pretrained(folder)).eval()
    whole.save_pretrained(folder)
    entry = ("t5-text", folder, whole.encoder)
    _, _, pooled = by_hand(entry, "red dog", 20)
    expected = pooled / np.linalg.norm(pooled) * 4
    np.testing.assert_allclose(build(entry).vectors(["red dog"])[0], expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated:FutureWarning")  # a base of PRX's pipeline
def test_t5gemma_gives_the_states_of_prxs_own_pipeline(tmp_path):
    from diffusers import PRXPipeline
    from transformers import GemmaTokenizerFast

    text_encoder = save_t5gemma(tmp_path)
    tokenizer = GemmaTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    assert tokenizer.padding_side == "left"
    parts = dict.fromkeys(("transformer", "scheduler", "vae")) | {"tokenizer": tokenizer, "text_encoder": text_encoder}
    prompts = ["Red Apple", "", "a dog on the table: see https://dogs.org #1", "the dog " * 30]
    expected, mask, *_ = PRXPipeline(**parts).encode_prompt(prompts, "cpu", do_classifier_free_guidance=False)

    def of(store, **params):
        return build(("t5gemma-text", tmp_path, None), subfolder="text_encoder", store=store, **params)

    encoder = of("tokens", max_tokens=20)
    found = encoder.tokens(prompts)
    lengths = encoder.encode(prompts)["text_length"]
    assert of("tokens").token_shape == (256, 16)
    assert lengths.tolist() == mask.sum(1).tolist()
    assert len({*lengths}) == 4
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(found[row, :length], expected[row][mask[row]].numpy(), atol=1e-4)
        assert (found[row, length:] == 0).all()

    ids = tensors(of("ids", max_tokens=20).encode(prompts))
    np.testing.assert_allclose(encoder.tokens_of_stored(ids), found, atol=1e-5)


@pytest.mark.parametrize("kind", ["projected", "t5"])
def test_reduced_precision_is_close_and_that_of_a_training_does_not_count(saved, kind):
    encoder = build(saved[kind])
    vectors = encoder.vectors(CAPTIONS)
    rounded = build(saved[kind], compute_dtype="bfloat16").vectors(CAPTIONS)
    assert 0 < np.abs(vectors - rounded).max() < 0.15
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_array_equal(encoder.vectors(CAPTIONS), vectors)


@pytest.mark.parametrize(
    ("params", "device", "capability", "expected"),
    [
        ({}, "cuda:1", (8, 0), torch.bfloat16),
        ({}, "cuda", (7, 5), torch.float32),  # has no units for it
        ({}, "cpu", None, torch.float32),
        ({"compute_dtype": "float32"}, "cuda", (9, 0), torch.float32),
        ({"compute_dtype": "float16"}, "cpu", None, torch.float16),
    ],
)
def test_without_a_type_gpus_that_have_bfloat16_use_it(saved, monkeypatch, params, device, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert build(saved["plain"], **params).dtype_on(torch.device(device)) == expected


@pytest.mark.parametrize(
    ("kind", "params", "complaint"),
    [
        ("projected", {"store": "all"}, "store = 'all' must be pooled, tokens or ids"),
        ("projected", {"max_tokens": 21}, "max_tokens = 21 must be at most 20, the model"),
        ("projected", {"max_tokens": 1}, "max_tokens = 1 must be at least 2; change them"),
        ("t5", {"max_tokens": 0}, "max_tokens = 0 must be at least 2; change them"),
        ("t5", {"tokenizer": "tokenizer"}, "tokenizer: no tokenizer .tokenizer.json or spiece.model., needed by"),
    ],
)
def test_bad_parameters_are_refused(saved, kind, params, complaint):
    with pytest.raises(UserError, match=complaint):
        build(saved[kind], **params)


@pytest.mark.parametrize(
    ("kind", "file", "content", "complaint"),
    [
        ("projected", "vocab.json", None, r"no tokenizer \(tokenizer.json or vocab.json\), needed by"),
        ("projected", "vocab.json", "a word more", "words, but .* knows 518; set the parameter 'tokenizer'"),
        ("projected", "vocab.json", "{]", "cannot be loaded by caption encoder 'clip-text'"),
        ("t5", "tokenizer.json", "{]", "cannot be loaded by caption encoder 't5-text'"),
        ("t5", "config.json", '{"model_type": "bert"}', "'bert', but caption encoder 't5-text' takes t5"),
        ("plain", "config.json", '{"model_type": "bert"}', "'bert', but caption encoder 'clip-text' takes clip or"),
    ],
    ids=str,
)
def test_a_wrong_tokenizer_or_model_is_named(saved, tmp_path, kind, file, content, complaint):
    name, folder, _ = saved[kind]
    folder = shutil.copytree(folder, tmp_path / "model")
    if content is None:
        (folder / file).unlink()
    elif content == "a word more":
        words = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**words, "more": len(words)}))
    else:
        (folder / file).write_text(content)

    with pytest.raises(UserError, match=rf"^{folder}.*{complaint}.*$"):
        build((name, folder, None)).encode(["dog"])


def test_a_sentencepiece_model_needs_its_package(saved, tmp_path, monkeypatch):
    folder = shutil.copytree(saved["t5"][1], tmp_path / "t5")
    (folder / "tokenizer.json").rename(folder / "spiece.model")
    installed = registry.distribution

    def absent(name):
        if name == "sentencepiece":
            raise registry.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(registry, "distribution", absent)
    with pytest.raises(
        UserError, match=r"whose tokenizer is a SentencePiece model, needs the package 'sentencepiece'; .*\[latents\]"
    ):
        build(("t5-text", folder, None))


def test_a_sentencepiece_model_cuts_as_its_own_library(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    save_t5(tmp_path, vocab_size=200)
    for path in tmp_path.glob("*token*.json"):
        path.unlink()
    lines = tmp_path / "lines.txt"
    lines.write_text("red apple on the table\na dog on a table\nthe red dog\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(lines), model_prefix=str(tmp_path / "spiece"), vocab_size=40, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    ids = build(("t5-text", tmp_path, None), store="ids").encode(["red table"])
    expected = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model")).encode("red table")
    assert ids["text_ids"][0, : ids["text_length"][0]].tolist() == [*expected, 1]
