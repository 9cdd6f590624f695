#!/usr/bin/env bash
# diffusers: DiTTransformer2DModel gives back a square for latents that are not square.
#
# One would expect  an output of the input's height and width, as from PixArtTransformer2DModel, whose layers are nearly the
#                   same; or an error, if the model takes squares only.
# What happens      the output is folded into a square of the root of the number of patches, so pixels of different rows lie
#                   side by side. Where that root is whole, no error says so: 4 x 16 becomes 8 x 8. Otherwise a reshape fails.
# Seen              2026-11-28, diffusers 0.39.0, torch 2.13.0, Python 3.11:
#                     DiT    (4, 16) -> (8, 8)
#                     DiT    (8, 16) -> RuntimeError
#                     PixArt (4, 16) -> (4, 16)
#                     PixArt (8, 16) -> (8, 16)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 diffusers==0.39.0 "transformers<5" "numpy<2.2"
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch
from diffusers import DiTTransformer2DModel, PixArtTransformer2DModel

torch.manual_seed(0)
sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8}
dit = DiTTransformer2DModel(in_channels=4, out_channels=4, num_embeds_ada_norm=10, **sizes).eval()
pixart = PixArtTransformer2DModel(
    in_channels=4, out_channels=4, caption_channels=16, cross_attention_dim=16, use_additional_conditions=False, **sizes
).eval()
t = torch.tensor([500])
inputs = {
    "DiT": lambda x: dit(x, timestep=t, class_labels=torch.tensor([3])),
    "PixArt": lambda x: pixart(
        x,
        encoder_hidden_states=torch.zeros(1, 2, 16),
        timestep=t,
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ),
}
seen = {}
with torch.no_grad():
    for name, model in inputs.items():
        for shape in [(4, 16), (8, 16)]:
            try:
                seen[name, shape] = tuple(model(torch.randn(1, 4, *shape)).sample.shape[2:])
            except RuntimeError as error:
                seen[name, shape] = type(error).__name__

            print(f"{name:6} {shape} -> {seen[name, shape]}")

assert seen["DiT", (4, 16)] == (8, 8)
assert seen["DiT", (8, 16)] == "RuntimeError"
assert seen["PixArt", (4, 16)] == (4, 16)
assert seen["PixArt", (8, 16)] == (8, 16)
PY
