"""Transformer layers modulated by time and condition: adaLN-Zero (Peebles and Xie, 2212.09748, section 3.2).

``recipe.Recipe`` names the other choices: a SwiGLU, an RMSNorm, adaLN-single.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.networks.attention import attention, rotate
from ddm_lightning.networks.recipe import Recipe

_EPSILON = 1e-6


def modulate(
    x: Float[Tensor, "b n d"], shift: Float[Tensor, "b 1 d"], scale: Float[Tensor, "b 1 d"], norm: str = "layer"
) -> Float[Tensor, "b n d"]:
    """A norm over the width without parameters of its own, then ``(1 + scale)`` times it, plus ``shift``.

    ``norm`` is ``layer`` or ``rms`` (Zhang and Sennrich, 1910.07467: no mean is taken off).
    """
    normed = functional.rms_norm if norm == "rms" else functional.layer_norm
    return torch.addcmul(shift, normed(x, x.shape[-1:], eps=_EPSILON), 1 + scale)


def normalised(x: Float[Tensor, "b n h d"], norm: nn.RMSNorm | None) -> Float[Tensor, "b n h d"]:
    """Queries or keys after ``norm``, in their own type.

    Under autocast the norm works in its weight's type, float32 unless FSDP2 gathers it in bfloat16; xformers then wants
    one type for queries, keys and values.
    """
    if norm is None:
        return x
    normed: Tensor = norm(x.to(norm.weight.dtype))
    return normed.to(x.dtype)


def head_norm(width: int, num_heads: int, qk_norm: bool) -> nn.RMSNorm | None:
    """An RMSNorm of queries or keys a head, against bfloat16 blow-ups; None without ``qk_norm``."""
    return nn.RMSNorm(width // num_heads, eps=_EPSILON) if qk_norm else None


class SelfAttention(nn.Module):
    """Multi-head self-attention; ``qk_norm`` adds ``head_norm``."""

    def __init__(self, width: int, num_heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_backend = "auto"
        # One product for the three: a small matrix product costs more a FLOP than a large one.
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.query_norm = head_norm(width, num_heads, qk_norm)
        self.key_norm = head_norm(width, num_heads, qk_norm)

    def forward(
        self, x: Float[Tensor, "b n d"], rotation: Float[Tensor, "#b n 2 half"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """Every token attends to every token of its row; ``rotation`` turns queries and keys (``attention.rotate``)."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).unbind(2)
        q, k = normalised(q, self.query_norm), normalised(k, self.key_norm)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        attended: Tensor = self.out(attention(q, k, v, self.attention_backend).flatten(2))
        return attended


