"""Who may see whom, where and when: the one description every block reads.

Legend: B batch, Q queries (the new tokens), K keys (cached tokens, then the new ones), A appended
branch nodes (the last A keys, the queries among them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from gr.kernels.hstu_attention import Geometry, Visibility, build_geometry

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """Positions, times and visibility of the whole key axis; the queries are its last Q entries.

    Attributes:
        position_BK: int64, position of every key in its own row. Padding has any value.
        valid_BK: bool, False for padding.
        num_queries: Q.
        time_BK: int64 seconds of every key's event, or None where the data has no clock.
        query_time_BQ: int64 seconds at which the token after each query is asked for. HSTU's
            relative time bias is taken from this time (``t_{i+1}``), not from the query's own.
        branch_BQA: bool, which of the last A keys a query sees (its ancestors and itself). Every
            key before those A is shared prefix and visible if valid. None means a plain causal
            stream: a query sees the valid keys before it in the row, and itself.
        window: a query sees only keys fewer than this many positions back; None for all.
        context: the tokens at the first so many positions see each other and are seen by all.

    Source: DESIGN of this project; HSTU appendix H for the candidate mask (M-FALCON).
    """

    position_BK: Tensor
    valid_BK: Tensor
    num_queries: int
    time_BK: Tensor | None = None
    query_time_BQ: Tensor | None = None
    branch_BQA: Tensor | None = None
    window: int | None = None
    context: int = 0
    _derived: dict[object, object] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_keys(self) -> int:
        return self.valid_BK.shape[1]

    @property
    def position_BQ(self) -> Tensor:
        return self.position_BK[:, self.num_keys - self.num_queries :]

    def mask(self) -> Tensor:
        """The literal visibility, bool [B, 1, Q, K], computed once for all layers.

        A padding query sees itself and nothing else. Rows of padding keep one visible key so that a
        softmax over them stays finite; no valid query sees padding, so their values reach nothing.
        """
        return self.visible.mask_BQK[:, None]

    @property
    def visible(self) -> Visibility:
        """The rule of who sees whom, which fused kernels read instead of the matrix."""
        return self._once(
            "visible",
            lambda: Visibility(
                self.valid_BK,
                self.position_BK,
                self.num_queries,
                self.branch_BQA,
                self.window,
                self.context,
            ),
        )

    def geometry(self, max_distance: int, num_time_buckets: int) -> Geometry:
        """Distances and time buckets of HSTU's relative bias, computed once for all layers."""
        return self._once(
            (max_distance, num_time_buckets),
            lambda: build_geometry(
                self.visible,
                self.position_BQ,
                self.position_BK,
                self.query_time_BQ,
                self.time_BK,
                max_distance=max_distance,
                num_buckets=num_time_buckets,
            ),
        )

    def _once(self, key: object, compute: Callable[[], T]) -> T:
        if key not in self._derived:
            self._derived[key] = compute()
        return cast(T, self._derived[key])


def causal_layout(
    attention_mask_BK: Tensor,
    num_queries: int,
    time_BK: Tensor | None = None,
    request_time_B: Tensor | None = None,
) -> Layout:
    """Layout of an ordinary stream, padded on either side.

    Args:
        attention_mask_BK: 1 for tokens, 0 for padding, over cached and new tokens.
        num_queries: how many of the last tokens are new.
        time_BK: int64 seconds of each token's event.
        request_time_B: int64 seconds at which the token after the row's last one is asked for;
            None takes the time of the last token.

    Raises:
        ValueError: shapes do not agree, or times are not int64.
    """
    valid = attention_mask_BK.bool()
    index = torch.arange(valid.shape[1], device=valid.device)
    after = index > torch.where(valid, index, -1).amax(1, keepdim=True)
    # Padding in front gets position 0, as the first token does. Padding behind counts on, so that
    # all rows of a batch padded on the right have the same positions.
    position = ((valid | after).long().cumsum(1) - 1).clamp_min(0)
    if time_BK is None:
        return Layout(position, valid, num_queries)
    if time_BK.dtype != torch.int64:
        raise ValueError(
            f"timestamps: dtype {time_BK.dtype}, wanted torch.int64 (unix seconds; a float32 "
            "cannot tell two minutes apart)"
        )
    if time_BK.shape != valid.shape:
        raise ValueError(
            f"timestamps: shape {tuple(time_BK.shape)}, wanted {tuple(valid.shape)}: one per "
            "cached and new token"
        )
    following = next_times(time_BK, valid, request_time_B)
    return Layout(
        position,
        valid,
        num_queries,
        time_BK,
        following[:, following.shape[1] - num_queries :],
    )


def next_times(time_BK: Tensor, valid_BK: Tensor, request_time_B: Tensor | None) -> Tensor:
    """``t_{i+1}`` of every token, int64 [B, K]; a row's last valid token gets its request time.

    Raises:
        ValueError: ``request_time_B`` is not int64 of shape [B].
    """
    num_rows, num_keys = time_BK.shape
    index = torch.arange(num_keys, device=time_BK.device)
    last_B = torch.where(valid_BK, index, -1).amax(1).clamp_min(0)
    if request_time_B is None:
        request_time_B = time_BK.gather(1, last_B[:, None])[:, 0]
    elif request_time_B.shape != (num_rows,) or request_time_B.dtype != torch.int64:
        raise ValueError(
            f"request_times: {request_time_B.dtype} of shape {tuple(request_time_B.shape)}, "
            f"wanted torch.int64 of shape ({num_rows},)"
        )
    following = torch.cat([time_BK[:, 1:], request_time_B[:, None]], dim=1)
    return torch.where(index[None] >= last_B[:, None], request_time_B[:, None], following)
