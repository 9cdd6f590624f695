"""Artifacts: what is written comes back, and every bad file is one clear line that names it and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from artifact_files import PARAMS, SHAPE, edit, make_meta, make_network, put, refused
from torch import Tensor

from ddm_lightning.artifacts import build_network, read_artifact, read_meta, write_artifact
from ddm_lightning.errors import UserError
from ddm_lightning.files import sha256_file
from ddm_lightning.flow.condition import Condition


@pytest.mark.parametrize("member", ["expert-0", "router", "monolith"])
def test_round_trip_gives_the_same_network(tmp_path: Path, member: str) -> None:
    trained = make_network(make_meta(member).role, seed=3).eval()
    written = write_artifact(tmp_path / "a", trained.state_dict(), make_meta(member))
    meta, state = read_artifact(tmp_path / "a")
    assert meta == written == replace(make_meta(member), model_sha256=sha256_file(tmp_path / "a" / "model.safetensors"))
    network = build_network(meta, state)
    assert not network.training
    x_t, t, condition = torch.randn(2, *SHAPE), torch.tensor([0.2, 0.8]), Condition.of(torch.randn(2, 5))
    assert torch.equal(network(x_t, t, condition), trained(x_t, t, condition))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["member.json", "model.safetensors"]


def test_writing_replaces_the_artifact_or_leaves_it(tmp_path: Path) -> None:
    put(tmp_path / "a", step=1)
    put(tmp_path / "a", step=2)
    assert read_meta(tmp_path / "a").step == 2
    with pytest.raises(ValueError, match="'step' must be an integer"):
        write_artifact(tmp_path / "a", {"w": torch.ones(1)}, replace(make_meta(), step=-1))
    refused(
        lambda: write_artifact(tmp_path / "a", {"w": torch.tensor([torch.nan])}, make_meta()),
        f"{tmp_path / 'a'}: weight 'w'",
        "learning rate",
    )
    assert read_artifact(tmp_path / "a")[0].step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_missing_files(tmp_path: Path) -> None:
    refused(lambda: read_artifact(tmp_path / "a"), tmp_path / "a" / "member.json", "is missing", "fetch")
    (put(tmp_path / "a") / "model.safetensors").unlink()
    refused(lambda: read_artifact(tmp_path / "a"), tmp_path / "a" / "model.safetensors", "are missing", "fetch")


@pytest.mark.parametrize("text", ["{", "", "[1, 2]", "null", '"expert-0"', "\xff"])
def test_bad_json(tmp_path: Path, text: str) -> None:
    path = put(tmp_path / "a") / "member.json"
    path.write_bytes(text.encode("latin-1"))
    refused(lambda: read_artifact(tmp_path / "a"), path, "fetch this artifact again")


def test_missing_and_unknown_keys(tmp_path: Path) -> None:
    path = put(tmp_path / "a") / "member.json"
    original = path.read_text()
    for key in json.loads(original):
        path.write_text(original)
        edit(path, **{key: ...})
        refused(lambda: read_artifact(tmp_path / "a"), path, f"key {key!r} is missing", "fetch this artifact again")
    path.write_text(original)
    edit(path, code="os.system")
    refused(lambda: read_artifact(tmp_path / "a"), path, "unknown key 'code'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("member", "expert-01"),
        ("member", "../router"),
        ("role", ["expert"]),
        ("network", "dit\n"),
        ("params", []),
        ("x_shape", [3, 4]),
        ("x_shape", [3, 4, 0]),
        ("x_shape", [3, 4, True]),
        ("condition", {"kind": "text"}),
        ("condition", {"kind": "none", "size": 4}),
        ("num_clusters", 0),
        ("prediction", "score"),
        ("timestep_shift", 0),
        ("timestep_shift", float("nan")),
        ("image_encoder", {"name": "pixels"}),
        ("normalisation", {"scale": 0, "shift": 1}),
        ("normalisation", {"scale": 1}),
        ("caption_encoder", "usem3"),
        ("partition_sha256", "xyz"),
        ("step", 1.5),
        ("num_samples", -1),
        ("metrics", {"loss": float("inf")}),
        ("model_sha256", None),
    ],
)
def test_wrong_values(tmp_path: Path, key: str, value: Any) -> None:
    path = put(tmp_path / "a") / "member.json"
    edit(path, **{key: value})
    refused(lambda: read_artifact(tmp_path / "a"), path, f"key {key!r} must be", "fetch this artifact again")


@pytest.mark.parametrize(("key", "value"), [("member", "expert-2"), ("role", "router"), ("prediction", None)])
def test_values_that_contradict_each_other(tmp_path: Path, key: str, value: Any) -> None:
    path = put(tmp_path / "a") / "member.json"
    edit(path, **{key: value})
    refused(lambda: read_artifact(tmp_path / "a"), path, f"key {key!r}", "fetch this artifact again")


WEIRD: list[Any] = [None, True, -1, 1e400, "", "x" * 500, "\0", [], [[]], {}, {"name": 1}, {"kind": [], "size": {}}]


def test_no_value_raises_anything_but_a_clear_line(tmp_path: Path) -> None:
    path = put(tmp_path / "a") / "member.json"
    original = path.read_text()
    lines: list[str] = []
    for key in json.loads(original):
        values: list[Any] = [
            None,
            True,
            -1,
            1e400,
            "",
            "x" * 500,
            "\0",
            [],
            [[]],
            {},
            {"name": 1},
            {"kind": [], "size": {}},
        ]
        for value in values:
            path.write_text(original)
            edit(path, **{key: value})
            try:
                meta, state = read_artifact(tmp_path / "a")
                build_network(meta, state, path)
            except UserError as error:
                lines.append(str(error))
    assert len(lines) > 200
    assert all("\n" not in line and str(path) in line for line in lines)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_unknown_format_version(tmp_path: Path, version: Any) -> None:
    path = put(tmp_path / "a") / "member.json"
    edit(path, format_version=version)
    refused(lambda: read_artifact(tmp_path / "a"), path, "format_version", "install the release")


@pytest.mark.parametrize("member", ["expert-0", "router"])
def test_unknown_network_name(tmp_path: Path, member: str) -> None:
    path = put(tmp_path / "a", member) / "member.json"
    edit(path, network="os.path:join")
    meta, state = read_artifact(tmp_path / "a")
    line = refused(lambda: build_network(meta, state, path), path, "'os.path:join'", "install the package")
    assert ("router-dit" if member == "router" else "known here: dit") in line


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
def test_parameters_that_the_network_refuses(tmp_path: Path, params: dict[str, Any]) -> None:
    meta, state = read_artifact(put(tmp_path / "a", params=params))
    refused(lambda: build_network(meta, state, tmp_path / "a"), tmp_path / "a", "cannot be built", "use the release")


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    meta, state = read_artifact(put(tmp_path / "a"))
    first, second, *_ = state

    def build(weights: dict[str, Tensor]) -> Callable[[], object]:
        return lambda: build_network(meta, weights, tmp_path / "a")

    refused(
        build({k: v for k, v in state.items() if k != first}),
        tmp_path / "a",
        f"{first!r} is missing",
        "use the release",
    )
    refused(build({**state, "extra": torch.ones(1)}), "'extra' is unexpected")
    refused(build({**state, second: torch.ones(1, 77)}), f"{second!r} has shape [1, 77] instead of")
    refused(build({}), "'patch_embedding", "more", "use the release")
    other = replace(meta, prediction="epsilon")
    refused(lambda: build_network(other, state), "expert-0", "predict 'epsilon'", "'velocity'")
