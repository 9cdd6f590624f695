"""Blocks compiled as one graph each; a program, because the tests' run-time checks of shapes cannot be traced.

Prints a line of JSON a network: whether its gradients are those of no compiler, and what the compiler counted.
"""

import json
import sys
from contextlib import redirect_stdout
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from ddm_lightning.cli.parser import main
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.attention import attention, set_attention
from ddm_lightning.networks.blocks import checkpoint_blocks, compile_blocks
from ddm_lightning.networks.dit import DiT, RouterDiT
from ddm_lightning.networks.mmdit import MMDiT
from ddm_lightning.training import parallel
from ddm_lightning.training.module import MemberModule

SMALL = {"x_shape": (3, 8, 8), "width": 32, "depth": 2, "num_heads": 2, "patch_size": 2}
TEXT = ConditionSpec("text", 6)
TOKENS = ConditionSpec("tokens", 6, length=3)
EVERY_OPTION = {"qk_norm": True, "rope": True, "mlp": "swiglu", "norm": "rms", "modulation": "single"}
NETWORKS = {
    "dit": (DiT, TEXT, {}),
    "dit with every option": (DiT, TOKENS, EVERY_OPTION),
    "router": (RouterDiT, TEXT, {"num_clusters": 4}),
    "mmdit": (MMDiT, TOKENS, {"qk_norm": True}),
}


def built(name):
    """A network that has left its zeros."""
    torch.manual_seed(0)
    kind, condition, options = NETWORKS[name]
    network = kind(**SMALL, condition=condition, **options)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))

    return network


def afresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def inputs(condition, num, size=(8, 8)):
    generator = torch.Generator().manual_seed(num)
    shape = (num, condition.length, 6) if condition.kind == "tokens" else (num, 6)
    x_t = torch.randn(num, 3, *size, generator=generator)
    t = torch.rand(num, generator=generator)
    return x_t, t, Condition.of(torch.randn(shape, generator=generator))


def gradients(network, condition, num, size=(8, 8)):
    """Of a loss of ``num`` samples."""
    network.zero_grad()
    network(*inputs(condition, num, size)).square().mean().backward(retain_graph=True)
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def are_close(found, expected):
    return all(torch.allclose(found[name], value, rtol=1e-4, atol=1e-6) for name, value in expected.items())


def compare(name, is_checkpointed):
    """A compiled network beside one that is not, in two sizes of the batch."""
    afresh()
    network = built(name)
    plain = built(name)
    if is_checkpointed:
        checkpoint_blocks(network)

    # Without code generation, which has tests of its own and takes a minute.
    compile_blocks(network, backend="eager")
    is_close = True
    for num in (4, 3):
        expected = gradients(plain, NETWORKS[name][1], num)
        is_close &= are_close(gradients(network, NETWORKS[name][1], num), expected)

    num_breaks = len(torch._dynamo.utils.counters["graph_break"])
    return {"is_close": is_close, "breaks": num_breaks, "graphs": num_graphs()}


