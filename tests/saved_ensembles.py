"""Small saved ensembles of three experts and a router, random but all different."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from artifact_files import make_meta, make_network

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.ensemble.manifest import About, read_ensemble, write_ensemble
from ddm_lightning.members.artifact import write_artifact
from ddm_lightning.use.ensemble import DecentralizedEnsemble
from ddm_lightning.use.saved import save_ensemble

ABOUT = About(
    name="three",
    credit="Some painters",
    class_names=None,
    num_images=100,
    seed=0,
    sample=SampleConfig(num_steps=4, num_per_prompt=1),
)
COUNTS = (20, 30, 50)
PROMPTS = [f"prompt {i}" for i in range(8)]
PATHS = ("linear", "linear", "cosine")


def put_member(folder, member, seed, num_clusters=3, **changes):
    meta = make_meta(member, num_clusters=num_clusters, **changes)
    network = make_network(meta.role, seed, num_clusters, meta.condition, std=0.3)
    write_artifact(folder, network.state_dict(), meta)
    return folder


def saved(tmp_path, counts=COUNTS, **changes):
    """A saved ensemble of ``len(counts)`` experts, and a router unless that is one."""
    run, k = tmp_path / "run", len(counts)
    folders = [put_member(run / f"expert-{i}", f"expert-{i}", i, k, path=PATHS[i], **changes) for i in range(k)]
    if k > 1:
        folders.append(put_member(run / "router", "router", 11, k, buckets=changes.get("buckets", ())))
    write_ensemble(run, folders, [count / sum(counts) for count in counts])
    about = replace(ABOUT, num_images=sum(counts))
    save_ensemble(replace(read_ensemble(run / "ensemble.json"), about=about), tmp_path / "saved", "CC0")
    return tmp_path / "saved"


def load(folder, **options):
    return DecentralizedEnsemble.from_pretrained(folder, "cpu", **options)


def images(ensemble, **settings):
    return [image.tobytes() for image in ensemble.sample(PROMPTS, **settings)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A saved ensemble of three experts that no test changes."""
    return saved(tmp_path_factory.mktemp("three"))


@pytest.fixture
def three(kept, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(kept, tmp_path / "three"))
