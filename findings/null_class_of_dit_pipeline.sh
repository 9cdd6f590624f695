#!/usr/bin/env bash
# diffusers: DiTPipeline guides towards class 1000, however many classes its transformer knows.
#
# One would expect  a pipeline around a transformer with 10 classes to take the class that this transformer was trained
#                   with for dropped labels: number 10, the last row of its table.
# What happens      the number 1000 is written into the pipeline. Without guidance it generates; with the default
#                   guidance_scale of 4 it fails with an IndexError of the table, which says nothing about guidance. With
#                   more than 1000 classes it would guide away from an ordinary class, silently.
# Seen              2026-11-28, diffusers 0.39.0, torch 2.13.0, Python 3.11:
#                     10 classes, guidance 1: (8, 8, 3)
#                     10 classes, guidance 4: IndexError: index out of range in self
#                     1002 classes, guidance 4: null labels [1000, 1000]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 diffusers==0.39.0 "transformers<5" "numpy<2.2"
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

torch.manual_seed(0)
vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)


def pipeline(num_classes: int) -> DiTPipeline:
    """A tiny pipeline with random weights for ``num_classes``."""
    transformer = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=8,
        num_embeds_ada_norm=num_classes,
    )
    made = DiTPipeline(transformer.eval(), vae, DDIMScheduler())
    made.set_progress_bar_config(disable=True)
    return made


few = pipeline(10)
(image,) = few([3], guidance_scale=1.0, num_inference_steps=1, output_type="np").images
print("10 classes, guidance 1:", image.shape)
problem = ""
try:
    few([3], num_inference_steps=1, output_type="np")
except IndexError as error:
    problem = f"IndexError: {error}"

print("10 classes, guidance 4:", problem)

many = pipeline(1002)
labels = []
table = many.transformer.transformer_blocks[0].norm1.emb.class_embedder
table.register_forward_pre_hook(lambda _, inputs: labels.append(inputs[0].tolist()))
many([3, 4], num_inference_steps=1, output_type="np")
print("1002 classes, guidance 4: null labels", labels[0][2:])
assert image.shape == (8, 8, 3)
assert problem == "IndexError: index out of range in self"
assert labels[0] == [3, 4, 1000, 1000]
PY
