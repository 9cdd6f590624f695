"""Folders, the hub's cache and a hub on loopback, with a feature network to be found."""

import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from encoders.tiny_models import save_dinov2
from huggingface_hub import constants, file_download
from safetensors.torch import save_file

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import FEATURES

try:
    from huggingface_hub import close_session
except ImportError:  # before 1.0
    from huggingface_hub.utils import reset_sessions as close_session

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOWHERE = "http://127.0.0.1:9"  # the port "discard", where nobody listens


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "dinov2"
    save_dinov2(folder)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a hub that cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    point_to(NOWHERE, monkeypatch)
    return tmp_path / "hub"


def point_to(address, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (file_download, constants):  # up to 0.36, and from 1 on
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


def put_into(cache, model, name="owner/name", commit=COMMIT):
    """As the hub's client does it: a folder a commit, and a file that says which is the main branch."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(model, snapshot)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def build(path, **params):
    return FEATURES.build("dinov2", {"path": str(path), "resolution": 28, **params})


def refusal_of(path, **params):
    with pytest.raises(UserError) as refusal:
        build(path, **params)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.fixture
def hub(model, cache, monkeypatch):
    """A hub on loopback that has ``owner/name`` with more in it than anybody wants; yields what was asked for."""
    files = {f"sub/{path.name}": path.read_bytes() for path in model.iterdir()}
    files |= {
        "config.json": b"{}",
        "model.safetensors": b"x",
        "sub/pytorch_model.bin": b"x",
        "sub/model-deep/x-of-2.safetensors": b"x",
    }
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def answer(self, with_body):
            asked.append(self.path)
            wanted = self.path.partition(f"/owner/name/resolve/{COMMIT}/")[2]
            if self.path.startswith("/api/models/owner/name/revision/"):
                body = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                self.reply(200, json.dumps(body).encode(), with_body)
            elif self.path.startswith(f"/api/models/owner/name/tree/{COMMIT}?"):  # from huggingface-hub 2 on
                body = [{"type": "file", "path": name, "size": len(files[name]), "oid": name} for name in files]
                self.reply(200, json.dumps(body).encode(), with_body)
            elif wanted in files:
                etag = hashlib.sha256(files[wanted]).hexdigest()
                self.reply(200, files[wanted], with_body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
            else:
                self.reply(404, b"", with_body, {"X-Error-Code": "RepoNotFound"})

        def reply(self, status, body, with_body, headers=None):
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body if with_body else b"")

        def do_GET(self):
            self.answer(True)

        def do_HEAD(self):
            self.answer(False)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    point_to(f"http://127.0.0.1:{server.server_address[1]}", monkeypatch)
    yield asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_folder_needs_no_network_and_gives_its_hashes(model, cache):
    encoder = build(model)
    found = encoder.provenance()
    assert found["weights_sha256"] == hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    assert set(found) == {"weights_sha256", "config_sha256"}
    assert build(model.parent, subfolder="dinov2").provenance() == found
    assert not cache.exists()


def test_the_configuration_is_part_of_the_provenance(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-3}))
    before, after = build(model).provenance(), build(folder).provenance()
    assert before["weights_sha256"] == after["weights_sha256"] and before["config_sha256"] != after["config_sha256"]


def test_a_name_in_the_hubs_cache_needs_no_network_and_gives_its_commit(model, cache):
    snapshot = put_into(cache, model)
    encoder = build("owner/name")
    assert encoder.provenance() == {**build(model).provenance(), "revision": COMMIT}
    assert encoder.folder == snapshot
    assert build(snapshot).provenance()["revision"] == COMMIT, "a folder of the cache by its path"
    other = COMMIT[::-1]
    put_into(cache, model, commit=other)
    assert build("owner/name").provenance()["revision"] == other
    assert build("owner/name", revision=COMMIT).provenance()["revision"] == COMMIT


def test_an_unknown_name_is_one_line_with_a_remedy(cache):
    line = refusal_of("owner/name")
    assert line.startswith("owner/name: is not a folder, not in the hub's cache, and cannot be downloaded (")
    assert "needed by feature network 'dinov2'" in line
    assert line.endswith("hf download owner/name")


def test_a_hub_that_was_switched_off_is_named(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()  # they look at the switch when they are made
    try:
        assert "unset the `HF_HUB_OFFLINE` environment variable" in refusal_of("owner/name")
    finally:
        close_session()


def test_a_cache_without_the_weights_is_refused(model, cache):
    (put_into(cache, model) / "model.safetensors").unlink()
    assert refusal_of("owner/name").startswith(str(cache))


def test_only_missing_files_are_downloaded(hub, model):
    encoder = build("owner/name", subfolder="sub")
    assert encoder.provenance() == {**build(model).provenance(), "revision": COMMIT}
    assert sorted(path.name for path in encoder.folder.iterdir()) == ["config.json", "model.safetensors"]
    assert not any("bin" in path or "deep" in path or path.endswith(f"{COMMIT}/config.json") for path in hub)
    assert encoder.encode(np.zeros((1, 28, 28, 3), np.uint8)).shape == (1, 16)
    hub.clear()
    build("owner/name", subfolder="sub")
    assert hub == [], "the second time it is in the cache"


def test_a_name_that_the_hub_does_not_have_is_one_line(hub):
    assert "no/such: is not a folder" in refusal_of("no/such")


def test_an_incomplete_cache_is_completed(cache, model, hub):
    cached = put_into(cache, model.parent)
    (cached / "dinov2").rename(cached / "sub")
    (cached / "sub" / "model.safetensors").unlink()
    encoder = build("owner/name", subfolder="sub")
    assert encoder.provenance() == {**build(model).provenance(), "revision": COMMIT}


@pytest.mark.parametrize("path", ["data/weights/dinov2", "/nowhere/at-all", "./weights", "~/no/such", "weights", ""])
def test_a_missing_folder_is_not_looked_up_on_the_hub(path, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if path:
        assert refusal_of(path) == f"{path}: is no folder, needed by feature network 'dinov2'; set its parameter 'path'"
    else:
        assert "config.json" in refusal_of(path), "the current folder, which is no model"


def test_a_subfolder_stays_inside(model):
    assert "leaves its folder" in refusal_of(model, subfolder="../elsewhere")
    assert "the model's configuration is missing" in refusal_of(model, subfolder="unet")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("no configuration", "config.json: the model's configuration is missing; set 'path' to a model's folder"),
        ("broken configuration", "config.json: the model's configuration cannot be read"),
        ("another model", "config.json: model_type is 'clip', but feature network 'dinov2' takes dinov2 or"),
        ("no image network", "has no 'embeddings.patch_embeddings.projection.weight', needed by feature network"),
        ("cut short", "model.safetensors: not a whole safetensors file ("),
        ("no weights", "model.safetensors: weights are missing (pickled ones in *.bin are not loaded"),
    ],
)
def test_a_damaged_folder_is_refused_when_built(model, tmp_path, damage, complaint):
    folder = shutil.copytree(model, tmp_path / "model")
    config, weights = folder / "config.json", folder / "model.safetensors"
    content, tensors = json.loads(config.read_text()), weights.read_bytes()
    if damage == "no configuration":
        config.unlink()
    elif damage == "broken configuration":
        config.write_text('{"model_type": ')
    elif damage == "another model":
        config.write_text(json.dumps({**content, "model_type": "clip"}))
    elif damage == "no image network":
        save_file({"weight": torch.ones(1)}, weights)
    elif damage == "cut short":
        weights.write_bytes(tensors[:-8])
    else:
        weights.unlink()
    line = refusal_of(folder)
    assert complaint in line and str(folder) in line
