#!/usr/bin/env bash
# torch: module.compile() of torch's own modules compiles nothing.
#
# One would expect  block.compile() and torch.compile(block) to differ only in where the compiled call is kept; compiling the
#                   blocks of a network one by one (regional compilation) relies on it.
# What happens      module.compile() compiles the method __call__. For modules whose code lies within torch, such as
#                   nn.Sequential and nn.TransformerEncoderLayer, Dynamo skips that code: no graph, no speed, no warning. A
#                   subclass of one's own is compiled, and so is torch.compile(block).
# Seen              2026-11-27, torch 2.13.0 (CPU), Python 3.11; graphs:
#                     Sequential.compile() 0, torch.compile(Sequential) 1
#                     TransformerEncoderLayer.compile() 0, torch.compile(TransformerEncoderLayer) 1
#                     Own.compile() 1, torch.compile(Own) 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.1.3
cat >"$folder/look.py" <<'PY'
import torch
from torch._dynamo.testing import CompileCounter


class Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x).relu()


def sequential() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())


def encoder_layer() -> torch.nn.Module:
    return torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


x = torch.randn(2, 5, 16)
found = {}
for make in (sequential, encoder_layer, Own):
    torch._dynamo.reset()
    by_method = CompileCounter()
    block = make()
    block.compile(backend=by_method)
    block(x)

    torch._dynamo.reset()
    by_function = CompileCounter()
    block = make()
    torch.compile(block, backend=by_function)(x)

    name = type(block).__name__
    found[name] = (by_method.frame_count, by_function.frame_count)
    print(f"{name}.compile() {found[name][0]}, torch.compile({name}) {found[name][1]}")
assert found == {"Sequential": (0, 1), "TransformerEncoderLayer": (0, 1), "Own": (1, 1)}
PY
"$folder/venv/bin/python" "$folder/look.py"
