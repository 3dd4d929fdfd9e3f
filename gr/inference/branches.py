"""The one primitive of inference: nodes appended to a cached prefix.

Everything asked about a user is a set of short branches grown from the same history: partial
semantic IDs (retrieval), candidates (ranking), the whole trie (exact scores). The history is read
once and its keys and values are kept once; a branch node sees the history, its own ancestors and
itself, and nothing else. Re-parenting a beam is a row of the ancestor mask, so no cache is copied
per beam or reordered.

    histories --prefill--> Prefix --branch()--> Branches --append(tokens, parents)--> logits
                             |  |                                              ^
                             |  +--branch()--> Branches (any number, from one prefill)
                             +--extend(new events)--> Prefix (reads the new events only)

Legend: B users of a batch, P keys of a prefix (tokens of the longest history and padding), M tokens
by which it is extended, N nodes appended by one call, A nodes appended so far, K = P + A keys, J
queries whose logits are wanted, V vocabulary.

A row's result does not depend on its batch mates: padding is never visible, the position of a node
is the row's own length plus its depth, and its time is the row's own request time.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from gr.model.hf_cache import (
    cache_bytes,
    cache_kwargs,
    fork_cache,
    gather_cache,
    new_cache,
    roomy_cache,
)
from gr.model.layout import Layout, causal_layout, next_times

_NO_4D_MASK = ("flash_attention", "flex_attention", "paged")


class Backbone:
    """A decoder as the branches see it: tokens and a `Layout` in, logits out.

    Our own decoder takes the layout itself. Any other Hugging Face decoder gets it as a 4-D mask
    and ``position_ids``; it must take both, and a cache.

    Raises:
        TypeError: the model's forward has no cache, no ``position_ids`` or no ``attention_mask``;
            or the model is an adapter of learnt prompt tokens, which no layer holds.
        ValueError: its attention implementation cannot take a 4-D mask.
    """

    def __init__(self, model: nn.Module) -> None:
        # Adapters (PEFT) hide the forward's arguments behind **kwargs; their layers stay active.
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise TypeError(
                f"{type(model).__name__} puts learnt tokens before the prompt, and branches would "
                "leave them out; wanted an adapter inside the layers, such as LoRA"
            )
        unwrap = getattr(model, "get_base_model", None)
        inner: nn.Module = model if unwrap is None else unwrap()
        self.model = inner
        parameters = inspect.signature(inner.forward).parameters
        self.takes_layout = "layout" in parameters
        self._cache_name = next(iter(cache_kwargs(inner, new_cache())))
        self.config = getattr(inner, "config", None)
        self.max_positions = int(getattr(self.config, "max_position_embeddings", 0) or 0)
        self._window = None if self.takes_layout else getattr(self.config, "sliding_window", None)
        if self.takes_layout:
            return
        for name in ("attention_mask", "position_ids", "logits_to_keep"):
            if name not in parameters:
                raise TypeError(
                    f"{type(inner).__name__}.forward takes no {name!r}; wanted a decoder with "
                    "attention_mask, position_ids, logits_to_keep and a cache"
                )
        kind = str(getattr(self.config, "_attn_implementation", None) or "")
        if kind.startswith(_NO_4D_MASK):
            raise ValueError(
                f"attn_implementation is {kind!r}, which takes no 4-D mask: wanted 'sdpa' or "
                "'eager'"
            )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(
        self, input_ids: Tensor, layout: Layout, cache: DynamicCache, keep: Tensor
    ) -> Tensor:
        """Float32 logits [B, J, V] of the queries ``keep`` (int64 [J]); the cache grows by N."""
        if self.takes_layout:
            arguments: dict[str, Any] = {"layout": layout}
        else:
            arguments = {"position_ids": layout.position_BQ}
            # Histories are padded on the right, so causality alone hides padding from tokens, and
            # the fused causal kernel serves the prefill.
            if layout.branch_BQA is not None:
                arguments["attention_mask"] = self._additive(layout.mask())
        arguments[self._cache_name] = cache
        # Answers asked for in the middle of a training run have no dropout.
        training = [module for module in self.model.modules() if module.training]
        if training:
            self.model.eval()
        try:
            with torch.no_grad():
                output = self.model(
                    input_ids=input_ids, use_cache=True, logits_to_keep=keep, **arguments
                )
        finally:
            for module in training:
                module.training = True
        logits: Tensor = output.logits
        return logits.float()

    def _additive(self, seen_B1QK: Tensor) -> Tensor:
        # Eager attention adds the mask, so it must be a float; every query sees itself, so no row
        # is all minimum.
        dtype = next(self.model.parameters()).dtype
        mask = torch.zeros(seen_B1QK.shape, dtype=dtype, device=seen_B1QK.device)
        return mask.masked_fill_(~seen_B1QK, torch.finfo(dtype).min)

    def check_length(self, longest: int, depth: int) -> None:
        """Refuse rows that the model cannot place.

        Raises:
            ValueError: more positions than the model has, or than its sliding window shows.
        """
        total = longest + depth
        if self.max_positions and total > self.max_positions:
            raise ValueError(
                f"a history of {longest} tokens and {depth} appended need {total} positions: the "
                f"model has {self.max_positions}; shorten the history"
            )
        if self._window and total > self._window:
            raise ValueError(
                f"a history of {longest} tokens and {depth} appended need {total} positions: the "
                f"model's sliding window is {self._window}; shorten the history"
            )


class Claim:
    """The right to write into a room; it ends when nobody holds it any more."""


class Room:
    """The free room behind a prefix's keys: one writer at a time."""

    def __init__(self) -> None:
        self._holder: weakref.ref[Claim] | None = None

    def claim(self) -> Claim | None:
        """The room, or None while someone holds it."""
        if self._holder is not None and self._holder() is not None:
            return None
        claim = Claim()
        self._holder = weakref.ref(claim)
        return claim


