#!/usr/bin/env bash
# torch.utils.flop_counter: attention on a CPU counts as zero, and so does an encoder layer in eval mode.
#
# One would expect  FlopCounterMode to count scaled_dot_product_attention alike on every device: it does on CUDA.
# What happens      on a CPU, torch takes its flash kernel for CPUs, for which the counter has no formula: 0, forward and
#                   backward. The math kernel, which computes the same, is counted. A whole nn.TransformerEncoderLayer
#                   counts 0 in eval mode without gradients: its fused operator has no formula either.
# Seen              2026-11-27, torch 2.13.0 (CPU), Python 3.11:
#                     expected 4194304
#                     default kernel 0
#                     math kernel 4194304
#                     encoder layer, eval with gradients 34603008
#                     encoder layer, eval without gradients 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.1.3
"$folder/venv/bin/python" - <<'PY'
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode


def flops(compute) -> int:
    with FlopCounterMode(display=False) as counter:
        compute()
    return counter.get_total_flops()


batch, heads, tokens, width = 2, 4, 64, 32
q = torch.randn(batch, heads, tokens, width)
expected = 2 * (2 * batch * heads * tokens * tokens * width)  # two products; a multiply-add is 2
default = flops(lambda: scaled_dot_product_attention(q, q, q))
with sdpa_kernel(SDPBackend.MATH):
    math = flops(lambda: scaled_dot_product_attention(q, q, q))

layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
x = torch.randn(2, 64, 32)
with_gradients = flops(lambda: layer(x))
with torch.no_grad():
    without_gradients = flops(lambda: layer(x))

print("expected", expected)
print("default kernel", default)
print("math kernel", math)
print("encoder layer, eval with gradients", with_gradients)
print("encoder layer, eval without gradients", without_gradients)
assert (default, math) == (0, expected)
assert with_gradients > 0 and without_gradients == 0
PY
