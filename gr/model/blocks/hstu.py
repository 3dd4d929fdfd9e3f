"""HSTU: pointwise aggregated attention with a gate instead of a feed-forward layer.

    u, v, q, k = split(SiLU(W LayerNorm(x)))
    A = SiLU(α q kᵀ + w_pos[i − j] + w_time[bucket(t_{i+1} − t_j)]) / n, masked to 0
    y = x + W_o dropout(u ⊙ LayerNorm(A v))

Source: HSTU §3 (formulas 1-3) and its public code, which differs between its two uses. The defaults
are the retrieval form: no affine norms, no projection bias, α = 1. ``HSTUOptions.ranking`` is the
ranking form: SiLU on u only, affine norms, α = 1/√d, no relative bias, and W_o reads
[u, A v, u ⊙ LayerNorm(A v)]. ``attention="softmax"`` is the paper's ablation: softmax in the place
of SiLU and 1/n.

Deviation: the published position table has 2N − 1 entries, of which causal attention reads N; this
one has those N. n is a constant of the configuration, never the length of the batch.

Legend: B batch, N new tokens, K cached and new tokens, D width, H heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gr.kernels.hstu_attention import Geometry, hstu_attention
from gr.kernels.norm_mul import norm_mul
from gr.model.cache import LayerCache
from gr.model.layout import Layout

if TYPE_CHECKING:
    from gr.model.config import GRConfig


@dataclass(frozen=True)
class HSTUOptions:
    """The differences between the published forms, one flag each.

    Attributes:
        norm_length: the constant n that attention weights are divided by.
        attention: "pointwise", or "softmax" over what a query sees.
        activation: SiLU on all four projections ("uvqk") or on the gate only ("u").
        affine_norm: learnt scale and shift in both LayerNorms.
        scale_scores: α = 1/√d instead of 1.
        bias: relative bias: "none", "position", or "position_time" (time is left out where the
            stream has no timestamps).
        concat_output: the output projection reads [u, A v, u ⊙ LayerNorm(A v)].
        num_time_buckets: largest time bucket.
        norm_eps: epsilon of both LayerNorms.
    """

    norm_length: float = 200.0
    attention: Literal["pointwise", "softmax"] = "pointwise"
    activation: Literal["uvqk", "u"] = "uvqk"
    affine_norm: bool = False
    scale_scores: bool = False
    bias: Literal["none", "position", "position_time"] = "position_time"
    concat_output: bool = False
    num_time_buckets: int = 128
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name, value, wanted in (
            ("attention", self.attention, ("pointwise", "softmax")),
            ("activation", self.activation, ("uvqk", "u")),
            ("bias", self.bias, ("none", "position", "position_time")),
        ):
            if value not in wanted:
                raise ValueError(f"hstu option {name}: {value!r}, wanted one of {wanted}")
        if self.norm_length <= 0:
            raise ValueError(
                f"hstu option norm_length: {self.norm_length}, wanted a positive number"
            )

    @staticmethod
    def ranking(norm_length: float) -> HSTUOptions:
        """The public ranking form ("STU")."""
        return HSTUOptions(
            norm_length=norm_length,
            activation="u",
            affine_norm=True,
            scale_scores=True,
            bias="none",
            concat_output=True,
        )


class HSTUBlock(GradientCheckpointingLayer):
    """See the module's docstring."""

    def __init__(self, config: GRConfig, options: HSTUOptions, layer: int) -> None:
        super().__init__()
        assert config.head_dim
        width, heads, size = config.hidden_size, config.num_attention_heads, config.head_dim
        self.layer, self.num_heads, self.head_dim = layer, heads, size
        self.options, self.dropout = options, config.dropout
        self.max_distance = config.max_position_embeddings
        inner = heads * size
        self.input_norm = nn.LayerNorm(width, options.norm_eps, options.affine_norm)
        self.uvqk_proj = nn.Linear(width, 4 * inner, bias=False)
        self.output_norm = nn.LayerNorm(inner, options.norm_eps, options.affine_norm)
        self.o_proj = nn.Linear(3 * inner if options.concat_output else inner, width)
        self.position_bias = self.time_bias = None
        if options.bias != "none":
            self.position_bias = nn.Parameter(torch.empty(self.max_distance))
        if options.bias == "position_time":
            self.time_bias = nn.Parameter(torch.empty(options.num_time_buckets + 1))

    def _heads(self, x_BNF: Tensor) -> Tensor:
        heads: Tensor = x_BNF.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        return heads

    def forward(self, x_BND: Tensor, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        options = self.options
        projected = self.uvqk_proj(self.input_norm(x_BND))
        if options.activation == "uvqk":
            projected = F.silu(projected)
        u_BNF, v, q, k = projected.chunk(4, dim=-1)
        if options.activation == "u":
            u_BNF = F.silu(u_BNF)
        q_BHNd, k_BHKd, v_BHKd = self._heads(q), self._heads(k), self._heads(v)
        if cache is not None:
            k_BHKd, v_BHKd = cache.update(k_BHKd, v_BHKd)
        attend = self._pointwise if options.attention == "pointwise" else self._softmax
        attended_BNF = attend(q_BHNd, k_BHKd, v_BHKd, layout).transpose(1, 2).flatten(2)
        gated_BNF = norm_mul(
            attended_BNF,
            u_BNF,
            self.output_norm.weight,
            self.output_norm.bias,
            eps=options.norm_eps,
            concat=options.concat_output,
            dropout=self.dropout,
            training=self.training,
        )
        update_BND: Tensor = self.o_proj(gated_BNF)
        return x_BND + update_BND

    def _geometry(self, layout: Layout) -> Geometry:
        return layout.geometry(self.max_distance, self.options.num_time_buckets)

    @property
    def _scale(self) -> float:
        return self.head_dim**-0.5 if self.options.scale_scores else 1.0

    def _pointwise(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return hstu_attention(
            q,
            k,
            v,
            self._geometry(layout),
            self.position_bias,
            None if layout.time_BK is None else self.time_bias,
            scale=self._scale,
            norm_length=self.options.norm_length,
        )

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        geometry, bias_B1QK = self._geometry(layout), q.new_zeros(1)
        if self.position_bias is not None:
            bias_B1QK = bias_B1QK + self.position_bias[geometry.distance()][:, None]
        bucket_BQK = geometry.bucket()
        if self.time_bias is not None and bucket_BQK is not None:
            bias_B1QK = bias_B1QK + self.time_bias[bucket_BQK][:, None]
        bias_B1QK = torch.where(layout.mask(), bias_B1QK, -torch.inf).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias_B1QK, scale=self._scale)
