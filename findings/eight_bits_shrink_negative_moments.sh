#!/usr/bin/env bash
# torchao: eight-bit moments of a block whose largest number is negative shrink whenever they are stored again.
#
# One would expect  numbers that were decoded to have the same codes, so that storing them again changes nothing.
# What happens      a block is divided by its largest absolute number, and the signed map has 1 but not -1 (its lowest is
#                   -0.993). A block that is led by a negative number loses 0.7 % each time; one led by a positive one does not.
#                   So a step that is skipped by restoring the decoded moments is no skipped step.
# Seen              2026-11-28, torchao 0.18.0, torch 2.13.0, Python 3.11; 100 times:
#                     {1.0: 1.0, -1.0: -0.4903}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 torchao==0.18.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch
from torchao.optim.subclass_8bit import OptimState8bit

found = {}
for sign in (1.0, -1.0):
    moment = OptimState8bit.zeros((1, 4096), signed=True)
    moment.copy_(sign * torch.ones(1, 4096))
    for _ in range(100):
        moment.copy_(moment.dequantize())

    found[sign] = moment.dequantize()[0, 0].item()

print({sign: round(value, 4) for sign, value in found.items()})
assert found[1.0] == 1 and abs(found[-1.0] + 0.4903) < 1e-3
PY