def kinds_of_calls(name):
    """How many graphs training, validation and images take under autocast, with batches of one, few and many."""
    afresh()
    network = built(name)
    condition = NETWORKS[name][1]
    compile_blocks(network, backend="eager")
    for num, trains, half in ((4, True, True), (4, False, True), (3, False, True), (1, False, True), (5, False, False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=half), torch.set_grad_enabled(trains):
            network(*inputs(condition, num))

    return num_graphs()


def under_ddp(name):
    """How many graphs a step takes alone, and under DDP with buckets smaller than a block, as a large network's are."""
    network = built(name)
    condition = NETWORKS[name][1]
    compile_blocks(network, backend="eager")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    for kind, module in (("alone", network), ("ddp", DistributedDataParallel(network, bucket_cap_mb=0.001))):
        afresh()
        gradients(module, condition, 4)
        found[kind] = num_graphs()

    dist.destroy_process_group()
    return found


def takes_xformers():
    """Whether a graph calls xformers; tensors are on a CUDA device by name only."""
    stub = ModuleType("xformers.ops")
    stub.memory_efficient_attention = lambda q, k, v: q + k + v
    sys.modules["xformers.ops"] = stub
    afresh()

    class Attends(nn.Module):
        attention_backend = "auto"

        def forward(self, q):
            return attention(q, q, q, self.attention_backend)

    network = nn.Module()
    network.blocks = nn.ModuleList([Attends()])
    set_attention(network, "xformers")
    compile_blocks(network, backend="eager")
    with FakeTensorMode():
        q = torch.empty(2, 16, 4, 8, device="cuda")

    return network.blocks[0](q).shape == q.shape


def takes_flash():
    """Whether a block whose attention is bound to a kernel of torch's is one graph, with the gradients of no choice."""
    afresh()
    network = built("dit")
    plain = built("dit")
    set_attention(network, "flash")
    compile_blocks(network, backend="aot_eager")
    return are_close(gradients(network, TEXT, 4), gradients(plain, TEXT, 4))


def samples():
    """Whether a compiled ensemble gives the velocities of one that is not, for groups of all sizes, and its graphs."""
    found = []
    num = 7
    x_t = torch.randn(num, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    t = torch.linspace(0.1, 0.9, num)
    for is_compiled in (True, False):
        afresh()
        router = RouterDiT(**SMALL, condition=TEXT, num_clusters=2)
        ensemble = Ensemble([built("dit"), built("dit")], router, [0.5, 0.5])
        if is_compiled:
            ensemble.compile("eager")
            torch._dynamo.utils.counters.clear()
        condition = Condition.of(torch.ones(num, 6))
        ways = [torch.eye(2)[(torch.arange(num) >= first).long()] for first in range(num)]
        found.append(torch.stack([ensemble.velocity(x_t, t, condition, weights=weights) for weights in ways]))
        graphs = num_graphs() if is_compiled else graphs

    return {"is_close": torch.allclose(*found, rtol=1e-4, atol=1e-5), "graphs": graphs}


def shapes():
    """Graphs of three epochs of shapes, of which two have as many tokens, and whether gradients are those of none."""
    afresh()
    network = built("dit with every option")
    plain = built("dit with every option")
    compile_blocks(network, backend="eager")
    sizes = [(4, 2 * columns) for columns in range(3, 14)] + [(12, 4)]
    graphs = []
    for _ in range(3):
        found = {size: gradients(network, TOKENS, 4, size) for size in sizes}
        graphs.append(num_graphs())

    is_close = all(are_close(found[size], gradients(plain, TOKENS, 4, size)) for size in sizes)
    return {"is_close": is_close, "graphs": graphs, "breaks": len(torch._dynamo.utils.counters["graph_break"])}


def training(*settings):
    """Shape of each step of ``fit`` and graphs after it; graphs in the end, with validations and images."""
    parallel.compile_blocks = partial(compile_blocks, backend="eager")
    parallel.check_compiler = lambda *_: None
    end_of_step = MemberModule.on_train_batch_end
    steps = []

    def counted(module, outputs, batch, *words):
        end_of_step(module, outputs, batch, *words)
        steps.append(["x".join(map(str, batch["x_0"].shape[2:])), num_graphs()])

    MemberModule.on_train_batch_end = counted
    with redirect_stdout(sys.stderr):
        code = main(["fit", *settings])

    return {"code": code, "steps": steps, "graphs": num_graphs()}


def ends_at_the_limit():
    """Whether the third shape is an error where torch may make two graphs."""
    afresh()
    network = built("dit")
    compile_blocks(network, backend="eager")
    torch._dynamo.config.recompile_limit = 2
    try:
        for columns in (4, 6, 8):
            gradients(network, TEXT, 4, (4, columns))
    except torch._dynamo.exc.FailOnRecompileLimitHit:
        return columns == 8

    return False


def samples_of_shapes():
    """Whether a compiled ensemble gives the velocities of no compiler for shapes that are new, and its graphs."""
    found = []
    graphs = []
    for is_compiled in (True, False):
        afresh()
        ensemble = Ensemble(
            [built("dit"), built("dit")], RouterDiT(**SMALL, condition=TEXT, num_clusters=2), [0.5, 0.5]
        )
        if is_compiled:
            ensemble.compile("eager")
            torch._dynamo.utils.counters.clear()

        velocities = []
        for size in ((8, 8), (4, 16), (6, 14), (2, 6), (20, 20)):
            velocities.append(ensemble.velocity(*inputs(TEXT, 3, size)))
            graphs.append(num_graphs())

        found.append(velocities)

    is_close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*found, strict=True))
    return {"is_close": is_close, "graphs": graphs[:5]}


def refuses_a_break():
    """Whether a block in two graphs is an error."""

    class Breaks(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x

    network = nn.Module()
    network.blocks = nn.ModuleList([Breaks()])
    compile_blocks(network, backend="eager")
    try:
        network.blocks[0](torch.ones(1))
    except torch._dynamo.exc.Unsupported:
        return True

    return False


if __name__ == "__main__":
    quick = ("dit with every option", True)
    if sys.argv[1:2] == ["quick"]:
        print(json.dumps([*quick, compare(*quick)]))
        print(json.dumps(["break", False, {"refused": refuses_a_break()}]))
        print(json.dumps(["samples", False, samples()]))
        print(json.dumps(["shapes", False, shapes()]))
        print(json.dumps(["limit", False, {"is_error": ends_at_the_limit()}]))
        print(json.dumps(["samples of shapes", False, samples_of_shapes()]))
        afresh()
        print(json.dumps(["training", False, training(*sys.argv[2:])]))
        sys.exit()
    for name in NETWORKS:
        for is_checkpointed in (False, True):
            print(json.dumps([name, is_checkpointed, compare(name, is_checkpointed)]))
        print(json.dumps([name, "kinds", {"graphs": kinds_of_calls(name)}]))
    print(json.dumps(["ddp", False, under_ddp("dit")]))
    print(json.dumps(["xformers", False, {"taken": takes_xformers()}]))
    print(json.dumps(["flash", False, {"taken": takes_flash()}]))
