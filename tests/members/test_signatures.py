"""Signed artifacts: what the library itself accepts, what an attacker could hand over instead, and bad keys."""

import json
import shutil
import subprocess
import sys
from functools import partial

import pytest
from artifact_files import edit, make_meta, make_network, refused
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from model_signing.verifying import Config
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.members.artifact import write_artifact
from ddm_lightning.members.run import Run
from ddm_lightning.members.signatures import accept, check_keys, sign_artifact


def make_key(path, key=None, encryption=None):
    """A private key at ``path`` and its public key at ``path.pub``."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)
    return path


@pytest.fixture
def keys(tmp_path):
    (tmp_path / "keys").mkdir()
    return {name: make_key(tmp_path / "keys" / name) for name in ("lab", "stranger")}


def open_run(folder, *settings):
    return Run(load_experiment(TINY, [f"run_dir={folder}", *settings]))


def sign(run, name, seed=0):
    """A small artifact of ``name`` in the run's folder, signed as its experiment says."""
    meta = make_meta(name)
    state = make_network(meta.role, seed).state_dict()
    write_artifact(run.folder.artifact(name), state, meta, partial(sign_artifact, name=name, run=run))
    return run.folder.artifact(name)


@pytest.fixture
def runs(tmp_path, keys):
    """An island's run with a signed expert, and the run of somebody who trusts the lab's key."""
    island = open_run(tmp_path / "island", f"island.signing_key={keys['lab']}")
    sign(island, "expert-0")
    return island, open_run(tmp_path / "reader", f"island.trusted_keys.all={keys['lab']}.pub")


def copied(artifact, reader, name="expert-0"):
    shutil.rmtree(reader.folder.artifact(name), ignore_errors=True)
    return shutil.copytree(artifact, reader.folder.artifact(name))


def is_valid(folder, key):
    """Whether the library alone finds the signature valid."""
    try:
        Config().use_elliptic_key_verifier(public_key=key.with_suffix(".pub")).verify(folder, folder / "model.sig")
    except Exception:  # noqa: BLE001
        return False

    return True


def test_the_library_verifies_a_signed_artifact(runs, keys):
    island, reader = runs
    artifact = copied(island.folder.artifact("expert-0"), reader)

    accept("expert-0", artifact, reader)
    accept("expert-0", artifact, reader)

    assert is_valid(artifact, keys["lab"])
    assert not is_valid(artifact, keys["stranger"])
    secret = keys["lab"].read_text().splitlines()[1]
    assert not any(secret in path.read_text("latin-1") for path in artifact.iterdir())


def harm_weights(folder):
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def cut(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])


def without_signatures(folder):
    bundle = json.loads((folder / "model.sig").read_text())
    bundle["dsseEnvelope"]["signatures"] = []
    (folder / "model.sig").write_text(json.dumps(bundle))


HARMS = {
    "weights": harm_weights,
    "cut": cut,
    "no signature in it": without_signatures,
    "step": lambda folder: edit(folder / "member.json", step=8),
    "version": lambda folder: edit(folder / "signed.json", version=9),
    "another file": lambda folder: (folder / "more.txt").write_text("unsigned"),
    "garbage": lambda folder: (folder / "model.sig").write_text("{}"),
    "unsigned": lambda folder: (folder / "model.sig").unlink(),
}


def test_a_forged_or_cut_artifact_is_refused(runs, keys):
    island, reader = runs
    for name, harm in HARMS.items():
        artifact = copied(island.folder.artifact("expert-0"), reader)
        harm(artifact)

        assert not is_valid(artifact, keys["lab"]), name
        line = refused(lambda artifact=artifact: accept("expert-0", artifact, reader), f"{artifact}: ")
        assert "get it and its signature again" in line, name
        assert not reader.folder.member("expert-0").joinpath("accepted.json").exists(), name


@pytest.mark.parametrize("changed", ["member.json", "model.sig", "lab.pub"])
def test_an_accepted_artifact_is_checked_again_once_it_or_the_key_changes(runs, keys, changed):
    island, reader = runs
    artifact = copied(island.folder.artifact("expert-0"), reader)
    accept("expert-0", artifact, reader)
    if changed == "member.json":
        edit(artifact / changed, metrics={"validation_loss": 0.1})
    elif changed == "model.sig":
        (artifact / changed).write_text("{}")
    else:
        shutil.copyfile(keys["stranger"].with_suffix(".pub"), keys["lab"].with_suffix(".pub"))

    refused(lambda: accept("expert-0", artifact, reader), f"{artifact}: its signature is refused")


