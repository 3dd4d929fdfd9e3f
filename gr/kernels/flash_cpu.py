"""torch's fused attention for CPU tensors, with the log-sum-exp that its public form hides.

    l = ln Σ_j exp(α q k_jᵀ + m_j)        out = Σ_j exp(α q k_jᵀ + m_j − l) v_j

Knowing l, softmaxes over parts of the keys can be merged. The backward takes any l and any output:
given those of a merged softmax, it returns this part's share of its gradients.

Legend: B batch, H heads, Q queries, K keys, d, e head sizes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _same_size(*tensors: Tensor) -> list[Tensor]:
    # The kernel wants keys and values of one size; zeros behind change no product.
    size = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in tensors]


def flash_forward(
    q_BHQd: Tensor, k_BHKd: Tensor, v_BHKe: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Q, e] and log-sum-exp [B, H, Q], float32 (float64 for float64 inputs).

    Args:
        mask: added to the scores, broadcast to [B, H, Q, K], in the dtype of q; −inf hides. A query
            that sees nothing gets 0, and −inf.
    """
    batch, heads, queries, _ = q_BHQd.shape
    wide = torch.float64 if q_BHQd.dtype == torch.float64 else torch.float32
    if not (q_BHQd.numel() and k_BHKd.numel() and v_BHKe.numel()):
        lse = q_BHQd.new_full((batch, heads, queries), -torch.inf, dtype=wide)
        return v_BHKe.new_zeros(batch, heads, queries, v_BHKe.shape[-1]), lse
    q, k, v = _same_size(q_BHQd, k_BHKd, v_BHKe)
    out, lse = _forward(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    if mask is not None:
        seen = (mask > -torch.inf).any(-1)
        lse = torch.where(seen, lse, -torch.inf)
    return out[..., : v_BHKe.shape[-1]], lse


def flash_backward(
    grad_BHQe: Tensor,
    q_BHQd: Tensor,
    k_BHKd: Tensor,
    v_BHKe: Tensor,
    out_BHQe: Tensor,
    lse_BHQ: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. ``lse_BHQ`` must be finite."""
    if not (q_BHQd.numel() and k_BHKd.numel() and v_BHKe.numel()):
        return torch.zeros_like(q_BHQd), torch.zeros_like(k_BHKd), torch.zeros_like(v_BHKe)
    grad, q, k, v, out = _same_size(grad_BHQe, q_BHQd, k_BHKd, v_BHKe, out_BHQe)
    grad_q, grad_k, grad_v = _backward(
        grad, q, k, v, out, lse_BHQ, 0.0, False, attn_mask=mask, scale=scale
    )
    size = q_BHQd.shape[-1]
    return grad_q[..., :size], grad_k[..., :size], grad_v[..., : v_BHKe.shape[-1]]
