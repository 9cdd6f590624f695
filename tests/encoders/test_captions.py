import json
import re
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
            pooled, states = model.get_text_features(ids), model.text_model(ids).last_hidden_state
            pooled = getattr(pooled, "pooler_output", pooled)  # from transformers 5 on
        else:
            out = model(ids)
            states = out.last_hidden_state
            pooled = out.text_embeds if "text_embeds" in out else out.pooler_output
    return ids[0].numpy(), states[0].numpy(), pooled[0].numpy()


@pytest.mark.parametrize("kind", ["projected", "plain", "whole", "t5"])
def test_states_and_vectors_match_the_librarys_model(saved, kind):
    entry = saved[kind]
    encoder = build(entry, store="tokens", max_tokens=20)
    assert isinstance(encoder, CaptionEncoder)
    assert encoder.size == {"projected": 12, "plain": 16, "whole": 10, "t5": 16}[kind]
    found, vectors = encoder.encode(CAPTIONS), encoder.vectors(CAPTIONS)
    assert vectors.dtype == np.float32 and vectors.shape == (7, encoder.size)
    np.testing.assert_array_equal(found["text"], vectors.astype(np.float16))
    for row, caption in enumerate(CAPTIONS):
        ids, states, pooled = by_hand(entry, caption.encode("utf-8", "replace").decode(), 20)
        assert found["text_length"][row] == len(ids) <= 20
        np.testing.assert_allclose(found["text_tokens"][row, : len(ids)], states, atol=4e-3)
        assert (found["text_tokens"][row, len(ids) :] == 0).all()
        expected = pooled / np.linalg.norm(pooled) * np.sqrt(encoder.size)
        np.testing.assert_allclose(vectors[row], expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["projected", "plain", "t5"])
def test_ids_give_the_stored_vectors_during_training(saved, kind):
    online, pooled = build(saved[kind], store="ids", max_tokens=20), build(saved[kind], max_tokens=20)
    stored = online.encode(CAPTIONS)
    for row, caption in enumerate(CAPTIONS[:5]):
        ids, _, _ = by_hand(saved[kind], caption, 20)
        np.testing.assert_array_equal(stored["text_ids"][row, : stored["text_length"][row]], ids)
    vectors = online.vectors_of_stored({key: torch.from_numpy(value) for key, value in stored.items()})
    assert vectors.dtype == torch.float32 and not vectors.requires_grad and not vectors.is_inference()
    np.testing.assert_allclose(vectors, pooled.vectors(CAPTIONS), atol=1e-5)
    text = torch.from_numpy(pooled.encode(CAPTIONS)["text"])
    assert torch.equal(pooled.vectors_of_stored({"text": text}), text.float())
    torch.nn.Linear(online.size, 1)(vectors).sum().backward()  # they can be trained upon


@pytest.mark.parametrize("kind", ["plain", "t5"])
def test_prompts_stored_states_and_stored_ids_give_the_same_tokens(saved, kind):
    ids, states = (build(saved[kind], store=store, max_tokens=20) for store in ("ids", "tokens"))
    assert ids.token_shape == states.token_shape == (20, 16) and build(saved[kind]).token_shape is None
    prompt = states.tokens(CAPTIONS)
    assert prompt.shape == (7, 20, 16) and prompt.dtype == np.float32

    def of_stored(encoder):
        stored = {name: torch.from_numpy(value) for name, value in encoder.encode(CAPTIONS).items()}
        return encoder.tokens_of_stored(stored)

    np.testing.assert_allclose(of_stored(ids), prompt, atol=1e-5)
    np.testing.assert_allclose(of_stored(states), prompt, atol=4e-3)
    assert not of_stored(ids).is_inference() and not of_stored(ids).requires_grad


