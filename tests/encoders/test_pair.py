"""Two caption encoders as one, from the shards to the samples."""

import json
import shutil

import numpy as np
import pytest
import torch
from encoders.tiny_models import save_clip, save_t5
from prepare.tiny_experiment import tiny_experiment
from shards.mds import WARNINGS
from tiny_runs import TINY

from ddm_lightning.cli.parser import main
from ddm_lightning.config.experiment import PluginConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CAPTION_ENCODERS
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.meta import read_meta
from ddm_lightning.prepare.engine import num_gpus_for
from ddm_lightning.use.rows import text_condition

pytestmark = WARNINGS
CAPTIONS = ["a red apple", "dog on the table", ""]


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_clip(folder / "clip")
    save_t5(folder / "t5")
    vector = {"name": "clip-text", "params": {"path": str(folder / "clip")}}
    return vector, {"name": "t5-text", "params": {"path": str(folder / "t5"), "max_tokens": 9}}


def storing(plugin, store):
    return {**plugin, "params": {**plugin["params"], "store": store}}


@pytest.mark.parametrize("store_vector", ["pooled", "tokens", "ids"])
@pytest.mark.parametrize("store_tokens", ["tokens", "ids"])
def test_each_encoder_gives_its_part(plugins, store_vector, store_tokens):
    vector, tokens = (storing(*given) for given in zip(plugins, (store_vector, store_tokens), strict=True))
    pair = CAPTION_ENCODERS.build("pair", {"vector": vector, "tokens": tokens})
    clip, t5 = (CAPTION_ENCODERS.build(plugin["name"], plugin["params"]) for plugin in (vector, tokens))
    assert (pair.size, pair.token_shape) == (clip.size, t5.token_shape) == (12, (9, 16))
    assert pair.packages[:2] == clip.packages

    rows, of_clip, of_t5 = (one.encode(CAPTIONS) for one in (pair, clip, t5))
    expected = {name: of_t5[name] for name in (f"text_{store_tokens}", "text_length")}
    if store_vector == "ids":
        expected |= {f"text_vector_{name}": of_clip[f"text_{name}"] for name in ("ids", "length")}
    else:
        expected["text"] = of_clip["text"]

    assert rows.keys() == expected.keys() == pair.columns.keys()
    for name, values in rows.items():
        np.testing.assert_array_equal(values, expected[name])

    np.testing.assert_array_equal(pair.vectors(CAPTIONS), clip.vectors(CAPTIONS))
    np.testing.assert_array_equal(pair.tokens(CAPTIONS), t5.tokens(CAPTIONS))
    stored = {name: torch.from_numpy(values) for name, values in rows.items()}
    np.testing.assert_allclose(pair.vectors_of_stored(stored), clip.vectors(CAPTIONS), atol=2e-3)
    np.testing.assert_allclose(pair.tokens_of_stored(stored), t5.tokens(CAPTIONS), atol=2e-2)
    facts = pair.provenance()
    assert facts["vector_weights_sha256"] == clip.provenance()["weights_sha256"]
    assert facts["tokens_weights_sha256"] == t5.provenance()["weights_sha256"]


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"tokens": {"name": "hashed-words"}}, "'hashed-words' makes no tokens; set its param 'store' or 'max_tokens'"),
        ({"tokens": {"name": "t6-text"}}, "unknown caption encoder 't6-text'"),
        ({"tokens": {"name": "hashed-words", "parms": {}}}, r"unknown key 'params\.tokens\.parms'"),
        ({"tokens": "t5-text"}, r"key 'params\.tokens': must be a mapping"),
        ({}, "needs the parameter 'tokens'"),
    ],
)
def test_a_pair_that_cannot_be_built_is_refused(params, complaint):
    with pytest.raises(UserError, match=complaint):
        CAPTION_ENCODERS.build("pair", {"vector": {"name": "hashed-words"}, **params})


def test_gpus_of_both_encoders_count():
    params = {"vector": {"name": "clip-text", "params": {"device": "cuda:1"}}, "tokens": {"name": "hashed-words"}}
    assert num_gpus_for(tiny_experiment().prepare) == 0
    experiment = tiny_experiment()
    experiment.prepare.caption_encoder = PluginConfig("pair", params)
    assert num_gpus_for(experiment.prepare) == 1


def test_a_member_trains_on_both_and_samples_by_prompt(plugins, tmp_path, capsys):
    vector, tokens = plugins
    own = shutil.copytree(tokens["params"]["path"], tmp_path / "t5")
    tokens = storing(tokens, "ids")
    tokens["params"]["path"] = str(own)
    settings = [
        f"prepare.caption_encoder={json.dumps({'name': 'pair', 'params': {'vector': vector, 'tokens': tokens}})}",
        "condition.kind=tokens+text",
        "expert.network={name: mmdit, params: {width: 16, depth: 1, num_heads: 2, patch_size: 4}}",
        "expert.train.max_steps=2",
        "island.validate_every_n_steps=2",
        f"run_dir={tmp_path}",
    ]
    for command in (["prepare"], ["fit", "member=expert-0"]):
        assert main([command[0], "-c", str(TINY), *command[1:], *settings]) == 0
    spec = ConditionSpec("tokens+text", 16, 9, 12)
    meta = read_meta(tmp_path / "members" / "expert-0" / "artifact")
    condition = text_condition(CAPTIONS, meta)
    assert meta.condition == spec
    assert (condition.values.shape, condition.vectors.shape) == ((3, 9, 16), (3, 12))
    member = ["sample.member=expert-0", "sample.num_steps=2", "sample.num_per_prompt=1"]
    assert main(["sample", "-c", str(TINY), "--prompt", "a red apple", *settings, *member]) == 0

    (tmp_path / "prepared" / "parts.json").unlink()  # as on another island, where nothing is prepared
    content = bytearray((own / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (own / "model.safetensors").write_bytes(content)
    capsys.readouterr()
    assert main(["fit", "-c", str(TINY), "member=expert-1", *settings]) == 2
    assert "caption_encoder': tokens_weights_sha256 of this machine's model differ from" in capsys.readouterr().err