class CrossAttention(nn.Module):
    """Multi-head attention of patches to text tokens (Rombach et al., 2112.10752); ``qk_norm`` adds ``head_norm``."""

    def __init__(self, width: int, num_heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_backend = "auto"
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.query_norm = head_norm(width, num_heads, qk_norm)
        self.key_norm = head_norm(width, num_heads, qk_norm)

    def forward(self, x: Float[Tensor, "b n d"], context: Float[Tensor, "b m d"]) -> Float[Tensor, "b n d"]:
        """Every token of ``x`` attends to every token of ``context`` in its row."""
        q = self.q(x).unflatten(2, (self.num_heads, -1))
        k, v = self.kv(context).unflatten(2, (2, self.num_heads, -1)).unbind(2)
        q, k = normalised(q, self.query_norm), normalised(k, self.key_norm)
        attended: Tensor = self.out(attention(q, k, v, self.attention_backend).flatten(2))
        return attended


class SwiGLU(nn.Module):
    """The gated MLP ``down(silu(gate(x)) * up(x))`` (Shazeer, 2002.05202), of as many parameters as a plain one.

    Three matrices instead of two, so two thirds of the plain MLP's ``hidden`` features, rounded up to a multiple of
    64, or of 8 where ``width`` is below 512.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        multiple = 64 if width >= 512 else 8
        gated = multiple * -(-2 * hidden // (3 * multiple))
        # One product for the two, as for queries, keys and values.
        self.gate_up = nn.Linear(width, 2 * gated)
        self.down = nn.Linear(gated, width)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Each token alone."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(functional.silu(gate) * up)
        return out


class ModulationTable(nn.Module):
    """A block's part of adaLN-single (Chen et al., 2310.00426, section 2.3): what it adds to the shared projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, width))

    def forward(self, shared: Float[Tensor, "b sixfold"]) -> Float[Tensor, "b sixfold"]:
        """The three of the attention, then of the MLP: shift, scale, gate."""
        return shared + self.table.flatten()


def plain_mlp(width: int, hidden: int) -> nn.Sequential:
    """Two linear layers about a GELU."""
    # The exact GELU: on CPUs oneDNN makes it far faster than the tanh approximation, which differs by < 5e-4.
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class DiTBlock(nn.Module):
    """Attention, then MLP; each shifted and scaled before, gated after. The unit that is compiled and sharded.

    Text tokens are attended to in between, neither normalised nor modulated (Chen et al., 2310.00426, section 2.3).
    """

    def __init__(self, width: int, num_heads: int, recipe: Recipe, cross_attention: bool = False) -> None:
        super().__init__()
        hidden = int(width * recipe.mlp_ratio)
        self.norm = recipe.norm
        self.modulation: nn.Linear | ModulationTable = (
            ModulationTable(width) if recipe.modulation == "single" else nn.Linear(width, 6 * width)
        )
        self.attention = SelfAttention(width, num_heads, recipe.qk_norm)
        self.cross_attention = CrossAttention(width, num_heads, recipe.qk_norm) if cross_attention else None
        self.mlp = SwiGLU(width, hidden) if recipe.mlp == "swiglu" else plain_mlp(width, hidden)

    def initialise(self) -> None:
        """The block starts as the identity."""
        if isinstance(self.modulation, nn.Linear):
            nn.init.zeros_(self.modulation.weight)
        else:
            nn.init.zeros_(self.modulation.table)
        if self.cross_attention is not None:
            nn.init.zeros_(self.cross_attention.out.weight)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        conditioning: Float[Tensor, "b features"],
        rotation: Float[Tensor, "#b n 2 half"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """One step of the residual stream.

        Args:
            x: the tokens.
            conditioning: what time and condition became after the SiLU that all blocks share, ``d`` numbers; with
                adaLN-single the projection of it that all blocks share, 6 ``d`` numbers.
            rotation: with rotary positions, the angles of the tokens.
            context: with cross-attention, the embedded text tokens.
        """
        modulation = self.modulation(conditioning)[:, None].chunk(6, dim=-1)
        attention_shift, attention_scale, attention_gate, mlp_shift, mlp_scale, mlp_gate = modulation
        attended = self.attention(modulate(x, attention_shift, attention_scale, self.norm), rotation)
        x = torch.addcmul(x, attention_gate, attended)
        if self.cross_attention is not None:
            x = x + self.cross_attention(x, context)
        return torch.addcmul(x, mlp_gate, self.mlp(modulate(x, mlp_shift, mlp_scale, self.norm)))


class FinalLayer(nn.Module):
    """A modulated norm and the linear output; everything starts at zero."""

    def __init__(self, width: int, out_features: int, norm: str = "layer") -> None:
        super().__init__()
        self.norm = norm
        self.modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, out_features)

    def initialise(self) -> None:
        """The network starts with output 0."""
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Float[Tensor, "b n d"], conditioning: Float[Tensor, "b d"]) -> Float[Tensor, "b n out"]:
        """``out_features`` numbers a token."""
        shift, scale = self.modulation(conditioning)[:, None].chunk(2, dim=-1)
        out: Tensor = self.out(modulate(x, shift, scale, self.norm))
        return out
