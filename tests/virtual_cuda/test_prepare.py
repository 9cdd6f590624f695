"""``prepare`` on the virtual CUDA device, with random models of the libraries' classes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from encoders.tiny_models import save_clip, save_dinov2, save_vae
from prepare.tiny_experiment import tiny_experiment
from tiny_runs import light_prepare
from virtual_cuda.runs import library, start

from ddm_lightning.config.experiment import PluginConfig
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.stages import prepare

ON_THE_DEVICE = """
import collections, json, sys, torch
from virtual_cuda import device
recorder = device.install()
from pathlib import Path
from tiny_runs import light_prepare
from virtual_cuda.test_prepare import experiment, noting, prepare
folder, notes = Path(sys.stdin.read()), []
noting(notes)
with light_prepare(), recorder.fresh() as counts:
    prepare(experiment(folder, "cuda"), folder / "cuda")
notes.append(torch.get_float32_matmul_precision())
print(json.dumps([notes, [[*event, number] for event, number in counts.items()]]))
"""


def experiment(folder, device):
    """The tiny experiment with encoders on ``device``."""

    def plugin(name: str, model: str, **params: Any) -> PluginConfig:
        return PluginConfig(name, {"path": str(folder / model), "device": device, **params})

    tiny = tiny_experiment(num_samples=70, image_encoder=plugin("diffusers-vae", "vae", dtype="float32"))
    tiny.prepare.caption_encoder = plugin("clip-text", "clip", store="tokens")
    tiny.prepare.features = plugin("dinov2", "dinov2", resolution=28)
    tiny.prepare.partition.device = device
    return tiny


def noting(notes):
    """Note the state of each image network as it is moved: type, layout, and the precision of float32 products."""
    import torch

    from ddm_lightning.encoders import pretrained

    def moved(network: Any, device: torch.device, original: Any = pretrained.on_device) -> Any:
        network = original(network, device)
        weights = [weight for weight in network.parameters() if weight.dim() == 4]
        last = all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
        if weights:
            notes.append([type(network).__name__, str(weights[0].dtype), last, torch.get_float32_matmul_precision()])

        return network

    pretrained.on_device = moved


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Folder with a run of each device, the notes, and the device's waits and copies."""
    library()  # skips
    folder = tmp_path_factory.mktemp("prepare")
    for save, name in ((save_vae, "vae"), (save_clip, "clip"), (save_dinov2, "dinov2")):
        save(folder / name)

    notes, counts = json.loads(start(["-c", ON_THE_DEVICE], str(folder)).splitlines()[-1])
    with light_prepare():
        prepare(experiment(folder, "cpu"), folder / "cpu")

    return folder, notes, {(kind, place): number for kind, place, number in counts}


@pytest.mark.parametrize(
    ("column", "low", "high"),
    [
        # Rounded to bfloat16 on the way, and stored with more digits.
        ("x_0", 1e-3, 0.03),
        ("text", 1e-3, 0.1),
        ("text_tokens", 1e-3, 0.2),
        ("features", 0, 1e-5),
    ],
)
def test_columns_are_those_of_the_cpu(found, column, low, high):
    cuda, cpu = (Prepared(found[0] / device / "prepared").rows(column)[:] for device in ("cuda", "cpu"))
    assert len(cuda) == 70 and low <= np.abs(cuda.astype(np.float32) - cpu).max() <= high


def test_networks_lie_channels_last_in_the_type_that_is_safe_for_them(found):
    vae = ["AutoencoderKL", "torch.bfloat16", True, "high"]
    features = ["Dinov2Model", "torch.float32", True, "high"]

    # K-means decides alike on all machines: without TensorFloat-32.
    assert found[1] == [vae, features, "highest"]


def test_the_host_waits_once_per_batch(found):
    waits = {place: number for (kind, place), number in found[2].items() if kind == "wait"}

    assert waits.pop("encoders.pretrained:encode_in_batches") == 2 * 2  # 70 images are two chunks, of two networks
    assert waits.pop("encoders.captions:_encoded") == 2  # columns of one batch
    assert {place.partition(":")[0] for place in waits} <= {"partition.nearest", "partition.build", "partition.kmeans"}
