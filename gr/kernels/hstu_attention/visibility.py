"""Who sees whom, as a rule: kernels evaluate it where they need it, the reference writes it out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """Legend: B batch, Q queries (the last Q keys), K keys, A appended branch nodes (the last A).

    A valid query sees the valid keys among these, and every query sees itself:

    - without branches, the keys up to itself in key order; with them, all keys before the last A,
      and of those what ``branch_BQA`` says;
    - of these, with a window, only keys fewer than ``window`` positions back;
    - with a context, also every key at a position below ``context``, later ones included, unless
      it is one of the last A.

    A padding query sees itself and nothing else, and no other query sees padding.

    Attributes:
        valid_BK: bool, False for padding.
        position_BK: int64 positions; padding has any value.
        num_queries: Q.
        branch_BQA: bool, which of the last A keys a query sees, or None for a plain causal stream.
        window: positions that a query looks back over, itself among them; None for all.
        context: how many of the first positions are visible to the whole row.
    """

    valid_BK: Tensor
    position_BK: Tensor
    num_queries: int
    branch_BQA: Tensor | None = None
    window: int | None = None
    context: int = 0
    _masks: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: {self.window}, wanted at least 1 position, or None")
        if self.context < 0:
            raise ValueError(f"context: {self.context}, wanted 0 or more positions")

    @property
    def num_keys(self) -> int:
        return self.valid_BK.shape[1]

    @property
    def causal(self) -> bool:
        """No query sees a key that comes after it on the key axis."""
        return self.branch_BQA is None and self.context == 0

    @property
    def mask_BQK(self) -> Tensor:
        """The rule as a matrix, bool, computed once."""
        if not self._masks:
            self._masks.append(self._mask())
        return self._masks[0]

    def _mask(self) -> Tensor:
        num_keys, num_queries, branch = self.num_keys, self.num_queries, self.branch_BQA
        key = torch.arange(num_keys, device=self.valid_BK.device)
        query = key[num_keys - num_queries :]
        if branch is None:
            prefix = num_keys
            seen = (key[None, :] <= query[:, None])[None]
        else:
            prefix = num_keys - branch.shape[2]
            shared = branch.new_ones(1, 1, 1).expand(*branch.shape[:2], prefix)
            seen = torch.cat([shared, branch], dim=2)
        if self.window is not None:
            position_BQ = self.position_BK[:, num_keys - num_queries :]
            back = position_BQ[:, :, None] - self.position_BK[:, None, :]
            seen = seen & (back < self.window)
        if self.context:
            seen = seen | ((self.position_BK < self.context) & (key < prefix))[:, None, :]
        valid_BQ = self.valid_BK[:, num_keys - num_queries :]
        seen = seen & self.valid_BK[:, None, :] & valid_BQ[:, :, None]
        return seen | (key[None, :] == query[:, None])
