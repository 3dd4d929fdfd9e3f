"""Which tiles of the score matrix hold anything, as lists: what is not listed is never computed.

Legend: B batch, Q queries, K keys, S tiles of queries, T tiles of keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gr.kernels.hstu_attention.visibility import Visibility

FAR = 2**62


def needed_tiles(
    visible: Visibility, position_BQ: Tensor, position_BK: Tensor, size: int
) -> Tensor:
    """Bool [B, S, T]: False where no valid query of the tile sees any of its keys.

    Worked out from what each tile spans, so it may keep a tile that turns out to be empty. The cost
    is one entry per tile and, with branches, one pass over their matrix; nothing waits for a GPU.
    """
    num_keys, num_queries, branch = visible.num_keys, visible.num_queries, visible.branch_BQA
    valid_BK = visible.valid_BK
    valid_BQ = valid_BK[:, num_keys - num_queries :]
    filled = _cut(valid_BQ, size, False).any(-1)[:, :, None]
    filled = filled & _cut(valid_BK, size, False).any(-1)[:, None, :]

    first_T = torch.arange(0, num_keys, size, device=valid_BK.device)
    first_S = torch.arange(0, num_queries, size, device=valid_BK.device) + num_keys - num_queries
    diagonal = (first_S[:, None] < first_T + size) & (first_S[:, None] + size > first_T)
    if branch is None:
        prefix = num_keys
        seen = (first_S[:, None] + size > first_T)[None]
    else:
        prefix = num_keys - branch.shape[2]
        seen = (first_T < prefix) | _branch_tiles(branch, prefix, size)
    if visible.window is not None or visible.context:
        nearest_T = _cut(torch.where(valid_BK, position_BK, -FAR), size, -FAR).amax(-1)
        earliest_T = _cut(torch.where(valid_BK, position_BK, FAR), size, FAR).amin(-1)
        if visible.window is not None:
            earliest_S = _cut(torch.where(valid_BQ, position_BQ, FAR), size, FAR).amin(-1)
            # Rows of nothing but padding are not `filled`, so the difference may be anything.
            seen = seen & (earliest_S[:, :, None] - nearest_T[:, None, :] < visible.window)
        if visible.context:
            seen = seen | ((earliest_T < visible.context) & (first_T < prefix))[:, None, :]
    return (seen | diagonal) & filled


def _cut(x_BN: Tensor, size: int, fill: float) -> Tensor:
    """The last axis in runs of ``size``: [B, tiles, size]."""
    padded = F.pad(x_BN, (0, -x_BN.shape[-1] % size), value=fill)
    return padded.reshape(len(x_BN), padded.shape[1] // size, size)


def _branch_tiles(branch_BQA: Tensor, prefix: int, size: int) -> Tensor:
    """Which tiles hold a True of the branch matrix, whose first column is key ``prefix``."""
    queries, nodes = branch_BQA.shape[1:]
    before = prefix % size
    padding = (before, -(before + nodes) % size, 0, -queries % size)
    tiles = F.pad(branch_BQA, padding).unflatten(2, (-1, size)).unflatten(1, (-1, size))
    return F.pad(tiles.any(-1).any(2), (prefix // size, 0))


def listed(needed_BST: Tensor) -> tuple[Tensor, Tensor]:
    """Per tile of queries the needed tiles of keys, ascending, int32 [B, S, T], and their number.

    Entries past the number are the tiles that are not needed.
    """
    # Sorting keeps the strides of what it sorts, and a kernel reads the lists as they lie.
    needed_BST = needed_BST.contiguous()
    order = (~needed_BST).to(torch.uint8).argsort(dim=-1, stable=True)
    return order.to(torch.int32), needed_BST.sum(-1, dtype=torch.int32)
