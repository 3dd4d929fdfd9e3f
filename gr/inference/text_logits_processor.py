"""Text in which items are spelt between two tokens, for stock ``generate``.

Legend: R rows (requests times beams), N tokens so far, V vocabulary, C children of the widest node
in question, M tokens of the longest semantic ID, S spans; a span is an item with the two tokens
around it, ``[SID] codes [/SID]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from gr.inference.constraint import RowFilter
from gr.inference.logits_processor import NEUTRAL, TrieMask
from gr.inference.outside_spans import OutsideSpans, PaddedRepetitionPenalty, open_span
from gr.tokenizer.trie import ROOT, ItemTrie

# Those of them that cannot be had outside spans only.
_NOT_IN_TEXT = (
    "guidance_scale",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "watermarking_config",
)


class TextTrieLogitsProcessor(TrieMask):
    """Text in which items are spelt between two tokens: free outside spans, the trie inside.

    After ``open_token_id`` only tokens that continue a permitted semantic ID go through, after a
    whole one only ``close_token_id``. Everywhere else the text is free, but for tokens that belong
    inside. A span is only begun where a permitted item is left and where there are tokens enough to
    end it, so every span of the answer is whole. What counts is the last of the two tokens in a
    row, so the prompt may hold items, and may end inside a span, which is then continued.

    Beams that left the trie for want of items get -inf everywhere, as in `TrieLogitsProcessor`.

    Settings of a ``generation_config`` made for chat would shrink or bend what is permitted inside
    spans. `generate_options` keeps them to the text between spans.

    Args:
        trie: the catalogue.
        prompt_length: tokens of the prompt, padding (on the left) included.
        max_new_tokens: tokens of the answer at most; passed on by `generate_options`.
        open_token_id, close_token_id: the tokens around an item, ``[SID]`` and ``[/SID]``.
        keep: which items may come out, for all requests or for each; None: all. A semantic ID that
            several items share goes through while one of them is permitted.
        no_repeat: leave out semantic IDs of earlier spans of the same answer, with all the items
            that share them. Spans that end in the prompt do not count; ``keep`` is for those.
        inside_only: int64 [...], the tokens forbidden outside spans; None: those of the trie. Pass
            all codes of the vocabulary if the catalogue does not use all of them, or an empty
            tensor to let codes appear outside spans.

    Raises:
        ValueError: tokens around items that are equal, negative or part of items, no new tokens, or
            a filter of another catalogue.
    """

    def __init__(
        self,
        trie: ItemTrie,
        prompt_length: int,
        max_new_tokens: int,
        open_token_id: int,
        close_token_id: int,
        keep: RowFilter | None = None,
        no_repeat: bool = False,
        inside_only: Tensor | None = None,
    ) -> None:
        codes = trie.token[1:].unique().long()
        barred = codes if inside_only is None else inside_only.flatten().to(codes)
        items = torch.cat([codes, barred])
        if items.min() < 0:
            raise ValueError(f"inside_only holds {int(items.min())}: wanted token ids")
        for name, token in {"open": open_token_id, "close": close_token_id}.items():
            if token < 0 or (items == token).any():
                raise ValueError(
                    f"{name}_token_id is {token}: wanted a token id that is part of no item"
                )
        if open_token_id == close_token_id:
            raise ValueError(f"open_token_id and close_token_id are both {open_token_id}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}: wanted at least 1")
        largest = max(int(items.max()), open_token_id, close_token_id)
        super().__init__(trie, prompt_length, keep, largest)
        self.max_new_tokens, self.no_repeat = max_new_tokens, no_repeat
        self.open_token_id, self.close_token_id = open_token_id, close_token_id
        self._inside_only = torch.cat([barred, barred.new_tensor([close_token_id])])

    def generate_options(self, model: PreTrainedModel, **settings: Any) -> dict[str, Any]:
        """Arguments for ``generate`` that keep penalties and warpers out of spans.

        The settings of ``model.generation_config`` (temperature, top_k, top_p, repetition_penalty,
        bad words, ...) are switched off for ``generate`` and applied here, by the same classes of
        transformers in the same order, to rows outside spans. Inside, sampling draws from the
        model's own distribution over permitted tokens. Lengths stay as they are: ``min_new_tokens``
        and its like change only the score of an end token, which spans do not contain.

        Args:
            model: whose ``generate`` will be called.
            settings: changes to its configuration, as for ``generate``; those not moved come back
                unchanged.

        Raises:
            ValueError: a setting that cannot be kept out of spans (guidance, watermarks, forced
                tokens, penalties on the prompt), or one that is not for here.
        """
        taken = {"logits_processor", "max_new_tokens", "max_length", "generation_config"}
        for name in sorted(taken & settings.keys()):
            raise ValueError(
                f"{name} is among the settings: wanted max_new_tokens in the constructor, other "
                "processors appended to the returned list, and other settings one by one"
            )

        def setting(name: str) -> Any:
            # top_k is the one default of ``generate`` that is not neutral.
            unset = 50 if name == "top_k" else None
            value = getattr(model.generation_config, name, None)
            return settings.get(name, unset if value is None else value)

        for name in _NOT_IN_TEXT:
            if setting(name) not in (None, NEUTRAL[name]):
                raise ValueError(
                    f"{name} is {setting(name)}: it would reach into spans; "
                    f"pass {name}={NEUTRAL[name]} to do without"
                )
        penalties, warpers = (
            [OutsideSpans(self.open_token_id, self.close_token_id, found)] if found else []
            for found in self._text_processors(setting)
        )
        return {
            **settings,
            **NEUTRAL,
            # What was built above depends on both, so nobody else may set them.
            "do_sample": bool(setting("do_sample")),
            "num_beams": setting("num_beams") or 1,
            "max_new_tokens": self.max_new_tokens,
            "logits_processor": LogitsProcessorList([*penalties, self, *warpers]),
        }

    def _text_processors(
        self, setting: Callable[[str], Any]
    ) -> tuple[list[LogitsProcessor], list[LogitsProcessor]]:
        """What ``generate`` would build from the settings, in its order: penalties and warpers."""
        device, eos = str(self.trie.device), setting("eos_token_id")
        eos_ids = [] if eos is None else torch.as_tensor(eos).flatten().tolist()
        # As in generate: beams need a token left that goes on when all others end.
        at_least = 1 if (setting("num_beams") or 1) == 1 else max(len(eos_ids), 1) + 1
        penalties: dict[str, Callable[[Any], LogitsProcessor]] = {
            "sequence_bias": SequenceBiasLogitsProcessor,
            "repetition_penalty": lambda by: PaddedRepetitionPenalty(by, setting("pad_token_id")),
            "no_repeat_ngram_size": NoRepeatNGramLogitsProcessor,
            "bad_words_ids": lambda words: NoBadWordsLogitsProcessor(words, eos_ids),
            "suppress_tokens": partial(SuppressTokensLogitsProcessor, device=device),
            "begin_suppress_tokens": partial(
                SuppressTokensAtBeginLogitsProcessor, begin_index=self.prompt_length, device=device
            ),
        }
        warpers: dict[str, Callable[[Any], LogitsProcessor]] = {
            "temperature": TemperatureLogitsWarper,
            "top_h": TopHLogitsWarper,
            "top_k": partial(TopKLogitsWarper, min_tokens_to_keep=at_least),
            "top_p": partial(TopPLogitsWarper, min_tokens_to_keep=at_least),
            "min_p": partial(MinPLogitsWarper, min_tokens_to_keep=at_least),
            "typical_p": partial(TypicalLogitsWarper, min_tokens_to_keep=at_least),
            "epsilon_cutoff": partial(EpsilonLogitsWarper, min_tokens_to_keep=at_least),
            "eta_cutoff": partial(EtaLogitsWarper, min_tokens_to_keep=at_least, device=device),
        }
        if not setting("do_sample"):
            warpers = {}
        warpers["renormalize_logits"] = lambda _: LogitNormalization()

        def built(makers: dict[str, Callable[[Any], LogitsProcessor]]) -> list[LogitsProcessor]:
            values = {name: setting(name) for name in makers}
            on = [name for name in makers if values[name] not in (None, NEUTRAL[name])]
            return [makers[name](values[name]) for name in on]

        return built(penalties), built(warpers)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Masked scores [R, V] for the token after ``input_ids`` [R, N].

        Raises:
            ValueError: a prompt shorter than ``prompt_length``, one whose open span has no
                permitted continuation or no room to end, rows that are no multiple of the filter's
                requests, scores without a column for every token, or more tokens than
                ``max_new_tokens``.
        """
        generated = self._check(input_ids, scores)
        left = self.max_new_tokens - generated
        if left < 1:
            raise ValueError(
                f"{generated} tokens were generated: max_new_tokens is {self.max_new_tokens}"
            )
        opened_R = open_span(input_ids, self.open_token_id, self.close_token_id)
        inside_R = opened_R >= 0
        node_R = self._node(input_ids, opened_R[:, None], input_ids.shape[1])[:, 0]
        spans = self._earlier(input_ids, generated) if self.no_repeat and generated else None
        node_R = node_R.masked_fill(self._left_below(node_R[:, None], spans)[:, 0] == 0, -1)
        if not generated:
            self._check_prompt(opened_R, node_R)

        text = scores.index_fill(1, self._inside_only, -torch.inf)
        root_R1 = torch.full_like(node_R[:, None], ROOT)
        may_open_R = self._left_below(root_R1, spans)[:, 0] > 0
        if left < self.trie.levels + 2:
            may_open_R = torch.zeros_like(may_open_R)
        text[:, self.open_token_id].masked_fill_(~may_open_R, -torch.inf)

        degree_R = self.trie.child_ptr[node_R + 1] - self.trie.child_ptr[node_R.clamp_min(0)]
        width = max(int(degree_R.where(node_R >= 0, 0).max()), 1)
        child_RC, real_RC = self.trie.children(node_R, width)
        left_RC = self._left_below(torch.where(real_RC, child_RC, -1), spans)
        item = self._only(scores, child_RC, left_RC > 0)
        close = self.close_token_id
        item[:, close] = scores[:, close].where(self.trie.is_leaf(node_R), -torch.inf)
        return torch.where(inside_R[:, None], item, text)

    def _node(self, input_ids: Tensor, opened_RS: Tensor, end: Tensor | int) -> Tensor:
        """The node spelt between positions, both exclusive: int64 [R, S]; -1 off the trie."""
        levels = self.trie.levels
        at_RSM = opened_RS[..., None] + 1 + torch.arange(levels, device=input_ids.device)
        token = pad(input_ids, (0, levels), value=-1).gather(1, at_RSM.flatten(1))
        end_RS = torch.as_tensor(end, device=input_ids.device).expand_as(opened_RS)
        spelt = token.view(at_RSM.shape).masked_fill(at_RSM >= end_RS[..., None], -1)
        real = (opened_RS >= 0) & (end_RS - opened_RS - 1 <= levels)
        return self.trie.walk(spelt).masked_fill(~real, -1)

    def _earlier(self, input_ids: Tensor, generated: int) -> tuple[Tensor, Tensor]:
        """Semantic IDs of spans that ended in the answer.

        Returns:
            The first sorted row of each, ascending, int64 [R, S], and how many permitted items are
            behind those before it, [R, S + 1].
        """
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        opened_RN = position.where(input_ids == self.open_token_id, -1).cummax(1).values
        ended_RN = (input_ids == self.close_token_id) & (position >= self.prompt_length)
        # A span takes three tokens at least, and the first may have begun in the prompt. Where
        # there are fewer, an end of -1 leaves nothing in front of it, which is no leaf.
        end_RS = position.where(ended_RN, -1).topk((generated + 2) // 3).values
        leaf_RS = self._node(input_ids, opened_RN.gather(1, end_RS.clamp_min(0)), end_RS)
        leaf_RS = leaf_RS.masked_fill(~self.trie.is_leaf(leaf_RS), -1)
        low_RS = self.trie.rows(leaf_RS)[0].masked_fill(leaf_RS < 0, self.trie.num_items)
        low_RS, order_RS = low_RS.sort(1)
        repeated_RS = pad(low_RS[:, 1:] == low_RS[:, :-1], (1, 0))
        items_RS = self._items_below(leaf_RS.gather(1, order_RS)).masked_fill(repeated_RS, 0)
        return low_RS, pad(items_RS.cumsum(1), (1, 0))

    def _left_below(self, node_RC: Tensor, spans: tuple[Tensor, Tensor] | None) -> Tensor:
        """Permitted items below nodes that no earlier span has named."""
        below_RC = self._items_below(node_RC)
        if spans is None:
            return below_RC
        low_RS, before_RS = spans
        first, last = (torch.searchsorted(low_RS, row) for row in self.trie.rows(node_RC))
        return below_RC - (before_RS.gather(1, last) - before_RS.gather(1, first))

    def _check_prompt(self, opened_R: Tensor, node_R: Tensor) -> None:
        dead = (opened_R >= 0) & (node_R < 0)
        if dead.any():
            row = int(dead.int().argmax())
            raise ValueError(
                f"row {row} of the prompt ends in the span opened at token {int(opened_R[row])}: "
                "wanted the beginning of a permitted item after it"
            )
        need_R = self.trie.levels + 2 - (self.prompt_length - opened_R)
        need_R = need_R.masked_fill(self.trie.is_leaf(node_R), 1)
        short = (opened_R >= 0) & (need_R > self.max_new_tokens)
        if short.any():
            row = int(short.int().argmax())
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens}: row {row} of the prompt ends inside a "
                f"span, wanted the {int(need_R[row])} that it may take to end"
            )
