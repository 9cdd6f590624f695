"""Small artifacts for tests, and what tests say of bad ones."""

import json

import pytest
import torch
from torch import nn

from ddm_lightning.config.experiment import PluginConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS, ROUTERS
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.artifact import write_artifact
from ddm_lightning.members.meta import ArtifactMeta

PARAMS = {"width": 8, "depth": 1, "num_heads": 2, "patch_size": 2}
SHAPE = (3, 4, 4)
TEXT = ConditionSpec("text", 5)


def make_network(role, seed=0, num_clusters=2, condition=TEXT, std=0.2):
    torch.manual_seed(seed)
    arguments = {"x_shape": SHAPE, "condition": condition}
    if role == "router":
        network = ROUTERS.build("router-dit", PARAMS, **arguments, num_clusters=num_clusters)
    else:
        network = EXPERTS.build("dit", PARAMS, **arguments)
    for parameter in network.parameters():  # away from adaLN-Zero, where every output is 0
        nn.init.normal_(parameter, std=std)
    return network


def make_meta(member="expert-0", **changes):
    role = member.partition("-")[0]
    cluster = int(member.removeprefix("expert-")) if role == "expert" else None
    fields = {
        "format_version": 1,
        "member": member,
        "role": role,
        "network": "router-dit" if role == "router" else "dit",
        "params": dict(PARAMS),
        "x_shape": SHAPE,
        "condition": TEXT,
        "num_clusters": max(2, changes.get("cluster", cluster or 0) + 1),
        "prediction": None if role == "router" else "velocity",
        "cluster": cluster,
        "timestep_shift": 1.5,
        "image_encoder": PluginConfig("pixels"),
        "normalisation": {"scale": 1 / 127.5, "shift": 127.5},
        "caption_encoder": PluginConfig("hashed-words", {"size": 5}),
        "partition_sha256": "ab" * 32,
        "step": 7,
        "num_samples": 56,
        "metrics": {"validation_loss": 0.5},
    }
    return ArtifactMeta(**{**fields, **changes})


def put(folder, member="expert-0", **changes):
    meta = make_meta(member, **changes)
    write_artifact(folder, make_network(meta.role).state_dict(), meta)
    return folder


def edit(path, /, **changes):
    document = json.loads(path.read_text())
    document.update(changes)
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))


def refused(call, *words):
    with pytest.raises(UserError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert str(word) in line
    return line
