"""Networks of artifacts: only those are built that their weights fit; all else is one clear line."""

import json
from dataclasses import replace

import pytest
import torch
from artifact_files import PARAMS, edit, make_meta, make_network, put, refused
from deadline import within
from safetensors.torch import save_file
from torch import nn

from ddm_lightning.core import weights
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.members.artifact import read_artifact, write_artifact
from ddm_lightning.members.load import build_network, load_network


@pytest.mark.parametrize(("member", "known"), [("expert-0", "known: diffusers, dit"), ("router", "router-dit")])
def test_unknown_network_name(tmp_path, member, known):
    meta, state = read_artifact(put(tmp_path / "a", member, network="os.path:join"))

    refused(lambda: build_network(meta, state), member, "'os.path:join'", known, "install the release")


@pytest.mark.parametrize(
    "params",
    [
        {**PARAMS, "colour": 1},
        {"width": 8},
        {**PARAMS, "width": 0},
        {**PARAMS, "width": "8"},
        {**PARAMS, "x_shape": [1]},
    ],
)
def test_parameters_that_the_network_refuses(tmp_path, params):
    meta, state = read_artifact(put(tmp_path / "a", params=params))
    refused(lambda: build_network(meta, state), "expert-0", "cannot be built", "install the release")


def test_a_network_that_names_a_path_opens_nothing(tmp_path):
    folder = put(tmp_path / "artifact", network="diffusers", params={"path": str(tmp_path / "missing")})

    refused(lambda: load_network(folder), "its params name a file outside the artifact")


def test_weights_that_do_not_fit(tmp_path):
    meta, state = read_artifact(put(tmp_path / "a"))
    first, second, *_ = state

    def build(weights):
        return lambda: build_network(meta, weights)

    refused(build({k: v for k, v in state.items() if k != first}), "expert-0", f"{first!r} is missing", "install")
    refused(build({**state, "extra": torch.ones(1)}), "'extra' is floats [1] instead of absent")
    refused(build({**state, second: torch.ones(1, 77)}), f"{second!r} is floats [1, 77] instead of")
    refused(build({key: state[key] for key in list(state)[5:]}), "is missing", " and 2 more", "install the release")
    refused(build({}), "cannot be built", "more weights than their file", "install the release")
    other = replace(meta, prediction="epsilon")
    refused(lambda: build_network(other, state), "expert-0", "predict 'epsilon'", "'velocity'")


@pytest.mark.parametrize(
    "changes",
    [
        {"params": {**PARAMS, "depth": 10**6}},
        {"params": {**PARAMS, "width": 2**40}},
        {"params": {**PARAMS, "mlp_ratio": 10**400}},
        {"condition": {"kind": "text", "size": 10**9}},
        {"condition": {"kind": "tokens", "size": 5, "length": 10**9}},
        {"metrics": {"loss": 10**400}},
    ],
    ids=str,
)
def test_sizes_that_contradict_the_weights(tmp_path, changes):
    """Refused at once: nothing of these sizes is built."""
    path = put(tmp_path / "a") / "member.json"
    edit(path, **changes)

    with within(10):
        refused(lambda: load_network(tmp_path / "a"), path)


def test_weights_and_positions_that_do_not_fit_in_memory(tmp_path, monkeypatch):
    """Weights do not depend on the height and width of a sample, but the positions do: a million of 8 numbers."""
    folder = put(tmp_path / "a", x_shape=(3, 2048, 2048))

    monkeypatch.setattr(weights, "free_bytes", lambda: 100e6)
    refused(lambda: load_network(folder), folder / "member.json", "needs 167.8 MB of memory, 100.0 MB is free")
    monkeypatch.setattr(weights, "free_bytes", lambda: 1000)
    refused(lambda: load_network(folder), folder / "member.json", "of memory, 1.0 kB is free")
    refused(lambda: read_artifact(folder), folder / "model.safetensors", "of memory, 1.0 kB is free")


@pytest.mark.parametrize(("dtype", "word"), [(torch.int32, "int32 [8]"), (torch.complex64, "C64")])
def test_weights_of_unsupported_types(tmp_path, dtype, word):
    path = put(tmp_path / "a") / "model.safetensors"
    save_file({key: value.to(dtype) for key, value in make_network("expert").state_dict().items()}, path)
    edit(tmp_path / "a" / "member.json", model_sha256=sha256_file(path))
    refused(lambda: load_network(tmp_path / "a"), word)


def test_integer_buffers_are_allowed(monkeypatch):
    """As a plug-in's BatchNorm has: the type is that of the network."""
    monkeypatch.setitem(EXPERTS._built_in, "counting", _Counting)
    meta = replace(make_meta(), network="counting", params={})
    state = _Counting().state_dict()
    build_network(meta, state)
    refused(lambda: build_network(meta, {"steps": torch.ones(1)}), "'steps' is floats [1] instead of int64 [1]")


class _Counting(nn.Module):
    prediction = "velocity"

    def __init__(self, **_):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))


def test_a_plug_in_may_replace_its_weights(tmp_path, monkeypatch):
    """As weight normalisation does: more parameters are made than stay."""
    monkeypatch.setitem(EXPERTS._built_in, "normed", _Normed)
    meta = replace(make_meta(), network="normed", params={}, x_shape=(3, 256, 256))
    write_artifact(tmp_path / "a", _Normed().state_dict(), meta)
    assert isinstance(load_network(tmp_path / "a")[1], _Normed)


class _Normed(nn.Module):
    prediction = "velocity"

    def __init__(self, **_):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))


def test_more_weights_than_any_network_has(tmp_path):
    path = put(tmp_path / "a") / "model.safetensors"
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps(dict.fromkeys(map(str, range((1 << 16) + 1)), empty)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    refused(lambda: load_network(tmp_path / "a"), path, "too many weights: 65537")