@pytest.mark.parametrize("kind", ["projected", "t5"])
@pytest.mark.parametrize("store", ["pooled", "tokens", "ids"])
def test_columns_declare_the_stored_arrays(saved, kind, store):
    from streaming.base.format.mds.encodings import mds_decode, mds_encode

    encoder = build(saved[kind], store=store)
    found = encoder.encode(CAPTIONS[:2])
    assert list(found) == list(encoder.columns) and all(name.startswith("text") for name in found)
    written = {name: mds_encode(encoding, found[name][1]) for name, encoding in encoder.columns.items()}
    assert sum(map(len, written.values())) == bytes_per_sample(encoder.columns)
    for name, encoding in encoder.columns.items():
        np.testing.assert_array_equal(mds_decode(encoding, written[name]), found[name][1])
    assert {name: len(value) for name, value in encoder.encode([]).items()} == dict.fromkeys(encoder.columns, 0)
    assert encoder.vectors([]).shape == (0, encoder.size)
    for name, value in encoder.encode([]).items():
        assert (value.dtype, value.shape[1:]) == (found[name].dtype, found[name].shape[1:])


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
    assert second.tokenizer_folder == tmp_path / "tokenizer_2"
    ids = [encoder.encode(["red dog"]) for encoder in (first, second)]
    length = ids[0]["text_length"][0]
    assert length == ids[1]["text_length"][0] == 4 and (ids[0]["text_ids"] != ids[1]["text_ids"])[0, length:].all()
    np.testing.assert_array_equal(first.vectors(["red dog"]), second.vectors(["red dog"]))
    chosen = build(entry, subfolder="text_encoder", tokenizer="tokenizer_2")
    assert chosen.tokenizer_folder == second.tokenizer_folder
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
    entry = ("t5gemma-text", tmp_path, None)
    encoder = build(entry, subfolder="text_encoder", store="tokens", max_tokens=20)
    found, lengths = encoder.tokens(prompts), encoder.encode(prompts)["text_length"]
    assert build(entry, subfolder="text_encoder", store="tokens").token_shape == (256, 16)
    assert lengths.tolist() == mask.sum(1).tolist() and len({*lengths}) == 4 and lengths.max() == 20
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(found[row, :length], expected[row][mask[row]].numpy(), atol=1e-4)
        assert (found[row, length:] == 0).all()
    stored = {
        name: torch.from_numpy(rows)
        for name, rows in build(entry, subfolder="text_encoder", store="ids", max_tokens=20).encode(prompts).items()
    }
    np.testing.assert_allclose(encoder.tokens_of_stored(stored), found, atol=1e-5)


def test_reduced_precision_is_close(saved):
    for kind in ("projected", "t5"):
        exact, near = build(saved[kind]), build(saved[kind], compute_dtype="bfloat16")
        vectors = exact.vectors(CAPTIONS)
        assert 0 < np.abs(vectors - near.vectors(CAPTIONS)).max() < 0.15
        with torch.autocast("cpu", torch.bfloat16):  # of the training
            np.testing.assert_array_equal(exact.vectors(CAPTIONS), vectors)


@pytest.mark.parametrize(
    ("params", "device", "capability", "expected"),
    [
        ({}, "cuda", (9, 0), torch.bfloat16),
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
        ("t5", {"tokenizer": "tokenizer"}, "tokenizer: no tokenizer .tokenizer.json, or spiece.model., needed by"),
    ],
)
def test_bad_parameters_are_refused(saved, kind, params, complaint):
    with pytest.raises(UserError, match=complaint) as refusal:
        build(saved[kind], **params)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "damage", "complaint"),
    [
        ("projected", "no merges", "no tokenizer (tokenizer.json, or vocab.json and merges.txt), needed by"),
        ("projected", "another tokenizer", "words, but .* knows 518; set the parameter 'tokenizer'"),
        ("projected", "broken", "cannot be loaded by caption encoder 'clip-text'"),
        ("t5", "broken", "cannot be loaded by caption encoder 't5-text'"),
        ("t5", "another model", "model_type is 'bert', but caption encoder 't5-text' takes t5"),
        ("plain", "another model", "model_type is 'bert', but caption encoder 'clip-text' takes clip or"),
    ],
)
def test_a_wrong_tokenizer_or_model_is_named(saved, tmp_path, kind, damage, complaint):
    name, folder, _ = saved[kind]
    folder = shutil.copytree(folder, tmp_path / "model")
    if damage == "no merges":
        (folder / "merges.txt").unlink()
    elif damage == "another tokenizer":
        vocabulary = json.loads((folder / "vocab.json").read_text())
        (folder / "vocab.json").write_text(json.dumps({**vocabulary, "more": len(vocabulary)}))
    elif damage == "broken":
        (folder / ("vocab.json" if kind == "projected" else "tokenizer.json")).write_text("{]")
    else:
        (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match=complaint if "*" in complaint else re.escape(complaint)) as refusal:
        CAPTION_ENCODERS.build(name, {"path": str(folder)}).encode(["dog"])
    assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value)


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
