#!/usr/bin/env bash
# torch: counting FLOPs imports torch's compiler, on any device, which costs a short program a second.
#
# One would expect  FlopCounterMode to import nothing when it is used: it adds up formulas of operations that run anyway.
# What happens      a TorchDispatchMode whose own class defines __torch_dispatch__ has the method wrapped at its first use, and
#                   that imports torch._dynamo. A mode that inherits the method from a plain class is not wrapped.
# Seen              2026-11-28, torch 2.13.0, Python 3.11; whether torch._dynamo is imported after one product of matrices:
#                     counter True
#                     own True
#                     inherited False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
cd "$folder"
cat > count.py <<'PY'
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Plain:
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Own(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Inherited(Plain, TorchDispatchMode):
    pass


if sys.argv[1] == "counter":
    from torch.utils.flop_counter import FlopCounterMode

    mode = FlopCounterMode(display=False)
else:
    mode = {"own": Own, "inherited": Inherited}[sys.argv[1]]()

assert "torch._dynamo" not in sys.modules
with mode:
    torch.ones(2, 2) @ torch.ones(2, 2)

print(sys.argv[1], "torch._dynamo" in sys.modules)
PY
found=$(for kind in counter own inherited; do "$folder/venv/bin/python" count.py "$kind"; done)
echo "$found"
test "$found" = $'counter True\nown True\ninherited False'
