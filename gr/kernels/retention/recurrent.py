"""One token at a time, for serving: the state is all that is kept of what came before.

Legend: B batch, H heads, d, e head sizes of keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor


def retention_step(
    q_BHd: Tensor,
    k_BHd: Tensor,
    v_BHe: Tensor,
    log_decay: Tensor,
    state_BHde: Tensor,
    valid_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S ← g S + k vᵀ, then o = qᵀ S: one token of ``gr.kernels.retention.retention``.

    Args:
        log_decay: ln g, [H] or [B, H], finite and at most 0.
        state_BHde: what ``retention`` or the step before returned; zeros at the start.
        valid_B: bool, False for rows without a token: their state stays as it is.

    Returns:
        The output [B, H, e] in the dtype of the values, and the state after the token, in the dtype
        of ``state_BHde``.

    Raises:
        ValueError: shapes do not agree.
    """
    batch, heads, size = q_BHd.shape
    wanted = (batch, heads, size, v_BHe.shape[-1])
    if state_BHde.shape != wanted or k_BHd.shape != q_BHd.shape or v_BHe.shape[:2] != wanted[:2]:
        raise ValueError(
            f"q_BHd, k_BHd, v_BHe, state_BHde: shapes {tuple(q_BHd.shape)}, {tuple(k_BHd.shape)}, "
            f"{tuple(v_BHe.shape)}, {tuple(state_BHde.shape)}; wanted [B, H, d], [B, H, d], "
            "[B, H, e] and [B, H, d, e]"
        )
    if log_decay.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"log_decay: shape {tuple(log_decay.shape)}, wanted ({heads},) or ({batch}, {heads})"
        )
    dtype = state_BHde.dtype
    gate = log_decay.to(dtype).exp()[..., None, None]
    after = gate * state_BHde + k_BHd.to(dtype)[..., :, None] * v_BHe.to(dtype)[..., None, :]
    if valid_B is not None:
        after = torch.where(valid_B[:, None, None, None], after, state_BHde)
    out_BHe = (q_BHd.to(dtype)[..., None, :] @ after).squeeze(-2)
    return out_BHe.to(v_BHe.dtype), after
