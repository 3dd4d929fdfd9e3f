"""Who sees whom in a request-centric sample, as a rule of a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SparseMask:
    """Legend: B batch, K keys (context, then candidates), Q queries (the last Q keys).

    - A context query sees itself and the context keys before it that are fewer than ``window``
      places back or among the sinks, the row's first ``num_sink`` tokens.
    - A candidate sees all of the context and itself.
    - Padding is not seen, and a padding query sees nothing. Places are columns of the key axis, so
      padding of the context goes in front of it (behind it if nothing is pruned).

    Attributes:
        window: places that a context query looks back over, its own among them; None for all.
        num_sink: first tokens of a row that stay visible (BOS: 1).
        num_candidates: how many of the last keys are candidates.
        num_queries: only so many of the newest context tokens are queries; None for all.

    Raises:
        ValueError: a window below 1, or a negative number.
    """

    window: int | None = None
    num_sink: int = 0
    num_candidates: int = 0
    num_queries: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: {self.window}, wanted at least 1 place, or None")
        for name in ("num_sink", "num_candidates", "num_queries"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}: {value}, wanted 0 or more")

    def context_queries(self, num_keys: int) -> int:
        """How many of the queries are context, for K keys in all."""
        context = num_keys - self.num_candidates
        return context if self.num_queries is None else min(self.num_queries, context)

    def matrix(self, num_keys: int, valid_BK: Tensor | None, device: torch.device) -> Tensor:
        """The rule written out, bool [B or 1, Q, K]."""
        context = num_keys - self.num_candidates
        key = torch.arange(num_keys, device=device)
        first = context - self.context_queries(num_keys)
        query = key[first:, None]
        seen = key <= query
        if self.window is not None:
            sink_B1K = key < first_token(valid_BK, context, device)[:, None, None] + self.num_sink
            seen = seen & ((query - key < self.window) | sink_B1K)
        else:
            seen = seen[None]
        seen = torch.where(query < context, seen, (key < context) | (key == query))
        if valid_BK is not None:
            seen = seen & valid_BK[:, None, :] & valid_BK[:, first:, None]
        return seen


def first_token(valid_BK: Tensor | None, context: int, device: torch.device) -> Tensor:
    """Where the tokens of each row start in its context, int64 [B]; [1] without padding."""
    if valid_BK is None or not context:
        return torch.zeros(1 if valid_BK is None else len(valid_BK), dtype=torch.int64).to(device)
    return valid_BK[:, :context].to(torch.uint8).argmax(1)
