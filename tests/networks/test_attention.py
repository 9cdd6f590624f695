import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddm_lightning.core.errors import UserError
from ddm_lightning.networks.attention import attention, check_attention, chosen_kernel, rotate, set_attention
from ddm_lightning.networks.blocks import SelfAttention
from ddm_lightning.networks.embeddings import axial_rotation


def heads(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_numpy(q, k, v):
    scores = np.einsum("bnhd,bmhd->bhnm", q.numpy(), k.numpy()) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return torch.from_numpy(np.einsum("bhnm,bmhd->bnhd", weights, v.numpy()))


@pytest.mark.parametrize("backend", ["auto", "sdpa", "flash"])
def test_equals_the_formula(backend):
    q = heads(0, 2, 5, 3, 4)
    k, v = heads(1, 2, 2, 7, 3, 4)

    torch.testing.assert_close(attention(q, k, v, backend), by_numpy(q, k, v))


@pytest.mark.parametrize(("rows", "columns"), [(3, 2), (1, 5)])
def test_rotation_equals_complex_numbers(rows, columns):
    """Pairs of features, each times e^(i angle): two turn by the column, two by the row."""
    x = heads(0, 2, rows * columns, 2, 8)
    row, column = np.divmod(np.arange(rows * columns), columns)
    angles = np.stack([column, column / 100, row, row / 100], axis=1)
    pairs = torch.complex(x[..., :4], x[..., 4:]).numpy() * np.exp(1j * angles)[:, None]

    turned = rotate(x, axial_rotation(8, rows, columns))
    narrow = rotate(x.bfloat16(), axial_rotation(8, rows, columns))

    expected = torch.from_numpy(np.concatenate([pairs.real, pairs.imag], axis=-1))
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-6)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.double(), expected, rtol=1e-2, atol=3e-2)


def test_rows_may_be_rotated_differently():
    x = heads(0, 2, 6, 2, 8)
    rotation = axial_rotation(8, 3, 2)
    each = torch.cat([rotation, rotation.flip(1)])
    torch.testing.assert_close(rotate(x, each)[0], rotate(x, rotation)[0])
    torch.testing.assert_close(rotate(x, each)[1], rotate(x.flip(1), rotation)[1].flip(0))


def xformers_stub(monkeypatch, kernel):
    stub = ModuleType("xformers.ops")
    stub.memory_efficient_attention = kernel
    monkeypatch.setitem(sys.modules, "xformers", ModuleType("xformers"))
    monkeypatch.setitem(sys.modules, "xformers.ops", stub)


def test_xformers_gets_its_own_layout(monkeypatch):
    seen = []

    def kernel(q, k, v):
        seen.extend(tuple(part.shape) for part in (q, k, v))
        return q

    xformers_stub(monkeypatch, kernel)
    layer = SelfAttention(12, 3, False)
    set_attention(layer, "xformers")

    assert layer(torch.zeros(2, 5, 12)).shape == (2, 5, 12)
    assert seen == [(2, 5, 3, 4)] * 3


def test_xformers_that_is_not_installed_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    with pytest.raises(UserError, match=r"cannot be imported.*island\.attention=sdpa"):
        check_attention("xformers", torch.device("cpu"))


def test_a_kernel_that_cannot_run_here_is_one_line():
    for backend in ("auto", "flash"):  # torch has a flash kernel for CPUs
        check_attention(backend, torch.device("cpu"))

    for backend in ("cudnn", "xformers"):
        with pytest.raises(UserError, match=rf"'{backend}' has no kernel for torch\.float32 on cpu; set island\.att"):
            check_attention(backend, torch.device("cpu"))

    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match=r"no kernel for torch\.bfloat16"):
        check_attention("efficient", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "efficient", "xformers"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_equals_the_formula_on_a_gpu(dtype, tolerance, backend):
    if backend == "xformers" and not pytest.importorskip("xformers._cpp_lib")._built_with_cuda:
        pytest.skip("xformers was built for another CUDA")

    set_attention(nn.Module(), backend)
    # 72 features a head are those of DiT-XL/2; views of one product, as layers hand them over.
    qkv = heads(0, 2, 37, 3, 4, 72).to(dtype)
    expected = by_numpy(*(part.double() for part in qkv.unbind(2)))
    on_gpu = qkv.cuda().requires_grad_()
    out = attention(*on_gpu.unbind(2), backend)
    out.sum().backward()
    assert out.dtype == dtype
    assert bool(on_gpu.grad.isfinite().all())
    torch.testing.assert_close(out.detach().cpu().double(), expected, atol=tolerance, rtol=tolerance)


def test_the_chosen_kernel_is_named():
    layer = nn.Sequential(SelfAttention(8, 2, False))
    cpu = torch.device("cpu")
    assert chosen_kernel(layer, cpu) == "flash_attention"
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16):
        assert chosen_kernel(layer, cpu) == "math"

    assert chosen_kernel(nn.Linear(2, 2), cpu) is None


@pytest.mark.parametrize("backend", ["flash", "xformers"])
def test_set_attention_reaches_every_layer(backend):
    network = nn.Sequential(SelfAttention(8, 2, False), nn.Sequential(SelfAttention(8, 2, False)), nn.Linear(8, 8))
    set_attention(network, backend)
    assert [part.attention_backend for part in network.modules() if isinstance(part, SelfAttention)] == [backend] * 2