@dataclass(frozen=True)
class Prefix:
    """Histories read once. Nothing that grows from it changes it.

    Attributes:
        backbone: the model that read them.
        cache: keys and values of all P keys, padding included.
        position_BP: int64, the place of each key's token in its row's history.
        valid_BP: bool, False for padding.
        length_B: int64, tokens of each row.
        last_token_B: int64, the last token of each row.
        time_BP: int64 seconds of each token, or None where the stream has no clock.
        request_time_B: int64 seconds at which the request is made; None with ``time_BP``.
        logits_BV: float32, next-token logits after each row's last token.
        longest: tokens of the longest row.
    """

    backbone: Backbone
    cache: DynamicCache
    position_BP: Tensor
    valid_BP: Tensor
    length_B: Tensor
    last_token_B: Tensor
    time_BP: Tensor | None
    request_time_B: Tensor | None
    logits_BV: Tensor
    longest: int
    _room: Room = field(default_factory=Room, repr=False, compare=False)
    # Claims on the rooms of the prefixes that this one was extended from: its keys lie there.
    _claims: tuple[Claim, ...] = field(default=(), repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return len(self.length_B)

    @property
    def num_keys(self) -> int:
        return self.valid_BP.shape[1]

    @property
    def device(self) -> torch.device:
        return self.length_B.device

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values, with the room kept for branches."""
        return cache_bytes(self.cache)

    def branch(self) -> Branches:
        """A fresh set of branches; any number may grow from one prefix, also at the same time."""
        return Branches(self)

    def extend(
        self,
        input_ids_BM: Tensor,
        length_B: Tensor,
        time_BM: Tensor | None = None,
        request_time_B: Tensor | None = None,
    ) -> Prefix:
        """The same histories with more tokens, of which only the new ones are read.

        Where the stream has a clock, the last token of a row is read again: what it says depends
        on the time of what follows it, which was the time of the request and is now known. So a
        later ``request_time_B`` with no new token at all costs one token.

        Args:
            input_ids_BM: int64, padded on the right.
            length_B: int64, new tokens of each row; 0 is allowed.
            time_BM: int64 seconds of each new token; wanted exactly where the prefix has times.
            request_time_B: as in ``prefill``.

        Raises:
            ValueError: times given to a prefix without, or the other way round; or rows longer than
                the model's positions.
        """
        if (time_BM is None) != (self.time_BP is None):
            seen = "no" if time_BM is None else "given"
            wanted = "none: the prefix has no clock" if self.time_BP is None else "int64 seconds"
            raise ValueError(f"time_BM is {seen} times: wanted {wanted}")
        device = self.device
        ids, added_B = input_ids_BM.to(device), length_B.to(device)
        start_B, valid_BP, time_BP = self.length_B, self.valid_BP, self.time_BP
        if time_BM is not None and time_BP is not None:
            start_B = self.length_B - 1
            stale_BP = (self.position_BP == start_B[:, None]) & valid_BP
            last_time_B = time_BP.masked_fill(~stale_BP, 0).sum(1)
            valid_BP = valid_BP & ~stale_BP
            ids = torch.cat([self.last_token_B[:, None], ids], dim=1)
            time_BM = torch.cat([last_time_B[:, None], time_BM.to(device)], dim=1)
            added_B = added_B + 1
        width = ids.shape[1]
        column_M = torch.arange(width, device=device)
        fresh_BM = column_M < added_B[:, None]
        length_B = start_B + added_B
        # Padding stays inside the model's positions.
        position_BM = torch.minimum(start_B[:, None] + column_M, length_B[:, None] - 1)
        longest = int(length_B.max())
        self.backbone.check_length(longest, 0)
        query_time_BM = None
        if time_BM is not None and time_BP is not None:
            if request_time_B is None:
                request_time_B = _at(time_BM, added_B - 1)
            request_time_B = request_time_B.to(device)
            query_time_BM = next_times(time_BM, fresh_BM, request_time_B)
            time_BP = torch.cat([time_BP, time_BM], dim=1)
        layout = Layout(
            position_BK=torch.cat([self.position_BP, position_BM], dim=1),
            valid_BK=torch.cat([valid_BP, fresh_BM], dim=1),
            num_queries=width,
            time_BK=time_BP,
            query_time_BQ=query_time_BM,
            branch_BQA=(column_M <= column_M[:, None]).expand(len(ids), -1, -1),
        )
        branches = self.branch()
        last_B = (added_B - 1).clamp_min(0)
        logits_BV = _last_logits(self.backbone, ids, layout, branches.cache, last_B)
        none_B = added_B == 0
        return Prefix(
            backbone=self.backbone,
            cache=branches.cache,
            position_BP=layout.position_BK,
            valid_BP=layout.valid_BK,
            length_B=length_B,
            last_token_B=torch.where(none_B, self.last_token_B, _at(ids, last_B)),
            time_BP=time_BP,
            request_time_B=request_time_B,
            logits_BV=torch.where(none_B[:, None], self.logits_BV, logits_BV),
            longest=longest,
            _claims=self._claims if branches.claim is None else (*self._claims, branches.claim),
        )

    def compact(self) -> Prefix:
        """The same prefix without the keys that nobody sees, padding of unequal rows excepted."""
        count_B = self.valid_BP.sum(1)
        width = int(count_B.max())
        # Valid keys first, in their order.
        order_BP = self.valid_BP.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        order_BP = order_BP[:, :width]
        return replace(
            self,
            cache=gather_cache(self.cache, order_BP),
            position_BP=self.position_BP.gather(1, order_BP),
            valid_BP=self.valid_BP.gather(1, order_BP),
            time_BP=None if self.time_BP is None else self.time_BP.gather(1, order_BP),
            _room=Room(),
            _claims=(),
        )


def prefill(
    backbone: Backbone,
    input_ids_BP: Tensor,
    length_B: Tensor,
    time_BP: Tensor | None = None,
    request_time_B: Tensor | None = None,
    room: int = 0,
) -> Prefix:
    """Read histories, padded on the right, in one pass.

    Args:
        backbone: the model.
        input_ids_BP: int64; anything valid as a token id past a row's length.
        length_B: int64, at least 1.
        time_BP: int64 seconds of each token's event. None: a stream without a clock. Models that
            take no times ignore it.
        request_time_B: int64 seconds at which the next event is asked for; None is the time of the
            row's last token.
        room: nodes for which the cache keeps free room, so that branches of that many nodes grow
            without copying the keys and values of the histories.

    Raises:
        ValueError: an empty row, or rows longer than the model's positions.
    """
    num_rows, num_tokens = input_ids_BP.shape
    lengths = length_B.tolist()
    for row, length in enumerate(lengths):
        if not 1 <= length <= num_tokens:
            raise ValueError(
                f"length_B[{row}] is {length}: wanted 1 to {num_tokens} tokens (an empty history "
                "still has its first token, [BOS] or a prompt)"
            )
    longest = max(lengths)
    backbone.check_length(longest, 0)
    device = backbone.device
    input_ids_BP, length_B = input_ids_BP.to(device), length_B.to(device)
    last_B = length_B - 1
    if time_BP is not None:
        time_BP = time_BP.to(device)
        if request_time_B is None:
            request_time_B = _at(time_BP, last_B)
        request_time_B = request_time_B.to(device)
    column_P = torch.arange(num_tokens, device=device)
    valid_BP = column_P < length_B[:, None]
    layout = causal_layout(valid_BP, num_tokens, time_BP, request_time_B)
    cache = roomy_cache(room)
    logits_BV = _last_logits(backbone, input_ids_BP, layout, cache, last_B)
    return Prefix(
        backbone=backbone,
        cache=cache,
        position_BP=column_P.expand(num_rows, -1),
        valid_BP=valid_BP,
        length_B=length_B,
        last_token_B=_at(input_ids_BP, last_B),
        time_BP=time_BP,
        request_time_B=request_time_B,
        logits_BV=logits_BV,
        longest=longest,
    )


def _last_logits(
    backbone: Backbone, input_ids_BN: Tensor, layout: Layout, cache: DynamicCache, last_B: Tensor
) -> Tensor:
    """Logits [B, V] at one token of each row: at the few distinct places, then each row's own."""
    places, at_B = torch.unique(last_B, return_inverse=True)
    return _at(backbone.forward(input_ids_BN, layout, cache, places), at_B)


def _at(values_BN: Tensor, column_B: Tensor) -> Tensor:
    """One entry of each row."""
    return values_BN[torch.arange(len(values_BN), device=values_BN.device), column_B]


class Branches:
    """Nodes grown from a prefix, numbered in the order in which they were appended."""

    def __init__(self, prefix: Prefix) -> None:
        self.prefix = prefix
        # Keys and values of the prefix are shared and never written to. What is new goes into the
        # free room behind them, unless other branches that are still alive went there first.
        self.claim = prefix._room.claim()
        self.cache = fork_cache(prefix.cache, own_room=self.claim is not None)
        device = prefix.device
        self._seen_BAA = torch.zeros(1, 0, 0, dtype=torch.bool, device=device)
        self._depth_BA = torch.zeros(prefix.num_rows, 0, dtype=torch.int64, device=device)
        self._deepest = 0

    @property
    def num_nodes(self) -> int:
        return self._depth_BA.shape[1]

    def append(
        self,
        token_BN: Tensor,
        parent_BN: Tensor,
        levels: int = 1,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Append N nodes to every row and return the logits after them.

        Args:
            token_BN: int64 token of each node.
            parent_BN: int64 [B, N] (or [1, N]: the same tree for every row); the number of the
                parent node, -1 for the prefix. A parent may be a node of the same call.
            levels: the longest chain of nodes inside this call.
            keep: int64 [J], the nodes (0 .. N - 1 of this call) whose logits are wanted. None: all.

        Returns:
            Float32 logits [B, J, V] of the token after each node.

        Raises:
            ValueError: a branch deeper than the model's positions.
        """
        prefix, backbone = self.prefix, self.prefix.backbone
        backbone.check_length(prefix.longest, self._deepest + levels)
        num_rows, num_new = token_BN.shape
        seen_BNA = self._ancestors(parent_BN, num_new, levels)
        depth_BN = seen_BNA.sum(-1).expand(num_rows, -1)
        self._depth_BA = torch.cat([self._depth_BA, depth_BN], dim=1)
        self._deepest += levels
        layout = self._layout(seen_BNA.expand(num_rows, -1, -1))
        if keep is None:
            keep = torch.arange(num_new, device=prefix.device)
        return backbone.forward(token_BN, layout, self.cache, keep)

    def _ancestors(self, parent_BN: Tensor, num_new: int, levels: int) -> Tensor:
        """Which of all A nodes each new node sees, bool [B or 1, N, A]; kept for its children."""
        before, device = self.num_nodes, parent_BN.device
        total, rows = before + num_new, max(len(parent_BN), len(self._seen_BAA))
        parent_BN = parent_BN.expand(rows, -1)
        # The last column collects what has no ancestor left and is dropped.
        seen = torch.zeros(rows, num_new, total + 1, dtype=torch.bool, device=device)
        node = torch.arange(before, total, device=device).expand(rows, -1)
        for _ in range(levels):
            seen.scatter_(2, torch.where(node < 0, total, node)[..., None], True)
            up = parent_BN.gather(1, (node - before).clamp_min(0))
            node = torch.where(node >= before, up, node)
        seen = seen[..., :total]
        if before:
            old = self._seen_BAA.expand(rows, -1, -1)
            at = node.clamp_min(0)[..., None].expand(-1, -1, before)
            seen[..., :before] |= old.gather(1, at) & (node >= 0)[..., None]
            grown = torch.zeros(rows, total, total, dtype=torch.bool, device=device)
            grown[:, :before, :before] = old
            grown[:, before:] = seen
            self._seen_BAA = grown
        else:
            self._seen_BAA = seen
        return seen

    def _layout(self, seen_BNA: Tensor) -> Layout:
        prefix = self.prefix
        num_rows, num_new, total = seen_BNA.shape
        position_BA = prefix.length_B[:, None] + self._depth_BA - 1
        time_BK = query_time_BQ = None
        if prefix.time_BP is not None and prefix.request_time_B is not None:
            asked = prefix.request_time_B[:, None]
            time_BK = torch.cat([prefix.time_BP, asked.expand(-1, total)], dim=1)
            query_time_BQ = asked.expand(-1, num_new)
        return Layout(
            position_BK=torch.cat([prefix.position_BP, position_BA], dim=1),
            valid_BK=torch.cat([prefix.valid_BP, prefix.valid_BP.new_ones(num_rows, total)], 1),
            num_queries=num_new,
            time_BK=time_BK,
            query_time_BQ=query_time_BQ,
            branch_BQA=seen_BNA,
        )
