"""Small saved ensembles of three experts and a router, random but all different."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from artifact_files import PARAMS, SHAPE, TEXT, make_meta
from torch import nn

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.registry import EXPERTS, ROUTERS
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


def put_member(folder: Path, member: str, seed: int, num_clusters: int = 3, **changes: object) -> Path:
    torch.manual_seed(seed)
    meta = make_meta(member, num_clusters=num_clusters, **changes)
    if meta.role == "router":
        network = ROUTERS.build("router-dit", PARAMS, x_shape=SHAPE, condition=TEXT, num_clusters=num_clusters)
    else:
        network = EXPERTS.build("dit", PARAMS, x_shape=SHAPE, condition=meta.condition)
    for parameter in network.parameters():  # away from adaLN-Zero, where every output is 0
        nn.init.normal_(parameter, std=0.3)
    write_artifact(folder, network.state_dict(), meta)
    return folder


def saved(tmp_path: Path, counts: tuple[int, ...] = COUNTS, **changes: object) -> Path:
    """A saved ensemble of ``len(counts)`` experts, and a router unless that is one."""
    run, k = tmp_path / "run", len(counts)
    folders = [put_member(run / f"expert-{i}", f"expert-{i}", i, k, path=PATHS[i], **changes) for i in range(k)]
    if k > 1:
        folders.append(put_member(run / "router", "router", 11, k))
    write_ensemble(run, folders, [count / sum(counts) for count in counts])
    about = replace(ABOUT, num_images=sum(counts))
    save_ensemble(replace(read_ensemble(run / "ensemble.json"), about=about), tmp_path / "saved", "CC0")
    return tmp_path / "saved"


def load(folder: Path) -> DecentralizedEnsemble:
    return DecentralizedEnsemble.from_pretrained(folder, device="cpu")


def images(ensemble: DecentralizedEnsemble, **settings: object) -> list[bytes]:
    return [image.tobytes() for image in ensemble.sample(PROMPTS, **settings)]
