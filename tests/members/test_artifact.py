"""Artifacts: what is written comes back, and every bad file is one clear line that names it and the remedy."""

import json
from dataclasses import MISSING, fields, replace

import pytest
import torch
from artifact_files import SHAPE, edit, make_meta, make_network, put, refused
from deadline import within

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.flow.condition import Condition
from ddm_lightning.members.artifact import read_artifact, write_artifact
from ddm_lightning.members.load import build_network
from ddm_lightning.members.meta import ArtifactMeta, temperatures_of


@pytest.mark.parametrize("member", ["expert-0", "router", "monolith"])
def test_round_trip_gives_the_same_network(tmp_path, member):
    trained = make_network(make_meta(member).role, seed=3).eval()

    written = write_artifact(tmp_path / "a", trained.state_dict(), make_meta(member))
    meta, state = read_artifact(tmp_path / "a")
    network = build_network(meta, state)

    weights = tmp_path / "a" / "model.safetensors"
    assert meta == written == replace(make_meta(member), model_sha256=sha256_file(weights))
    assert {path.name for path in weights.parent.iterdir()} == {"member.json", weights.name}
    assert not network.training
    inputs = (torch.randn(2, *SHAPE), torch.tensor([0.2, 0.8]), Condition.of(torch.randn(2, 5)))
    assert torch.equal(network(*inputs), trained(*inputs))


def test_writing_replaces_the_artifact_or_leaves_it(tmp_path):
    folder = tmp_path / "a"
    put(folder, step=1)
    put(folder, step=2)

    def write(number, **changes):
        write_artifact(folder, {"w": torch.tensor([number])}, make_meta(**changes))

    refused(lambda: write(1.0, step=-1), "'step' = -1: must be at least 0")
    refused(lambda: write(torch.nan), f"{folder}: weight 'w'", "learning rate")
    refused(lambda: write(-torch.inf), f"{folder}: weight 'w'", "learning rate")

    assert read_artifact(folder)[0].step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_missing_files(tmp_path):
    refused(lambda: read_artifact(tmp_path / "a"), tmp_path / "a" / "member.json", "is missing", "fetch")
    (put(tmp_path / "a") / "model.safetensors").unlink()
    refused(lambda: read_artifact(tmp_path / "a"), tmp_path / "a" / "model.safetensors", "are missing", "fetch")


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\xff"])
def test_bad_json(tmp_path, text):
    path = put(tmp_path / "a") / "member.json"
    path.write_bytes(text.encode("latin-1"))
    refused(lambda: read_artifact(tmp_path / "a"), path, "fetch this artifact again")


def test_missing_and_unknown_keys(tmp_path):
    path = put(tmp_path / "a") / "member.json"
    original = path.read_text()

    may_be_missing = {one.name for one in fields(ArtifactMeta) if {one.default, one.default_factory} != {MISSING}}
    for key in json.loads(original).keys() - may_be_missing:
        path.write_text(original)
        edit(path, **{key: ...})
        refused(lambda: read_artifact(tmp_path / "a"), path, f"key {key!r} is missing", "fetch this artifact again")

    path.write_text(original)
    edit(path, code="os.system")
    refused(lambda: read_artifact(tmp_path / "a"), path, "unknown key 'code'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format_version", 2),
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

    line = refused(lambda: read_artifact(tmp_path / "a"), path, key)

    assert ("install the release" if key == "format_version" else "fetch this artifact again") in line


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


def test_temperatures_are_by_time_whatever_the_order_of_the_metrics():
    metrics = {f"held_out/temperature{branch}_t{t}": t for t in (0.9, 0.1, 0.5) for branch in ("", "_conditional")}
    assert temperatures_of(replace(make_meta("router"), metrics=metrics)) == ([0.1, 0.5, 0.9], [0.1, 0.5, 0.9])
