"""The block of Llama and its kin: pre-RMSNorm, rotary positions, grouped queries, SwiGLU.

    h = x + W_o softmax(rope(q) rope(k)ᵀ / √d) v,   q, k, v = W RMSNorm(x)
    y = h + W_down (SiLU(W_gate RMSNorm(h)) ⊙ W_up RMSNorm(h))

Legend: B batch, N new tokens, K cached and new tokens, D width, H heads, G key/value heads,
d head size. Equal to the stock Llama layer with copied weights; parameter names are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gr.kernels.dropout import fast_dropout
from gr.model.cache import LayerCache
from gr.model.layout import Layout

if TYPE_CHECKING:
    from gr.model.config import GRConfig


@dataclass(frozen=True)
class TransformerOptions:
    """Nothing beyond the sizes of ``GRConfig``."""


class RMSNorm(nn.Module):
    """x / rms(x) · γ, the statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


def rotate(x_BHNd: Tensor, position_BN: Tensor, theta: float) -> Tensor:
    """Rotary position embedding; the two halves of a head form the pairs. Angles in float32."""
    half = x_BHNd.shape[-1] // 2
    exponent = torch.arange(half, device=x_BHNd.device, dtype=torch.float32) / half
    angle_B1Nh = (position_BN[..., None].float() * theta**-exponent)[:, None]
    cos, sin = angle_B1Nh.cos().to(x_BHNd.dtype), angle_B1Nh.sin().to(x_BHNd.dtype)
    first, second = x_BHNd[..., :half], x_BHNd[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class TransformerBlock(GradientCheckpointingLayer):
    """See the module's docstring."""

    def __init__(self, config: GRConfig, options: TransformerOptions, layer: int) -> None:
        super().__init__()
        assert config.head_dim and config.num_key_value_heads and config.intermediate_size
        width, size = config.hidden_size, config.head_dim
        self.layer, self.head_dim, self.theta = layer, size, config.rope_theta
        self.dropout = config.dropout
        kv_size = config.num_key_value_heads * size
        self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.q_proj = nn.Linear(width, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(width, kv_size, bias=False)
        self.v_proj = nn.Linear(width, kv_size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, width, bias=False)
        self.post_attention_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.gate_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)

    def _heads(self, x_BNF: Tensor) -> Tensor:
        heads: Tensor = x_BNF.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads

    def forward(self, x_BND: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        normed = self.input_layernorm(x_BND)
        position = layout.position_BQ
        q_BHNd = rotate(self._heads(self.q_proj(normed)), position, self.theta)
        k_BGKd = rotate(self._heads(self.k_proj(normed)), position, self.theta)
        v_BGKd = self._heads(self.v_proj(normed))
        if cache is not None:
            k_BGKd, v_BGKd = cache.update(k_BGKd, v_BGKd)
        attended = F.scaled_dot_product_attention(
            q_BHNd, k_BGKd, v_BGKd, attn_mask=layout.mask(), enable_gqa=True
        )
        attended = self.o_proj(attended.transpose(1, 2).flatten(2))
        h_BND = x_BND + fast_dropout(attended, self.dropout, self.training)
        normed = self.post_attention_layernorm(h_BND)
        update = self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return h_BND + fast_dropout(update, self.dropout, self.training)
