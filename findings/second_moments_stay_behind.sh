#!/usr/bin/env bash
# torchao: second moments of AdamW8bit do not follow gradients that grow, and steps stay too large for thousands of steps.
#
# One would expect  moments that are right but for the precision of eight bits, some percent, since each step decodes them,
#                   computes in float32 and encodes again.
# What happens      with beta2 = 0.999 a step changes a second moment by a thousandth of g**2 - v. Rounded to the nearest of
#                   256 numbers, most such changes are lost, and the same number is decoded again. Only the scale of a block,
#                   its largest moment, moves by itself. What grows relative to its block stays behind, and steps are larger
#                   than Adam's. Rounding at random between the two nearest numbers keeps the mean and needs no more memory.
#                   Here the sizes of gradients change once: after 3,000 steps all become smaller, and each takes the
#                   relative size that its neighbour had.
# Seen              2026-11-29, torchao 0.18.0, torch 2.13.0, Python 3.11; mean of v over that in float32, and of the sizes
#                   of steps that follow from them, before the change and 3,000 steps after it:
#                     second moments 1.01, steps 1.00
#                     second moments 0.52, steps 1.56
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 torchao==0.18.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch
from torchao.optim import AdamW8bit

torch.manual_seed(0)
weight = torch.nn.Parameter(torch.zeros(64, 256))
sizes = torch.randn(weight.shape).div(2).exp()
optimizer = AdamW8bit([weight], lr=0.0, betas=(0.9, 0.999), weight_decay=0.0)
exact = torch.zeros_like(weight)
found = []
for number in range(6000):
    if number == 3000:
        sizes = 0.3 * sizes.roll(7, 1)

    weight.grad = sizes * torch.randn(weight.shape)
    optimizer.step()
    exact.lerp_(weight.grad**2, 0.001)
    if number % 3000 == 2999:
        stored = optimizer.state[weight]["exp_avg_sq"].dequantize()
        found.append((float((stored / exact).mean()), float((exact / stored).sqrt().mean())))
        print("second moments {:.2f}, steps {:.2f}".format(*found[-1]))

(before, _), (after, steps) = found
assert 0.95 < before < 1.05 and after < 0.7 and steps > 1.3
PY
