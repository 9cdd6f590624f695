"""Checkpoints as they lie on the disk, read and harmed without the package's own reader."""

import json

import torch
from safetensors import safe_open


def stored(folder):
    """Each tensor by its name, put together from the ranks' parts, and what lies beside them."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118  # it is no dict
                tensors.setdefault(name, []).append((offsets[name]["saved_offsets"], file.get_tensor(name)))

    whole = {}
    for name, parts in tensors.items():
        # Sharded along the first dimension alone; a rank may have nothing.
        parts = sorted((part for part in parts if part[1].numel()), key=lambda part: part[0][:1])
        whole[name] = parts[0][1] if len(parts) == 1 else torch.cat([part for _, part in parts])

    return whole, torch.load(folder / "trainer.pt", weights_only=True)


def state_by_parameter(folder):
    """The optimizer's state of each parameter, by its name."""
    found = {}
    for full_name, value in stored(folder)[0].items():
        kind, _, rest = full_name.partition("/")
        if kind == "optimizer":
            key, _, name = rest.partition("/")
            found.setdefault(name, {})[key] = value

    return found


def largest_file(folder):
    """The one that a half-written checkpoint would lack."""
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


def cut(folder):
    """Leave half of its largest file."""
    path = largest_file(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
