"""Transformer layers modulated by time and condition: adaLN-Zero (Peebles and Xie, 2212.09748, section 3.2).

Their options (``Recipe``): SwiGLU, RMSNorm, adaLN-single. ``Architecture`` adds the size of a transformer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ddm_lightning.core.checks import choice, option
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.networks.attention import Rotation, attention, rotate

Tokens: TypeAlias = Float[Tensor, "b n d"]
"""Tokens of each row."""
TextTokens: TypeAlias = Float[Tensor, "b m d"]
"""Embedded text tokens of each row."""
Heads: TypeAlias = Float[Tensor, "b n h e"]
"""Queries, keys or values of each head."""
_EPSILON = 1e-6
# torch compiles a block anew for training, validation and previews, for each kind of batch size and number of tokens,
# and for a last block that differs: up to ten times for each shape of images. At the default limit of 8 variants, a
# block compiled with ``fullgraph`` would end the training.
_MOST_VARIANTS = 4096


class Size(NamedTuple):
    """Depth, width and heads of a transformer."""

    depth: int
    width: int
    num_heads: int


SIZES = {"S": Size(12, 384, 6), "B": Size(12, 768, 12), "L": Size(24, 1024, 16), "XL": Size(28, 1152, 16)}
"""Table 1 of Peebles and Xie, 2212.09748."""


@dataclass(frozen=True)
class Recipe:
    """Options of the blocks of a ``Trunk``; the defaults are those of DiT (Peebles and Xie, 2212.09748)."""

    mlp_ratio: float = 4.0
    """Hidden features of a block's MLP, as a multiple of its width."""
    qk_norm: bool = False
    """RMSNorm of each head's queries and keys."""
    rope: bool = False
    """Rotary positions on queries and keys, instead of positions added to the patches."""
    mlp: str = choice("gelu", "swiglu")
    """``gelu``, or ``swiglu`` (``blocks.SwiGLU``, with about as many parameters)."""
    norm: str = choice("layer", "rms")
    """``layer`` or ``rms``: the norm before shift and scale, without parameters."""
    modulation: str = choice("zero", "single")
    """``zero``: each block has its own projection of time and condition (adaLN-Zero, section 3.2). ``single``: all
    blocks share one projection, and each adds its own table (adaLN-single, Chen et al., 2310.00426, section 2.3)."""


@dataclass(frozen=True, kw_only=True)
class Architecture(Recipe):
    """Patches, size and recipe of a ``Trunk``: parameters of ``DiT`` and ``RouterDiT``."""

    patch_size: int
    """Edge of a square patch, in cells of ``x_t``."""
    size: str | None = None
    """``S``, ``B``, ``L`` or ``XL`` (``SIZES``), instead of the next three."""
    width: int | None = None
    """Features of a token."""
    depth: int | None = option(None, low=1, high=10_000)
    """Number of blocks."""
    num_heads: int | None = None
    """Attention heads of a block."""

    def sizes(self) -> Size:
        """The size given by its name or by its three numbers.

        Raises:
            ValueError: unknown name, both a name and numbers, or neither a name nor all numbers.
        """
        numbers = [number for number in (self.depth, self.width, self.num_heads) if number is not None]
        if self.size is None and len(numbers) == 3:
            return Size(*numbers)
        if self.size in SIZES and not numbers:
            return SIZES[self.size]

        raise ValueError(
            f"needs either size ({', '.join(SIZES)}) or all of width, depth and num_heads; given are size = "
            f"{self.size}, width = {self.width}, depth = {self.depth}, num_heads = {self.num_heads}"
        )


@dataclass(frozen=True, kw_only=True)
class ExpertArchitecture(Architecture):
    """Parameters of ``DiT``."""

    prediction: str = choice("velocity", "epsilon", "x_0")
    """Output of the network: ``velocity``, ``epsilon`` (the noise) or ``x_0`` (the data)."""


def modulate(x: Tokens, shift: Float[Tensor, "b 1 d"], scale: Float[Tensor, "b 1 d"], norm: str = "layer") -> Tokens:
    """``norm(x)·(1 + scale) + shift``, with a norm over the width that has no parameters.

    ``norm`` is ``layer`` or ``rms`` (Zhang and Sennrich, 1910.07467: does not subtract the mean).
    """
    if norm == "rms":
        normed = functional.rms_norm(x, x.shape[-1:], eps=_EPSILON)
    else:
        normed = functional.layer_norm(x, x.shape[-1:], eps=_EPSILON)

    return torch.addcmul(shift, normed, 1 + scale)


