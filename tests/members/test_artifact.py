"""Artifacts: what is written comes back, and every bad file is one clear line that names it and the remedy."""

import json
from dataclasses import replace

import pytest
import torch
from artifact_files import PARAMS, SHAPE, edit, make_meta, make_network, put, refused
from deadline import within
from safetensors.torch import save_file
from torch import nn

from ddm_lightning.core import weights
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition
from ddm_lightning.members.artifact import build_network, load_network, read_artifact, read_meta, write_artifact


@pytest.mark.parametrize("member", ["expert-0", "router", "monolith"])
def test_round_trip_gives_the_same_network(tmp_path, member):
    trained = make_network(make_meta(member).role, seed=3).eval()
    written = write_artifact(tmp_path / "a", trained.state_dict(), make_meta(member))
    meta, state = read_artifact(tmp_path / "a")
    assert meta == written == replace(make_meta(member), model_sha256=sha256_file(tmp_path / "a" / "model.safetensors"))
    network = build_network(meta, state)
    assert not network.training
    x_t, t, condition = torch.randn(2, *SHAPE), torch.tensor([0.2, 0.8]), Condition.of(torch.randn(2, 5))
    assert torch.equal(network(x_t, t, condition), trained(x_t, t, condition))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["member.json", "model.safetensors"]


def test_writing_replaces_the_artifact_or_leaves_it(tmp_path):
    put(tmp_path / "a", step=1)
    put(tmp_path / "a", step=2)
    assert read_meta(tmp_path / "a").step == 2
    with pytest.raises(ValueError, match="'step' must be an integer"):
        write_artifact(tmp_path / "a", {"w": torch.ones(1)}, replace(make_meta(), step=-1))
    for number in (torch.nan, torch.inf, -torch.inf):
        refused(
            lambda number=number: write_artifact(tmp_path / "a", {"w": torch.tensor([number])}, make_meta()),
            f"{tmp_path / 'a'}: weight 'w'",
            "learning rate",
        )
    assert read_artifact(tmp_path / "a")[0].step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_missing_files(tmp_path):
    refused(lambda: read_artifact(tmp_path / "a"), tmp_path / "a" / "member.json", "is missing", "fetch")
    (put(tmp_path / "a") / "model.safetensors").unlink()
    refused(lambda: read_artifact(tmp_path / "a"), tmp_path / "a" / "model.safetensors", "are missing", "fetch")


@pytest.mark.parametrize("text", ["{", "", "[1, 2]", "null", '"expert-0"', "\xff"])
def test_bad_json(tmp_path, text):
    path = put(tmp_path / "a") / "member.json"
    path.write_bytes(text.encode("latin-1"))
    refused(lambda: read_artifact(tmp_path / "a"), path, "fetch this artifact again")


def test_missing_and_unknown_keys(tmp_path):
    path = put(tmp_path / "a") / "member.json"
    original = path.read_text()
    for key in json.loads(original):
        path.write_text(original)
        edit(path, **{key: ...})
        added = {
            "path": "linear",
            "lora": None,
            "clusters": [],
            "class_counts": [],
            "init_from": None,
            "init_sha256": None,
        }
        if key in (added := {**added, "cluster": 0, "interval": [0.0, 1.0]}):
            assert getattr(read_meta(tmp_path / "a"), key) == added[key], "of an earlier release"
            continue
        refused(lambda: read_artifact(tmp_path / "a"), path, f"key {key!r} is missing", "fetch this artifact again")
    path.write_text(original)
    edit(path, code="os.system")
    refused(lambda: read_artifact(tmp_path / "a"), path, "unknown key 'code'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("member", "expert-01"),
        ("member", "../router"),
        ("network", "dit\n"),
        ("x_shape", [3, 4, 0]),
        ("condition", {"kind": "none", "size": 4}),
        ("prediction", "score"),
        ("path", "sine"),
        ("timestep_shift", float("nan")),
        ("timestep_shift", 0),
        ("normalisation", {"scale": 0, "shift": 1}),
        ("partition_sha256", "xyz"),
        ("step", 1.5),
        ("metrics", {"loss": float("inf")}),
        # These contradict others.
        ("cluster", 2),
        ("interval", [0.5, 0.5]),
        ("role", "router"),
        ("prediction", None),
        ("class_counts", [1, 2, 3, 4, 5]),
    ],
)
def test_wrong_values(tmp_path, key, value):
    path = put(tmp_path / "a") / "member.json"
    edit(path, **{key: value})
    refused(lambda: read_artifact(tmp_path / "a"), path, f"key {key!r}", "fetch this artifact again")


