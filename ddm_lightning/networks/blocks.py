"""Transformer layers modulated by time and condition: adaLN-Zero (Peebles and Xie, 2212.09748, section 3.2)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.networks.attention import attention

_EPSILON = 1e-6


def modulate(
    x: Float[Tensor, "b n d"], shift: Float[Tensor, "b 1 d"], scale: Float[Tensor, "b 1 d"]
) -> Float[Tensor, "b n d"]:
    """LayerNorm over the width without parameters of its own, then ``(1 + scale)`` times it, plus ``shift``."""
    return torch.addcmul(shift, functional.layer_norm(x, x.shape[-1:], eps=_EPSILON), 1 + scale)


class SelfAttention(nn.Module):
    """Multi-head self-attention; ``qk_norm`` adds an RMSNorm of queries and keys a head, against bfloat16 blow-ups."""

    def __init__(self, width: int, num_heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_backend = "auto"
        # One product for the three: a small matrix product costs more a FLOP than a large one.
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.query_norm = nn.RMSNorm(width // num_heads, eps=_EPSILON) if qk_norm else None
        self.key_norm = nn.RMSNorm(width // num_heads, eps=_EPSILON) if qk_norm else None

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Every token attends to every token of its row."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).unbind(2)
        if self.query_norm is not None and self.key_norm is not None:
            # Under autocast the norms work in their weights' float32; xformers then wants one type for all three.
            precise = self.query_norm.weight.dtype
            q, k = self.query_norm(q.to(precise)).to(v.dtype), self.key_norm(k.to(precise)).to(v.dtype)
        attended: Tensor = self.out(attention(q, k, v, self.attention_backend).flatten(2))
        return attended


class DiTBlock(nn.Module):
    """Attention, then MLP; each shifted and scaled before, gated after. The unit that is compiled and sharded."""

    def __init__(self, width: int, num_heads: int, mlp_ratio: float, qk_norm: bool) -> None:
        super().__init__()
        hidden = int(width * mlp_ratio)
        self.modulation = nn.Linear(width, 6 * width)
        self.attention = SelfAttention(width, num_heads, qk_norm)
        # The exact GELU: on CPUs oneDNN makes it far faster than the tanh approximation, which differs by < 5e-4.
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def initialise(self) -> None:
        """The block starts as the identity."""
        nn.init.zeros_(self.modulation.weight)

    def forward(self, x: Float[Tensor, "b n d"], conditioning: Float[Tensor, "b d"]) -> Float[Tensor, "b n d"]:
        """``conditioning`` is what time and condition became, after the SiLU that all blocks share."""
        modulation = self.modulation(conditioning)[:, None].chunk(6, dim=-1)
        attention_shift, attention_scale, attention_gate, mlp_shift, mlp_scale, mlp_gate = modulation
        x = torch.addcmul(x, attention_gate, self.attention(modulate(x, attention_shift, attention_scale)))
        return torch.addcmul(x, mlp_gate, self.mlp(modulate(x, mlp_shift, mlp_scale)))


class FinalLayer(nn.Module):
    """A modulated LayerNorm and the linear output; everything starts at zero."""

    def __init__(self, width: int, out_features: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, out_features)

    def initialise(self) -> None:
        """The network starts with output 0."""
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Float[Tensor, "b n d"], conditioning: Float[Tensor, "b d"]) -> Float[Tensor, "b n out"]:
        """``out_features`` numbers a token."""
        shift, scale = self.modulation(conditioning)[:, None].chunk(2, dim=-1)
        out: Tensor = self.out(modulate(x, shift, scale))
        return out