class HeadNorm(nn.RMSNorm):
    """RMSNorm of each head's queries or keys, against overflow in bfloat16.

    Under autocast it computes in its weight's dtype: float32, unless FSDP2 gathers it in bfloat16. The result is
    converted back, because xformers needs one dtype for queries, keys and values.
    """

    def forward(self, x: Heads) -> Heads:
        """The normalised queries or keys, in the dtype of ``x``."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def head_norm(width: int, num_heads: int, qk_norm: bool) -> nn.Module:
    """``HeadNorm``, or the identity without ``qk_norm``."""
    if qk_norm:
        return HeadNorm(width // num_heads, eps=_EPSILON)

    return nn.Identity()


class SelfAttention(nn.Module):
    """Multi-head self-attention; ``qk_norm`` adds ``head_norm``."""

    def __init__(self, width: int, num_heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_backend = "auto"
        # One product for all three: large matrix products cost less per FLOP.
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.query_norm = head_norm(width, num_heads, qk_norm)
        self.key_norm = head_norm(width, num_heads, qk_norm)

    def forward(self, x: Tokens, rotation: Rotation | None = None) -> Tokens:
        """Every token attends to all tokens of its row; ``rotation`` is that of ``attention.rotate``."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).unbind(2)
        q = self.query_norm(q)
        k = self.key_norm(k)
        if rotation is not None:
            q = rotate(q, rotation)
            k = rotate(k, rotation)

        return self.out(attention(q, k, v, self.attention_backend).flatten(2))