WEIRD = [None, True, -1, 1e400, "", "x" * 500, "\0", [], [[]], {}, {"name": 1}, {"kind": [], "size": {}}]


def test_any_wrong_value_is_one_line(tmp_path):
    path = put(tmp_path / "a") / "member.json"
    original = path.read_text()
    lines = []
    for key in json.loads(original):
        for value in WEIRD:
            path.write_text(original)
            edit(path, **{key: value})
            try:
                meta, state = read_artifact(tmp_path / "a")
                build_network(meta, state)
            except UserError as error:
                lines.append(str(error))
    assert len(lines) > 200
    assert all("\n" not in line and (str(path) in line or line.startswith("expert-0: ")) for line in lines)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_unknown_format_version(tmp_path, version):
    path = put(tmp_path / "a") / "member.json"
    edit(path, format_version=version)
    refused(lambda: read_artifact(tmp_path / "a"), path, "format_version", "install the release")


@pytest.mark.parametrize("member", ["expert-0", "router"])
def test_unknown_network_name(tmp_path, member):
    edit(put(tmp_path / "a", member) / "member.json", network="os.path:join")
    meta, state = read_artifact(tmp_path / "a")
    line = refused(lambda: build_network(meta, state), member, "'os.path:join'", "install the release")
    assert ("router-dit" if member == "router" else "known: diffusers, dit") in line


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
    folder = put(tmp_path / "artifact")
    edit(folder / "member.json", network="diffusers", params={"path": str(tmp_path / "missing")})
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


def test_positions_that_do_not_fit_in_memory(tmp_path, monkeypatch):
    """Weights do not depend on the height and width of a sample, but the positions do: a million of 8 numbers."""
    path = put(tmp_path / "a") / "member.json"
    edit(path, x_shape=[3, 2048, 2048])
    monkeypatch.setattr(weights, "free_bytes", lambda: 100e6)
    refused(lambda: load_network(tmp_path / "a"), path, "needs 167.8 MB of memory, 100.0 MB is free")


def test_weights_that_do_not_fit_in_memory(tmp_path, monkeypatch):
    path = put(tmp_path / "a") / "member.json"
    monkeypatch.setattr(weights, "free_bytes", lambda: 1000)
    refused(lambda: load_network(tmp_path / "a"), path, "of memory, 1.0 kB is free")
    refused(lambda: read_artifact(tmp_path / "a"), tmp_path / "a" / "model.safetensors", "of memory, 1.0 kB is free")


@pytest.mark.parametrize(("dtype", "word"), [(torch.int32, "int32 [8]"), (torch.complex64, "C64")])
def test_weights_of_unsupported_types(tmp_path, dtype, word):
    path = put(tmp_path / "a") / "model.safetensors"
    save_file({key: value.to(dtype) for key, value in make_network("expert").state_dict().items()}, path)
    edit(tmp_path / "a" / "member.json", model_sha256=sha256_file(path))
    refused(lambda: load_network(tmp_path / "a"), word)


def test_integer_buffers_are_allowed(monkeypatch):
    """As a plug-in's BatchNorm has: the type is that of the network."""
    monkeypatch.setitem(EXPERTS._built_in, "counting", _Counting)
    meta, state = replace(make_meta(), network="counting", params={}), _Counting().state_dict()
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


def test_a_link_to_weights_elsewhere(tmp_path):
    path = put(tmp_path / "a") / "model.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refused(lambda: read_artifact(tmp_path / "a"), path, "a link that leads out of its folder")


def test_weights_of_a_terabyte_that_take_no_room(tmp_path):
    path = put(tmp_path / "a") / "model.safetensors"
    with path.open("r+b") as stream:
        stream.truncate(1 << 40)
    with within(10):
        refused(lambda: read_artifact(tmp_path / "a"), path, "not a whole safetensors file")


def test_more_weights_than_any_network_has(tmp_path):
    path = put(tmp_path / "a") / "model.safetensors"
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps(dict.fromkeys(map(str, range((1 << 16) + 1)), empty)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    refused(lambda: load_network(tmp_path / "a"), path, "too many weights: 65537")
