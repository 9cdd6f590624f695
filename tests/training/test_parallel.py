from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from networks.small import moved
from torch import nn

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.devices import (
    autocast,
    check_devices,
    check_precision,
    configure_torch,
    device_of,
    resolve_accelerator,
    resolve_precision,
)
from ddm_lightning.core.errors import UserError
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.cost import State
from ddm_lightning.members.flops import flops_per_sample
from ddm_lightning.networks.blocks import checkpoint_blocks, compile_blocks
from ddm_lightning.networks.dit import DiT
from ddm_lightning.training.parallel import choose_strategy

GIGABYTE = 1024**3
HALF = 8 * GIGABYTE


def state(num_parameters, num_widths=0):
    """Of AdamW in float32."""
    each = 4 * num_parameters
    return State(each, each, 2 * each, (1 + num_widths) * each)


def island(**settings):
    return IslandConfig(accelerator="cpu", **settings)


@pytest.mark.parametrize(
    ("settings", "num_parameters", "optimizer", "words"),
    [
        ({"strategy": "fsdp", "precision": "16-mixed"}, 1, "adamw", r"'island\.precision' = '16-mixed'.*strategy=ddp"),
        ({"strategy": "fsdp-shard-grad-op", "precision": "16-mixed"}, 1, "adamw", r"takes 32-true or bf16-mixed"),
        ({"precision": "16-mixed"}, HALF // 20 + 2, "adamw", r"8\.6 GB per device unsharded\) takes 32-true or bf16"),
        ({"strategy": "fsdp"}, 1, "muon", r"'train\.optimizer' = 'muon'.*FSDP2.*adamw, or island\.strategy=ddp"),
        ({"strategy": "fsdp-shard-grad-op"}, 1, "muon", "FSDP2.*adamw, or"),
        ({}, 10**9, "muon", "FSDP2.*adamw, or"),
    ],
)
def test_what_fsdp2_does_not_support_is_refused(settings, num_parameters, optimizer, words):
    with pytest.raises(UserError, match=words):
        choose_strategy(island(devices=2, **settings), state(num_parameters), optimizer)


@pytest.mark.parametrize(
    ("name", "devices", "kind", "said"),
    [
        ("auto", 1, SingleDeviceStrategy, "one device"),
        ("single", 1, SingleDeviceStrategy, "one device"),
        ("ddp", 1, DDPStrategy, "DDP over 1 devices: asked for by island.strategy"),
        ("ddp", 2, DDPStrategy, "DDP over 2 devices: asked for by island.strategy"),
        ("fsdp", 1, ModelParallelStrategy, "over 1 devices, weights are gathered block by block: asked for"),
        ("fsdp", 2, ModelParallelStrategy, "over 2 devices, weights are gathered block by block: asked for"),
        ("fsdp-shard-grad-op", 2, ModelParallelStrategy, ", weights stay gathered until the backward pass: asked for"),
    ],
)
def test_a_named_strategy_is_used(name, devices, kind, said):
    strategy, reason = choose_strategy(island(strategy=name, devices=devices), state(1))

    assert isinstance(strategy, kind)
    assert said in reason
    assert getattr(strategy, "reshard_after_forward", True) == (name != "fsdp-shard-grad-op")


@pytest.mark.parametrize(
    ("ema", "said"), [(40, "optimizer and EMA take 200 bytes"), (0, "and optimizer take 160 bytes")]
)
def test_the_reason_names_the_parts_that_it_counts(ema, said):
    """Averages in the host's memory take none of the device."""
    _, reason = choose_strategy(island(devices=2), State(40, 40, 80, ema, host=40 - ema))

    assert f"{said} per device unsharded" in reason


def test_under_ddp_only_rank_zero_saves(tmp_path, monkeypatch):
    """The others have no part in it: a strategy that knows no module yet would fail if it tried."""
    strategy, _ = choose_strategy(island(strategy="ddp", devices=2), state(1))
    monkeypatch.setattr(type(strategy), "is_global_zero", False)
    strategy.save_checkpoint({}, tmp_path / "step-1.ckpt")

    assert not list(tmp_path.iterdir())

    monkeypatch.setattr(type(strategy), "is_global_zero", True)
    with pytest.raises(ValueError, match="not enough values"):
        strategy.save_checkpoint({}, tmp_path / "step-1.ckpt")


@pytest.mark.parametrize(
    ("devices", "precision", "num_parameters", "num_widths", "chosen"),
    [
        (2, "16-mixed", HALF // 20 - 1, 0, "DDP over 2"),
        (2, "32-true", HALF // 20 - 1, 0, "DDP over 2"),
        (2, "32-true", HALF // 20 - 1, 1, "weights stay"),
        (2, "32-true", HALF // 20 + 1, 0, "weights stay"),
        # Of 20 bytes 4 are whole and 20 shared by two: 14 a parameter, beside 8 GiB. In bfloat16 2 of the 4.
        (2, "32-true", HALF // 14 - 1, 0, "weights stay"),
        (2, "32-true", HALF // 14 + 1, 0, "weights are gathered block by block"),
        (4, "32-true", HALF // 14 + 1, 0, "weights stay"),
        (2, "bf16-mixed", HALF // 12 - 1, 0, "weights stay"),
        (2, "bf16-mixed", HALF // 12 + 1, 0, "weights are gathered block by block"),
    ],
)
def test_auto_shards_above_half_of_a_device(devices, precision, num_parameters, num_widths, chosen):
    """A CPU counts as 16 GiB; weight, gradient, two moments and the average take 4 bytes each."""
    strategy, reason = choose_strategy(island(devices=devices, precision=precision), state(num_parameters, num_widths))

    assert chosen in reason
    assert getattr(strategy, "reshard_after_forward", False) == ("block by block" in chosen)


@pytest.mark.parametrize(
    ("stem", "devices", "millions", "chosen"),
    [
        ("imagenet_8x", 1, 675, "one device"),
        ("laion_8x", 1, 675, "one device"),
        ("laion_8x", 8, 675, "DDP"),
        ("paris_8x", 8, 608, "DDP"),
        ("laion_24b", 8, 2980, "FSDP2 over 8 devices, weights stay gathered"),
    ],
)
def test_large_experiments_leave_the_choice_to_the_memory_of_their_gpus(stem, devices, millions, chosen, monkeypatch):
    monkeypatch.setattr(f"{choose_strategy.__module__}.device_bytes", lambda _: 80 * GIGABYTE)
    path = Path(__file__).parents[2] / "experiments" / f"{stem}.yaml"
    shipped = load_experiment(path, [f"island.devices={devices}"]).island

    assert choose_strategy(shipped, state(millions * 10**6))[1].startswith(chosen)


def test_missing_devices_are_one_line(monkeypatch):
    assert resolve_accelerator("cpu") == "cpu"

    check_devices("cpu", 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_devices("auto", 64)
    with pytest.raises(UserError, match=r"'island\.devices' = 1 .* 'gpu', but torch sees 0 usable CUDA devices"):
        check_devices("gpu", 1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices("auto", 2)
    with pytest.raises(UserError, match=r"'island\.devices' = 3 .* 'auto', but torch sees 2"):
        check_devices("auto", 3)


def test_each_block_is_compiled_in_place_and_nothing_else(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compiled.append(self))
    network = nn.Module()
    network.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    network.head = nn.Linear(2, 2)
    before = list(network.state_dict())
    compile_blocks(network)

    assert compiled == list(network.blocks)
    assert list(network.state_dict()) == before

    compile_blocks(nn.Linear(2, 2))  # a plug-in need not have blocks
    assert len(compiled) == 2


def small_dit():
    torch.manual_seed(0)
    sizes = {"x_shape": (3, 8, 8), "width": 32, "depth": 2, "num_heads": 2, "patch_size": 2}
    return moved(DiT(**sizes, condition=ConditionSpec("none", 0), qk_norm=True))


def test_checkpointed_blocks_give_the_same_gradients_under_the_same_names_for_one_more_forward_pass():
    x = torch.randn(4, 3, 8, 8)
    t = torch.rand(4)
    gradients = []
    flops = []
    for is_checkpointed in (False, True):
        network = small_dit()
        names = list(network.state_dict())
        if is_checkpointed:
            checkpoint_blocks(network)
        network(x, t, None).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in network.named_parameters()})
        assert list(network.state_dict()) == names
        flops.append(flops_per_sample(network, (3, 8, 8), ConditionSpec("none", 0), backward=True))
        with torch.no_grad():
            assert torch.isfinite(network(x, t, None)).all()

    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradient, gradients[1][name]), name

    forward = flops_per_sample(small_dit(), (3, 8, 8), ConditionSpec("none", 0), backward=False)

    assert 0.8 * forward < flops[1] - flops[0] < forward


def test_a_checkpointed_block_takes_named_inputs():
    class Block(nn.Module):
        def forward(self, x, *, factor):
            return factor * x

    network = nn.Module()
    network.blocks = nn.ModuleList([Block()])
    checkpoint_blocks(network)
    x = torch.ones(2, requires_grad=True)
    network.blocks[0](x, factor=3.0).sum().backward()

    assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(("accelerator", "precision", "has_cudnn"), [("cpu", "highest", True), ("gpu", "high", False)])
def test_a_gpu_takes_tensor_cores_for_float32_and_not_cudnns_attention(accelerator, precision, has_cudnn):
    torch.backends.cuda.enable_cudnn_sdp(True)
    configure_torch(accelerator, 3)

    assert torch.get_num_threads() == 3
    assert torch.get_float32_matmul_precision() == precision
    assert torch.backends.cuda.cudnn_sdp_enabled() == has_cudnn
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.parametrize(
    ("rank", "count", "expected"),
    [(None, 2, "cuda"), ("0", 2, "cuda:0"), ("1", 2, "cuda:1"), ("3", 2, "cuda:1"), ("1", 0, "cuda")],
)
def test_ranks_share_the_gpus(monkeypatch, rank, count, expected):
    """Without a rank it is the current one, whichever that is."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if rank:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4"}.items():
            monkeypatch.setenv(name, value)

    assert device_of("gpu") == torch.device(expected)
    assert device_of("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "has_units", "expected"),
    [("cpu", True, "32-true"), ("cuda", True, "bf16-mixed"), ("cuda", False, "32-true")],
)
def test_sampling_is_in_bfloat16_on_gpus_that_have_it(monkeypatch, device, has_units, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_units or including_emulation)

    assert resolve_precision("auto", torch.device(device)) == expected

    for precision in ("32-true", "16-mixed"):
        assert resolve_precision(precision, torch.device(device)) == precision


def test_weights_in_bfloat16_need_a_device_that_has_it(monkeypatch):
    for has_units in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", partial(lambda has, **_: has, has_units))
        check_precision("bf16-true", torch.device("cpu"))
        check_precision("bf16-mixed", torch.device("cuda"))
        with nullcontext() if has_units else pytest.raises(UserError, match="no bfloat16 units; set it to 16-mixed"):
            check_precision("bf16-true", torch.device("cuda"))


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_a_teacher_computes_in_its_own_precision_within_a_training_step(precision, dtype):
    layer = nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with autocast(precision, torch.device("cpu")):
            assert layer(torch.zeros(1, 2)).dtype == dtype
        assert layer(torch.zeros(1, 2)).dtype == torch.bfloat16
