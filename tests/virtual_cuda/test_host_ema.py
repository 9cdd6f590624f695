"""Averages on the host of weights on a device, whole and sharded: their place, their values, the order of work."""

from __future__ import annotations

import json

from virtual_cuda.runs import start

SCRIPT = """
import json, torch
from virtual_cuda import device
recorder = device.install()
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from ddm_lightning.training import ema

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
order = []
waits = torch.cuda.Stream.wait_stream
torch.cuda.Stream.wait_stream = lambda self, other: order.append(["side" if self is ours() else "main waits"])
lent = lambda tensor: DTensor.from_local(tensor, init_device_mesh("cuda", (1,)), [Shard(0)], run_check=False)
found = []
for place in ("cpu", "cuda", "sharded"):
    torch.manual_seed(0)
    weight = torch.randn(5, 3)
    if place != "cpu":
        weight = weight.to("cuda")
    if place == "sharded":
        weight = lent(weight)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)
    ours = lambda: optimizer.averaging._stream
    ema.track_ema(optimizer, 0.9, [0.2], from_initial=True, every=3)
    order.clear()
    for step in range(8):
        module.weight.grad = module.weight.detach() * 0.5
        optimizer.step()
    state = optimizer.state[module.weight]
    averages = [ema.unsharded_ema(module, optimizer, key) for key in ("ema", "ema_0.2")]
    with ema.ema_weights(module, optimizer):
        averages.append({"weight": ema.local(module.weight.detach()).cpu().clone()})
    found.append({
        "devices": sorted({str(ema.local(value).device) for value in state.values()}),
        "sharded": [isinstance(value, DTensor) for value in state.values()],
        "averages": [one["weight"].tolist() for one in averages],
        "order": [word for (word,) in order],
        "new": str(optimizer.averaging.home(module.weight)),
        "moment": optimizer.averaging.home(module.weight, "exp_avg").type,
    })
print(json.dumps(found))
"""


def test_they_stay_on_the_host_and_streams_keep_their_order():
    whole, on_device, sharded = json.loads(start(["-c", SCRIPT]).splitlines()[-1])

    assert whole["order"] == []
    for found in (on_device, sharded):
        assert found["devices"] == ["cpu"]
        assert (found["new"], found["moment"]) == ("cpu", "cuda")
        assert found["averages"] == whole["averages"]
        # After steps 1, 3 and 6 the side waits for the step; before each step the main one waits for the copy.
        order = ["main waits", "side", *["main waits"] * 2, "side", *["main waits"] * 3, "side"]
        assert found["order"] == [*order, *["main waits"] * 2]

    assert sharded["sharded"] == [True, True]
