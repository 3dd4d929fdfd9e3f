"""CPU path: tiles of targets, two matrix products forward and two backward.

The gradient of a loss with upstream gradient g is g (p − onehot): probabilities multiply vectors
that carry g, so nothing of the size of the logits is scaled or written twice. Probabilities up to
``KEEP_BYTES`` stay for the backward pass; larger ones are made again, tile by tile.

Legend: T targets, t a tile of them, D width, C rows that compete: V of the table, or R negatives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits of one tile: about what fits the cache of a core.
TILE_ELEMENTS = 2**19
KEEP_BYTES = 2**26


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        rows: Tensor,
        bias: Tensor | None,
        target_T: Tensor,
        negative: Tensor | None,
        positive_T: Tensor | None,
    ) -> Tensor:
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        size = len(hidden_TD) * (rows.shape[-2] + 1) * hidden_TD.element_size()
        keep = any(ctx.needs_input_grad) and size <= KEEP_BYTES
        loss_T = hidden_TD.new_empty(len(hidden_TD), dtype=wide)
        lse_T = torch.empty_like(loss_T)
        probabilities = []
        arguments = (hidden_TD, rows, bias, target_T, negative, positive_T)
        for tile in _tiles(len(hidden_TD), rows.shape[-2]):
            p, lse, own = _softmax(tile, *arguments)
            lse_T[tile], loss_T[tile] = lse, lse - own
            if keep:
                probabilities.append(p)
        ctx.save_for_backward(*arguments, *probabilities)
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden, rows, bias, target, negative, positive, *probabilities = ctx.saved_tensors
        grad_T = grad_T.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_rows = torch.zeros_like(rows)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=hidden.dtype)
        own_T = torch.empty_like(grad_T)
        for number, tile in enumerate(_tiles(len(hidden), rows.shape[-2])):
            if probabilities:
                p = probabilities[number]
            else:
                p = _softmax(tile, hidden, rows, bias, target, negative, positive)[0]
            if positive is not None:
                own_T[tile], p = p[:, 0], p[:, 1:]
            g = grad_T[tile]
            if rows.dim() == 3:
                pull = p * g[:, None]
                grad_hidden[tile] = (pull[:, None] @ rows[tile])[:, 0]
                grad_rows[tile] = pull[:, :, None] * hidden[tile][:, None]
                if grad_bias is not None:
                    grad_bias[tile] = pull
                continue
            torch.mm(p, rows, out=grad_hidden[tile])
            grad_hidden[tile] *= g[:, None]
            grad_rows.addmm_(p.T, hidden[tile] * g[:, None])
            if grad_bias is not None:
                grad_bias.addmv_(p.T, g)
        grad_positive = None
        if positive is not None:
            grad_positive = (grad_T * (own_T - 1)).to(positive.dtype)
        else:
            grad_hidden.addcmul_(rows[target], grad_T[:, None], value=-1)
            grad_rows.index_add_(0, target, hidden * grad_T[:, None], alpha=-1)
            if grad_bias is not None:
                grad_bias.index_add_(0, target, grad_T, alpha=-1)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_rows, grad_bias, None, None, grad_positive


def _tiles(targets: int, competing: int) -> list[slice]:
    size = max(TILE_ELEMENTS // max(competing, 1), 16)
    return [slice(at, min(at + size, targets)) for at in range(0, targets, size)]


def _softmax(
    tile: slice,
    hidden_TD: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    target_T: Tensor,
    negative: Tensor | None,
    positive_T: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [t, C] (the positive's first where there are negatives), lse [t], own [t]."""
    hidden, target = hidden_TD[tile], target_T[tile]
    if positive_T is None:
        score = hidden @ rows.T
        if bias is not None:
            score += bias
        own = score.gather(1, target[:, None])[:, 0]
    else:
        assert negative is not None
        per_target = negative.dim() == 2
        score = hidden.new_empty(len(hidden), rows.shape[-2] + 1)
        others = score[:, 1:]
        if per_target:
            others.copy_((rows[tile] @ hidden[:, :, None])[..., 0])
        else:
            torch.mm(hidden, rows.T, out=others)
        if bias is not None:
            others += bias[tile] if per_target else bias
        others.masked_fill_(
            (negative[tile] if per_target else negative) == target[:, None], -torch.inf
        )
        own = score[:, 0] = positive_T[tile]
    highest = score.amax(1)
    p = score.softmax(1)
    # The largest probability is at least 1 / C, so its logarithm loses nothing.
    lse = highest - p.amax(1).log()
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return p, lse.to(wide), own.to(wide)


def tiled_losses(
    hidden_TD: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    target_T: Tensor,
    negative: Tensor | None,
    positive_T: Tensor | None,
    smooth: float,
) -> Tensor:
    """See ``reference.reference_losses``."""
    loss_T: Tensor = _Losses.apply(hidden_TD, rows, bias, target_T, negative, positive_T)
    return loss_T if smooth == 0 else loss_T + smoothing(hidden_TD, rows, bias, target_T, smooth)


def smoothing(
    hidden_TD: Tensor, rows_VD: Tensor, bias_V: Tensor | None, target_T: Tensor, smooth: float
) -> Tensor:
    """What smoothing adds to the loss: ε (s(t, y_t) − mean_r s(t, r)), a mean of scores being the
    score of the mean row."""
    less_TD = rows_VD[target_T] - rows_VD.mean(0)
    difference_T = (hidden_TD * less_TD).sum(1)
    if bias_V is not None:
        difference_T = difference_T + bias_V[target_T] - bias_V.mean()
    return smooth * difference_T
