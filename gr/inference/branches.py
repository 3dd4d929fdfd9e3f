"""The one primitive of inference: nodes appended to a cached prefix.

Everything asked about a user is a set of short branches grown from the same history: partial
semantic IDs (retrieval), candidates (ranking), the whole trie (exact scores). The history is read
once and its keys and values are kept once; a branch node sees the history, its own ancestors and
itself, and nothing else. Re-parenting a beam is a row of the ancestor mask, so no cache is copied
per beam or reordered.

    histories --prefill--> Prefix --branch()--> Branches --append(tokens, parents)--> logits
                              |                                                ^
                              +--branch()--> Branches (any number, from one prefill)

Legend: B users of a batch, P tokens of the longest history (padded on the right), N nodes appended
by one call, A nodes appended so far, K = P + A keys, J queries whose logits are wanted, V
vocabulary.

A row's result does not depend on its batch mates: padding is never visible, the position of a node
is the row's own length plus its depth, and its time is the row's own request time.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from gr.model.hf_cache import cache_kwargs, new_cache
from gr.model.layout import Layout, causal_layout

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


@dataclass(frozen=True)
class Prefix:
    """Histories read once. Nothing that grows from it changes it.

    Attributes:
        backbone: the model that read them.
        cache: keys and values of all P tokens, padding included.
        length_B: int64, tokens of each row.
        time_BP: int64 seconds of each token, or None where the stream has no clock.
        request_time_B: int64 seconds at which the request is made; None with ``time_BP``.
        logits_BV: float32, next-token logits after each row's last token.
    """

    backbone: Backbone
    cache: DynamicCache
    length_B: Tensor
    time_BP: Tensor | None
    request_time_B: Tensor | None
    logits_BV: Tensor
    num_tokens: int
    longest: int

    @property
    def num_rows(self) -> int:
        return len(self.length_B)

    @property
    def device(self) -> torch.device:
        return self.length_B.device

    @property
    def valid_BP(self) -> Tensor:
        return torch.arange(self.num_tokens, device=self.device) < self.length_B[:, None]

    def branch(self) -> Branches:
        """A fresh set of branches; any number may grow from one prefix, also at the same time."""
        return Branches(self)


def prefill(
    backbone: Backbone,
    input_ids_BP: Tensor,
    length_B: Tensor,
    time_BP: Tensor | None = None,
    request_time_B: Tensor | None = None,
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
            request_time_B = time_BP.gather(1, last_B[:, None])[:, 0]
        request_time_B = request_time_B.to(device)
    valid_BP = torch.arange(num_tokens, device=device) < length_B[:, None]
    layout = causal_layout(valid_BP, num_tokens, time_BP, request_time_B)
    cache = new_cache()
    # Logits at the last tokens only: at each of the few distinct lengths, then each row's own.
    ends, at_B = torch.unique(last_B, return_inverse=True)
    logits_BJV = backbone.forward(input_ids_BP, layout, cache, ends)
    logits_BV = logits_BJV[torch.arange(num_rows, device=device), at_B]
    return Prefix(
        backbone, cache, length_B, time_BP, request_time_B, logits_BV, num_tokens, longest
    )


class Branches:
    """Nodes grown from a prefix, numbered in the order in which they were appended."""

    def __init__(self, prefix: Prefix) -> None:
        self.prefix = prefix
        # Growing replaces a layer's tensors and never writes into them, so the layers are shared
        # with the prefix until they grow: no copy, and the prefix stays as it was.
        self.cache = copy.copy(prefix.cache)
        self.cache.layers = [copy.copy(layer) for layer in prefix.cache.layers]
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
        position_BP = torch.arange(prefix.num_tokens, device=prefix.device).expand(num_rows, -1)
        position_BA = prefix.length_B[:, None] + self._depth_BA - 1
        time_BK = query_time_BQ = None
        if prefix.time_BP is not None and prefix.request_time_B is not None:
            asked = prefix.request_time_B[:, None]
            time_BK = torch.cat([prefix.time_BP, asked.expand(-1, total)], dim=1)
            query_time_BQ = asked.expand(-1, num_new)
        return Layout(
            position_BK=torch.cat([position_BP, position_BA], dim=1),
            valid_BK=torch.cat([prefix.valid_BP, prefix.valid_BP.new_ones(num_rows, total)], 1),
            num_queries=num_new,
            time_BK=time_BK,
            query_time_BQ=query_time_BQ,
            branch_BQA=seen_BNA,
        )
