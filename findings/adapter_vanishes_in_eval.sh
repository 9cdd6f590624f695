#!/usr/bin/env bash
# peft on nn.TransformerEncoderLayer: an adapter that works in training does nothing in eval mode.
#
# One would expect  an injected LoRA layer to act in every forward pass, or peft to refuse the layer.
# What happens      in eval mode nn.TransformerEncoderLayer calls a fused operator with `self.linear1.weight`. peft's layer
#                   returns the weight of its base there, so the adapter is skipped, without a warning. The training loss falls,
#                   and the validation loss never moves.
# Seen              2026-11-27, peft 0.21.2, torch 2.13.0 (CPU), transformers 4.57.6, Python 3.11; largest change by the adapter:
#                     train 0.4495
#                     eval 0.0000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.1.3 transformers==4.57.6 peft==0.21.2
"$folder/venv/bin/python" - <<'PY'
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
config = LoraConfig(r=4, target_modules=["linear1", "linear2"], init_lora_weights=False)
inject_adapter_in_model(config, layer)
x = torch.randn(2, 5, 16)


def output(scale: float) -> torch.Tensor:
    for module in layer.modules():
        if isinstance(module, LoraLayer):
            module.scaling["default"] = scale
    with torch.no_grad():
        return layer(x)


layer.train()
in_training = float((output(1.0) - output(0.0)).abs().max())
layer.eval()
in_eval = float((output(1.0) - output(0.0)).abs().max())
print(f"train {in_training:.4f}")
print(f"eval {in_eval:.4f}")
assert in_training > 0.1 and in_eval == 0.0
PY
