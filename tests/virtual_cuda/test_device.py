"""The virtual device itself: it computes, refuses what a GPU refuses, and reports what makes a GPU's host wait."""

from __future__ import annotations

import json

import pytest
from virtual_cuda.runs import start

PREAMBLE = """
import json, torch
from virtual_cuda import device
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.dit import DiT
recorder = device.install()
sizes = dict(width=16, depth=1, num_heads=2, patch_size=2)
network = DiT(x_shape=(3, 4, 4), condition=ConditionSpec("none", 0), **sizes).to("cuda")
t, square, wide = torch.rand(2, device="cuda"), torch.rand(2, 3, 4, 4).to("cuda"), torch.rand(2, 3, 2, 8).to("cuda")
x, cpu = torch.arange(6.0, device="cuda").view(2, 3), torch.ones(2, 3)
rows, mask = torch.tensor([0], device="cuda"), torch.tensor([True, False], device="cuda")
locked, found = cpu.pin_memory(), []
for statement in json.loads(STATEMENTS):
    with recorder.fresh() as counts:
        try:
            exec(statement)
            found.append([kind for kind, _ in counts.elements()])
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""
# What a statement does: kinds of events, or an error.
CASES = {
    "x + x; x @ x.T; x.sum(); x[0]; x[:, 1:]; x[rows]; torch.ones(3, device='cuda')": [],
    "x + torch.tensor(1.0); torch.where(x > 0, x, 0.0); x[0] = 1.0; x[mask] = 0.0": [],
    "y = x.clone().requires_grad_(); (y @ y.T).sum().backward(); y.grad + x": [],
    "y = x.clone().requires_grad_(); y.register_hook(lambda g: g * g.sum().item()); y.sum().backward()": ["wait"],
    "x.sum().item()": ["wait"],
    "bool((x > 0).all())": ["wait"],
    "x.tolist()": ["wait"],
    "x.cpu()": ["wait"],
    "x.nonzero()": ["wait"],
    "x[mask]": ["wait"],
    "x[mask] = x[rows]": ["wait"],
    "torch.equal(x, x)": ["wait"],
    "x.to('cpu', non_blocking=True)": ["download"],  # torch makes it page-locked
    "torch.empty(2, 3).copy_(x, non_blocking=True)": ["wait"],
    "torch.cuda.synchronize()": ["wait"],
    "torch.accelerator.synchronize()": ["wait"],
    "cpu.to('cuda')": ["blocking upload"],
    "locked.to('cuda')": ["blocking upload"],
    "locked.to('cuda', non_blocking=True)": ["upload"],
    "cpu.to('cuda', non_blocking=True)": ["staged upload"],
    "torch.tensor([1, 2], device='cuda')": ["blocking upload"],
    "x[torch.tensor([0])]": ["blocking upload"],
    "network(square, t, None)": [],
    "network(wide, t, None).sum().backward()": ["blocking upload"],  # the first of a shape copies its positions
    "network(wide, t, None); network(square, t, None)": [],
    "x + cpu": "RuntimeError: Expected all tensors to be on the same device",
    "x @ cpu.T": "RuntimeError: Expected all tensors to be on the same device",
    "torch.cat([x, cpu])": "RuntimeError: Expected all tensors to be on the same device",
    "x + x.to('cuda:1')": "RuntimeError: Expected all tensors to be on the same device",
    "x.numpy()": "TypeError: can't convert cuda:0 device type tensor to numpy",
    "torch.randn(2, device='cuda', generator=torch.Generator())": "RuntimeError: Expected a 'cuda",
    "torch.randn(2, generator=torch.Generator('cuda'))": "RuntimeError: Expected a 'cpu' device type for generator",
    "torch.ones(2, device='cuda:2')": "RuntimeError: CUDA error: invalid device ordinal",
}


@pytest.fixture(scope="module")
def found():
    statements = json.dumps(json.dumps([*CASES]))
    return dict(zip(CASES, json.loads(start(["-c", PREAMBLE.replace("STATEMENTS", statements)])), strict=True))


@pytest.mark.parametrize("statement", CASES)
def test_statement(statement, found):
    wanted = CASES[statement]
    if isinstance(wanted, str):
        assert str(found[statement]).startswith(wanted)
    else:
        assert found[statement] == wanted