class CrossAttention(nn.Module):
    """Multi-head attention from patches to text tokens (Rombach et al., 2112.10752); ``qk_norm`` adds ``head_norm``."""

    def __init__(self, width: int, num_heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_backend = "auto"
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.query_norm = head_norm(width, num_heads, qk_norm)
        self.key_norm = head_norm(width, num_heads, qk_norm)

    def forward(self, x: Tokens, context: TextTokens) -> Tokens:
        """Every token of ``x`` attends to all tokens of ``context`` in its row."""
        q = self.q(x).unflatten(2, (self.num_heads, -1))
        k, v = self.kv(context).unflatten(2, (2, self.num_heads, -1)).unbind(2)
        attended = attention(self.query_norm(q), self.key_norm(k), v, self.attention_backend)
        return self.out(attended.flatten(2))


class SwiGLU(nn.Module):
    """Gated MLP ``down(silu(gate(x)) * up(x))`` (Shazeer, 2002.05202) with as many parameters as a plain MLP.

    It has three matrices instead of two, hence two thirds of the plain MLP's ``hidden`` features, rounded up to a
    multiple of 64, or of 8 if ``width`` is below 512.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        multiple = 64 if width >= 512 else 8
        gated = multiple * -(-2 * hidden // (3 * multiple))
        # One product for both, as for queries, keys and values.
        self.gate_up = nn.Linear(width, 2 * gated)
        self.down = nn.Linear(gated, width)

    def forward(self, x: Tokens) -> Tokens:
        """Transform each token independently."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class ModulationTable(nn.Module):
    """A block's own table of adaLN-single (Chen et al., 2310.00426, section 2.3), added to the shared projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, width))

    def forward(self, shared: Float[Tensor, "b sixfold"]) -> Float[Tensor, "b sixfold"]:
        """Shift, scale and gate of the attention, then of the MLP."""
        return shared + self.table.flatten()


def plain_mlp(width: int, hidden: int) -> nn.Sequential:
    """Two linear layers with a GELU in between."""
    # The exact GELU: on CPUs far faster (oneDNN) than the tanh approximation, which differs by < 5e-4.
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class DiTBlock(nn.Module):
    """Attention, then MLP; each is shifted and scaled before, gated after. Compiled and sharded as one unit.

    Cross-attention to text tokens comes in between, without norm or modulation (Chen et al., 2310.00426, section 2.3).
    """

    def __init__(self, width: int, num_heads: int, recipe: Recipe, cross_attention: bool = False) -> None:
        super().__init__()
        hidden = int(width * recipe.mlp_ratio)
        self.norm = recipe.norm
        self.modulation: nn.Module
        if recipe.modulation == "single":
            self.modulation = ModulationTable(width)
        else:
            self.modulation = nn.Linear(width, 6 * width)

        self.attention = SelfAttention(width, num_heads, recipe.qk_norm)
        self.cross_attention = None
        if cross_attention:
            self.cross_attention = CrossAttention(width, num_heads, recipe.qk_norm)

        self.mlp: nn.Module
        if recipe.mlp == "swiglu":
            self.mlp = SwiGLU(width, hidden)
        else:
            self.mlp = plain_mlp(width, hidden)

    def forward(
        self,
        x: Tokens,
        conditioning: Float[Tensor, "b features"],
        rotation: Rotation | None = None,
        context: TextTokens | None = None,
    ) -> Tokens:
        """The tokens after this block.

        Args:
            x: tokens.
            conditioning: ``Trunk.conditioning``, of size d; with adaLN-single its shared projection, of size 6 d.
            rotation: angles of the tokens, for rotary positions.
            context: embedded text tokens, for cross-attention.
        """
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(conditioning)[:, None].chunk(6, dim=-1)
        attended = self.attention(modulate(x, shift, scale, self.norm), rotation)
        x = torch.addcmul(x, gate, attended)
        if self.cross_attention is not None:
            x = x + self.cross_attention(x, context)

        update = self.mlp(modulate(x, mlp_shift, mlp_scale, self.norm))
        return torch.addcmul(x, mlp_gate, update)


class FinalLayer(nn.Module):
    """Modulated norm and linear output, both zero at the start."""

    def __init__(self, width: int, out_features: int, norm: str = "layer") -> None:
        super().__init__()
        self.norm = norm
        self.modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, out_features)

    def forward(self, x: Tokens, conditioning: Float[Tensor, "b d"]) -> Float[Tensor, "b n out"]:
        """``out_features`` numbers per token."""
        shift, scale = self.modulation(conditioning)[:, None].chunk(2, dim=-1)
        return self.out(modulate(x, shift, scale, self.norm))


def initialise(network: nn.Module) -> None:
    """Initialise all weights from torch's global generator: adaLN-Zero (section 3.2), with DiT's ranges.

    Linear layers are Xavier-uniform with zero bias, embeddings normal(0.02). Modulations, the last layer and the
    outputs of cross-attention are zero, so that each block is the identity.
    """
    for name, part in network.named_modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)

        if name.endswith(("modulation", "cross_attention.out", "final.out")):
            for parameter in part.parameters():
                nn.init.zeros_(parameter)

    for part in network.modules():
        if hasattr(part, "initialise"):
            part.initialise()  # type: ignore[operator]  # torch expects tensors and modules


def is_muon_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a layer's matrix within a block: not an embedding, nor the first or last layer.

    Excluded are tables of vectors, such as the offsets of adaLN-single, and adaLN modulations: six projections in one
    that start at zero and read one vector per sample.
    """
    is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1 and name.endswith(".weight")
    return is_matrix and name.startswith("blocks.") and not name.endswith("modulation.weight")


def moment_block(parameter: Tensor) -> int | None:
    """Size of the blocks that share a scale where moments have eight bits: at most 256, a part of a row.

    So shards of rows hold whole blocks. None for vectors, small matrices, and rows that no such size divides: their
    moments stay float32.
    """
    if parameter.ndim < 2 or parameter.numel() < 4096 or not parameter.is_contiguous():
        return None

    row = math.prod(parameter.shape[1:])
    return max((size for size in range(16, 257) if row % size == 0), default=None)


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The modules in a network's ``blocks``, which are compiled, sharded and recomputed one by one; none without."""
    blocks = getattr(network, "blocks", None)
    if isinstance(blocks, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return [*blocks.children()]

    return []


class _Forward:
    """A block's forward pass, called from this file: the compiler begins no graph in torch's own classes.

    A class, not a closure: the copy of a block then calls the copy's own forward pass.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.forward(*inputs, **named)


class _Recomputed(_Forward):
    """A forward pass that is recomputed in the backward pass. A class, because the compiler skips a partial."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return checkpoint(self.forward, *inputs, use_reentrant=False, **named)


def check_compiler(key: str, device: torch.device, backend: str = "inductor") -> None:
    """Compile a small function on ``device``.

    Raises:
        UserError: the compiler fails there; names ``key``.
    """
    try:
        torch.compile(torch.square, backend=backend)(torch.ones(64, device=device))
    except Exception as error:  # compilers and Triton have no narrower one in common
        raise UserError(
            f"key '{key}' = true: torch cannot compile here ({first_line(error)}); install a C++ compiler, such as "
            f"g++, or set {key}=false"
        ) from error


def compile_blocks(network: nn.Module, backend: str = "inductor", *, any_size: bool = False) -> None:
    """Compile each block in place (regional compilation: one graph serves all blocks of a kind).

    A block that does not fit into one graph ends the first step with an error that names the line; graph breaks would
    silently make it slow.

    Args:
        network: its blocks are compiled, if it has any.
        backend: of ``torch.compile``.
        any_size: compile one graph for all batch sizes, as sampling needs, where an expert's number of rows varies.
            Otherwise compile one graph per size, which is faster; a training has few sizes. Images of many shapes make
            a graph for each number of tokens: on a CPU, steps of a small DiT took 0.97 to 0.98 of the time with one
            graph for all, which compiles in half to a quarter of the time (docs/log.md). Not measured on GPUs.
    """
    config = torch._dynamo.config
    config.optimize_ddp = False  # would split a block's graph by DDP's buckets; blocks are small enough
    config.automatic_dynamic_shapes = any_size
    config.recompile_limit = config.accumulated_recompile_limit = _MOST_VARIANTS
    for block in blocks_of(network):
        block.forward = _Forward(block.forward)
        block.compile(fullgraph=True, backend=backend)


def checkpoint_blocks(network: nn.Module) -> None:
    """Keep only the input of each block and recompute the rest in the backward pass (Chen et al., 1604.06174)."""
    for block in blocks_of(network):
        block.forward = _Recomputed(block.forward)  # wrapping the module instead would rename its weights