def test_a_key_is_trusted_for_its_own_member_only(runs, keys, tmp_path):
    island, _ = runs
    own = (f"island.trusted_keys.expert=[{keys['lab']}.pub]", f"island.trusted_keys.expert-1={keys['stranger']}.pub")
    reader = open_run(tmp_path / "reader", *own)
    accept("expert-0", copied(island.folder.artifact("expert-0"), reader), reader)
    artifact = copied(sign(island, "expert-1"), reader, "expert-1")
    refused(lambda: accept("expert-1", artifact, reader), f"{artifact}: its signature is refused ({keys['stranger']}.")
    refused(lambda: accept("router", artifact, reader), "has no key for router; add router: FILE or all: FILE")
    strict = open_run(tmp_path / "strict", *own, f"island.trusted_keys.all={keys['lab']}.pub")
    artifact = copied(sign(island, "expert-1"), strict, "expert-1")
    refused(lambda: accept("expert-1", artifact, strict), f"{artifact}: its signature is refused ({keys['stranger']}.")
    accept("router", copied(sign(island, "router"), strict, "router"), strict)


def test_a_valid_signature_does_not_let_an_artifact_pass_for_another(runs, keys, tmp_path):
    island, reader = runs
    other = open_run(tmp_path / "other", f"island.signing_key={keys['lab']}", "expert.train.learning_rate=0.1")
    of_member = copied(island.folder.artifact("expert-0"), reader, "expert-1")
    of_experiment = copied(sign(other, "expert-0"), reader)

    assert is_valid(of_member, keys["lab"])
    assert is_valid(of_experiment, keys["lab"])
    refused(lambda: accept("expert-1", of_member, reader), f"{of_member}: is signed as expert-0, not as expert-1; ")
    refused(lambda: accept("expert-0", of_experiment, reader), "is signed for an experiment with other settings")


def test_an_older_version_is_refused_after_a_newer_one(runs, keys):
    island, reader = runs
    old = copied(island.folder.artifact("expert-0"), reader).rename(island.folder.root / "old")
    newest = sign(island, "expert-0", seed=1)
    accept("expert-0", copied(newest, reader), reader)
    artifact = copied(old, reader)
    assert is_valid(artifact, keys["lab"])
    words = "is older (step 7, version 1) than the one accepted before (step 7, version 2; "
    refused(lambda: accept("expert-0", artifact, reader), words)
    accept("expert-0", copied(newest, reader), reader)


def test_bad_private_keys_are_one_line(keys, tmp_path):
    inside = tmp_path / "run" / "key"
    inside.parent.mkdir()
    open_to_group = make_key(tmp_path / "group")
    open_to_group.chmod(0o640)

    for key, words in (
        (tmp_path / "none", "there is no such file; make one with"),
        (open_to_group, "others may read this private key; run chmod 600"),
        (make_key(inside), "lies in the run folder, which is published; move it"),
        (keys["lab"].with_suffix(".pub"), "others may read"),  # to all
        (make_key(tmp_path / "rsa", rsa.generate_private_key(65537, 2048)), "is not an unencrypted private key of"),
        (make_key(tmp_path / "locked", encryption=BestAvailableEncryption(b"word")), "is not an unencrypted private"),
    ):
        run = open_run(tmp_path / "run", f"island.signing_key={key}")
        refused(lambda run=run: check_keys("expert-0", run), f"key 'island.signing_key': {key}: {words}")

    missing = open_run(tmp_path / "run", f"island.trusted_keys.all={tmp_path / 'none.pub'}")
    refused(lambda: check_keys("expert-0", missing), "key 'island.trusted_keys': ", "there is no such file; copy")


def test_initial_weights_which_nobody_signs_need_a_hash(tmp_path, keys):
    trust = f"island.trusted_keys.all={keys['lab']}.pub"
    for where in ("expert.init_from", "expert.overrides.expert-0.init_from"):
        run = open_run(tmp_path / "run", trust, f"{where}=s3://bucket/w")
        refused(lambda run=run: check_keys("expert-0", run), "key 'expert.init_from': nobody signs", "sha256: …}")
        check_keys("router", run)
        check_keys("prepare", run)

    check_keys("expert-0", open_run(tmp_path / "run", trust, f"expert.init_from={{source: w, sha256: {'a' * 64}}}"))
    check_keys("expert-0", open_run(tmp_path / "run", "expert.init_from=w"))


def test_nothing_imports_the_library_without_keys():
    script = "import sys, ddm_lightning.members.signatures; sys.exit('model_signing' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
