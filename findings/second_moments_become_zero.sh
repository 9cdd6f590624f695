#!/usr/bin/env bash
# torchao: AdamW8bit rounds small second moments to 0, and such a weight then takes steps of many learning rates.
#
# One would expect  steps of about the learning rate, as Adam's are whatever the size of a gradient.
# What happens      a block of 256 second moments is divided by its largest, and what is below half the smallest number of the
#                   map becomes 0. The first moments of these weights do not: they are stored with other numbers, and gradients
#                   are square roots of second moments. The next step divides them by epsilon and what one gradient adds.
#                   Here the gradients in a block are spread over six decades.
# Seen              2026-11-28, torchao 0.18.0, torch 2.13.0, Python 3.11; share of single steps of over 5 learning rates, and
#                   the largest, in 100 steps:
#                     AdamW 0.000 1
#                     AdamW8bit 0.068 10736
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 torchao==0.18.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch
from torchao.optim import AdamW8bit

RATE = 1e-3
found = {}
for kind in (torch.optim.AdamW, AdamW8bit):
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(16, 256))
    sizes = 10 ** (-6 * torch.rand(weight.shape, generator=generator))
    optimizer = kind([weight], lr=RATE, betas=(0.9, 0.999), weight_decay=0.0)
    steps = []
    for _ in range(100):
        before = weight.detach().clone()
        weight.grad = sizes * torch.randn(weight.shape, generator=generator)
        optimizer.step()
        steps.append((weight.detach() - before).abs() / RATE)

    steps = torch.stack(steps)
    found[kind.__name__] = float((steps > 5).float().mean())
    print(kind.__name__, f"{found[kind.__name__]:.3f} {float(steps.max()):.0f}")

assert found["AdamW"] == 0 and found["AdamW8bit"] > 0.01
PY
