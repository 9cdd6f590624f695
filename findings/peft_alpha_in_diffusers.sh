#!/usr/bin/env bash
# diffusers and peft: an adapter that peft has saved loses its scale alpha / rank in diffusers' load_lora_adapter.
#
# One would expect  `transformer.load_lora_adapter(FOLDER)` to read `adapter_config.json`, which peft writes beside the
#                   weights, and to scale the adapter as peft does.
# What happens      the file of settings is not read. With the names that peft gives the weights and the default prefix,
#                   nothing is loaded: a warning, no error, and the outputs are the base's. With the right prefix, alpha
#                   is taken to be the rank, so an adapter with alpha = 4 * rank acts at a quarter of its strength.
# Seen              2026-11-28, diffusers 0.39.0, peft 0.21.2, torch 2.13.0, Python 3.11:
#                     default prefix: change of the output over peft's: 0.0
#                     prefix of peft: change of the weights over peft's: 0.25
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 diffusers==0.39.0 peft==0.21.2 "transformers<5" "numpy<2.2"
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import copy

import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, get_peft_model

torch.manual_seed(0)
base = SD3Transformer2DModel(
    sample_size=8,
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_layers=2,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=16,
    caption_projection_dim=16,
    pooled_projection_dim=16,
    pos_embed_max_size=8,
).eval()
inputs = {
    "hidden_states": torch.randn(1, 4, 8, 8),
    "encoder_hidden_states": torch.randn(1, 3, 16),
    "pooled_projections": torch.randn(1, 16),
    "timestep": torch.tensor([500.0]),
}


@torch.no_grad()
def output(model):
    """The model's answer to the same inputs."""
    return model(**inputs).sample


plain = output(base)
adapted = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, lora_alpha=8, target_modules=["to_q"]))
for name, weights in adapted.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(weights.data)

adapted.save_pretrained("adapter")
change = (output(adapted.eval()) - plain).abs().sum()
layer = adapted.base_model.model.transformer_blocks[0].attn.to_q
expected = layer.get_delta_weight("default")

named = {"weight_name": "adapter_model.safetensors", "use_safetensors": True}
unread = copy.deepcopy(base)
unread.load_lora_adapter("adapter", **named)
nothing = float((output(unread) - plain).abs().sum() / change)
print("default prefix: change of the output over peft's:", nothing)

loaded = copy.deepcopy(base)
loaded.load_lora_adapter("adapter", prefix="base_model.model", **named)
found = loaded.transformer_blocks[0].attn.to_q
(adapter,) = found.lora_A
share = float((found.get_delta_weight(adapter).norm() / expected.norm()).detach())
print("prefix of peft: change of the weights over peft's:", round(share, 4))
assert nothing == 0.0
assert round(share, 4) == 0.25
PY
