"""Weights: safetensors come back bit for bit; anything else is refused unread."""

import errno
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from artifact_files import edit, make_meta, put, refused
from safetensors.torch import save_file

from ddm_lightning.core.files import sha256_file
from ddm_lightning.members.artifact import read_artifact, write_artifact


def test_tied_and_strided_weights_are_written(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    write_artifact(tmp_path / "a", {"one": weight, "two": weight, "three": weight.T}, make_meta())
    _, state = read_artifact(tmp_path / "a")
    assert (
        torch.equal(state["one"], weight)
        and torch.equal(state["two"], weight)
        and torch.equal(state["three"], weight.T)
    )


def test_weights_whose_hash_differs(tmp_path):
    path = put(tmp_path / "a") / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refused(lambda: read_artifact(tmp_path / "a"), path, "SHA-256", "fetch this artifact again")


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("hash_agrees", [False, True])
def test_truncated_weights(tmp_path, part, hash_agrees):
    path = put(tmp_path / "a") / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    if hash_agrees:
        edit(tmp_path / "a" / "member.json", model_sha256=sha256_file(path))
    refused(lambda: read_artifact(tmp_path / "a"), path, "not a whole safetensors file", "fetch this artifact again")


class Mine:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle-2", "pickle-5"])
def test_a_pickle_is_refused_and_never_loaded(tmp_path, kind):
    path = put(tmp_path / "a") / "model.safetensors"
    bomb = {"weight": Mine(tmp_path / "exploded")}
    if kind.startswith("pickle"):
        path.write_bytes(pickle.dumps(bomb, protocol=int(kind[-1])))
    else:
        torch.save(bomb, path, _use_new_zipfile_serialization=kind == "zip")
    edit(tmp_path / "a" / "member.json", model_sha256=sha256_file(path))
    refused(lambda: read_artifact(tmp_path / "a"), path, "not a whole safetensors file", "fetch this artifact again")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite(tmp_path, dtype, number):
    path = put(tmp_path / "a") / "model.safetensors"
    save_file({"good": torch.ones(2), "bad": torch.tensor([1.0, number]).to(dtype)}, path)
    edit(tmp_path / "a" / "member.json", model_sha256=sha256_file(path))
    refused(lambda: read_artifact(tmp_path / "a"), path, "'bad' is not finite", "fetch this artifact again")


def test_what_float32_cannot_hold_is_refused(tmp_path):
    path = put(tmp_path / "a") / "model.safetensors"
    largest = torch.tensor([torch.finfo(torch.float32).max], dtype=torch.float64)
    for weight, words in (
        (largest, ""),
        (largest * (1 + 1e-6), "'w' is not finite in float32; fetch this artifact again"),
        (torch.ones(2).to(torch.float8_e4m3fn), "holds weights of type 'F8_E4M3'"),
        (torch.ones(2).to(torch.float8_e5m2), "holds weights of type 'F8_E5M2'"),
    ):
        save_file({"w": weight}, path)
        edit(tmp_path / "a" / "member.json", model_sha256=sha256_file(path))
        if words:
            refused(lambda: read_artifact(tmp_path / "a"), path, words)
        else:
            read_artifact(tmp_path / "a")


REFUSED = """
import resource, sys
from pathlib import Path
import torch
from ddm_lightning.core.weights import save_weights
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save_weights(Path(sys.argv[1]), {"w": torch.ones(100_000)}, "expert-0")
except OSError as error:
    raise SystemExit(error.errno)
"""


def test_what_the_system_refuses_is_an_error_of_the_system(tmp_path):
    """A file that may not grow, as on a disk that is full: safetensors raises an error of its own for both."""
    done = subprocess.run([sys.executable, "-c", REFUSED, tmp_path / "model.safetensors"], check=False)
    assert done.returncode == errno.EFBIG
    assert not list(tmp_path.iterdir())
