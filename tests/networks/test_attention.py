import cmath
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
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
    q, k, v = heads(0, 2, 5, 3, 4), heads(1, 2, 7, 3, 4), heads(2, 2, 7, 3, 4)
    torch.testing.assert_close(attention(q, k, v, backend), by_numpy(q, k, v))


def by_complex_numbers(x, rows, columns):
    """Pairs of features as complex numbers, each times e^(i angle), in Python's double precision."""
    turned, half = x.clone(), x.shape[-1] // 2
    for token in range(rows * columns):
        row, column = divmod(token, columns)
        for pair in range(half):
            coordinate, index = (column, pair) if pair < half // 2 else (row, pair - half // 2)
            factor = cmath.exp(1j * coordinate * 10000 ** (-index / (half // 2)))
            for batch in range(x.shape[0]):
                for head in range(x.shape[2]):
                    a, b = x[batch, token, head, pair].item(), x[batch, token, head, pair + half].item()
                    product = complex(a, b) * factor
                    turned[batch, token, head, pair] = product.real
                    turned[batch, token, head, pair + half] = product.imag
    return turned


@pytest.mark.parametrize(("rows", "columns"), [(3, 2), (1, 5)])
def test_rotation_equals_complex_numbers(rows, columns):
    x = heads(0, 2, rows * columns, 2, 8)
    turned = rotate(x, axial_rotation(8, rows, columns))
    torch.testing.assert_close(turned, by_complex_numbers(x, rows, columns), rtol=0, atol=1e-6)


def test_rotated_products_depend_on_the_offset_alone():
    q, k = (heads(seed, 1, 1, 1, 16).expand(1, 36, 1, 16) for seed in (0, 1))
    q, k = (rotate(x, axial_rotation(16, 6, 6)).reshape(6, 6, 16) for x in (q, k))
    products = torch.stack([q[i, j] @ k[i + 2, j + 1] for i in range(4) for j in range(5)])
    assert products.max() - products.min() < 1e-5
    others = torch.stack([q[0, 0] @ k[0, 0], q[0, 0] @ k[1, 2], q[0, 0] @ k[1, 0], q[0, 0] @ k[0, 1]])
    assert (others - products[0]).abs().min() > 1e-2


def test_rotation_keeps_type_and_length():
    x = heads(0, 2, 6, 2, 8)
    rotation = axial_rotation(8, 3, 2)
    torch.testing.assert_close(rotate(x, rotation).norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    narrow = rotate(x.bfloat16(), rotation)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.double(), rotate(x, rotation), rtol=1e-2, atol=3e-2)


def test_rows_may_be_rotated_differently():
    x, rotation = heads(0, 2, 6, 2, 8), axial_rotation(8, 3, 2)
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
        return q + 0

    xformers_stub(monkeypatch, kernel)
    with FakeTensorMode():  # tensors that are on a CUDA device by name only
        q, k = torch.empty(2, 5, 3, 4, device="cuda"), torch.empty(2, 7, 3, 4, device="cuda")
        assert attention(q, k, k, "xformers").shape == (2, 5, 3, 4)
    assert seen == [(2, 5, 3, 4), (2, 7, 3, 4), (2, 7, 3, 4)]


def test_xformers_without_a_kernel_names_the_remedy(monkeypatch):
    def kernel(q, k, v):
        raise NotImplementedError("No operator found")

    xformers_stub(monkeypatch, kernel)
    with FakeTensorMode():
        q = torch.empty(1, 2, 1, 4, device="cuda")
        with pytest.raises(UserError, match=r"no kernel for queries \(1, 2, 1, 4\).*island\.attention=sdpa"):
            attention(q, q, q, "xformers")


def test_xformers_that_is_not_installed_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    with FakeTensorMode():
        q = torch.empty(1, 2, 1, 4, device="cuda")
        with pytest.raises(UserError, match=r"cannot be imported.*island\.attention=sdpa"):
            attention(q, q, q, "xformers")


def test_a_kernel_that_cannot_run_here_is_one_line():
    for backend in ("auto", "sdpa", "flash"):  # torch has a flash kernel for CPUs
        check_attention(backend, torch.device("cpu"))
    for backend in ("cudnn", "efficient"):
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
    layer, cpu = nn.Sequential(SelfAttention(8, 2, False)), torch.device("cpu")
    assert chosen_kernel(layer, cpu) == "flash_attention"
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16):
        assert chosen_kernel(layer, cpu) == "math"
    assert chosen_kernel(nn.Linear(2, 2), cpu) is None


@pytest.mark.parametrize("backend", ["auto", "sdpa", "flash", "cudnn", "efficient", "xformers"])
def test_set_attention_reaches_every_layer(backend):
    network = nn.Sequential(SelfAttention(8, 2, False), nn.Sequential(SelfAttention(8, 2, False)), nn.Linear(8, 8))
    set_attention(network, backend)
    assert [part.attention_backend for part in network.modules() if isinstance(part, SelfAttention)] == [backend] * 2


def test_set_attention_is_obeyed():
    layer = SelfAttention(8, 2, False)
    set_attention(layer, "xformers")
    with pytest.raises(UserError, match="xformers"):
        layer(torch.zeros(1, 3, 8))


def test_set_attention_leaves_networks_without_attention_alone():
    layer = nn.Linear(2, 2)
    set_attention(layer, "sdpa")
    assert not hasattr(layer, "attention_backend")
