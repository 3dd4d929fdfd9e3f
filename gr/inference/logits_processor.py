"""The trie as a logits processor for stock ``generate``: what follows the prompt is one item.

Legend: R rows (requests times beams), N tokens so far, V vocabulary, C children of the widest node
in question.

Everything is derived from ``input_ids`` at each call, since beam search reorders rows. Scores are
masked and not renormalised, so beam search, which hands in log-probabilities, sums the same as
without the mask. `gr.inference.text_logits_processor` has items inside text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from gr.inference.constraint import RowFilter
from gr.tokenizer.trie import ItemTrie

# What a generation_config may hold that shrinks the permitted set or bends its scores, and the
# value that switches it off.
NEUTRAL: dict[str, Any] = {
    "sequence_bias": None,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "temperature": 1.0,
    "top_h": None,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "renormalize_logits": False,
    "guidance_scale": 1.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "watermarking_config": None,
}


class TrieMask(LogitsProcessor):
    """The trie, the filter, and the mask of permitted children, for one item or items in text."""

    def __init__(
        self, trie: ItemTrie, prompt_length: int, keep: RowFilter | None, largest_token: int
    ) -> None:
        if keep is not None and keep.num_rows != trie.num_items:
            raise ValueError(
                f"keep is over {keep.num_rows} items: wanted the trie's {trie.num_items}"
            )
        self.trie, self.prompt_length = trie, prompt_length
        self.keep = keep or RowFilter.everything(trie.num_items, trie.device)
        self._largest_token = max(int(trie.token.max()), largest_token)

    def _check(self, input_ids: Tensor, scores: Tensor) -> int:
        """The number of generated tokens, once the inputs fit together."""
        rows, length = input_ids.shape
        if length < self.prompt_length:
            raise ValueError(
                f"input_ids has {length} tokens: prompt_length is {self.prompt_length}"
            )
        num_requests = self.keep.num_requests
        if rows % num_requests:
            raise ValueError(
                f"input_ids has {rows} rows: wanted a multiple of the filter's "
                f"{num_requests} requests"
            )
        if scores.shape[1] <= self._largest_token:
            raise ValueError(
                f"scores have {scores.shape[1]} columns: wanted {self._largest_token + 1} or more, "
                f"since a token of the trie or around items is {self._largest_token}"
            )
        return length - self.prompt_length

    def _items_below(self, node: Tensor) -> Tensor:
        """Permitted items below nodes [R, ...]; 0 for dead ones (-1)."""
        grouped = node.reshape(self.keep.num_requests, -1, *node.shape[1:])
        return self.keep.count(self.trie, grouped).view(node.shape)

    def _only(self, scores: Tensor, child_RC: Tensor, permitted_RC: Tensor) -> Tensor:
        """Scores with -inf everywhere but at the tokens of permitted children."""
        vocabulary = scores.shape[1]
        token_RC = self.trie.token[child_RC].long()
        # One extra column takes what is not permitted.
        open_RV = torch.zeros(
            len(scores), vocabulary + 1, dtype=torch.bool, device=scores.device
        ).scatter_(1, torch.where(permitted_RC, token_RC, vocabulary), True)[:, :vocabulary]
        return torch.where(open_RV, scores, -torch.inf)


class TrieLogitsProcessor(TrieMask):
    """Lets only tokens through that continue a permitted semantic ID; the others become -inf.

    It looks at what was generated after the prompt, for all rows at once. A row outside the trie,
    which beam search keeps when there are more beams than items, gets -inf everywhere: its score
    says that it is dead.

    A ``generation_config`` made for chat shrinks the permitted set after this processor (top_k,
    top_p) or bends its scores before it (repetition_penalty). Pass ``**generate_options()`` to
    ``generate`` to switch all of that off. Whether to sample stays the caller's choice: pass
    ``do_sample`` too, since such a configuration may turn it on.

    Args:
        trie: the catalogue.
        prompt_length: tokens of the prompt, padding included; what follows is the semantic ID.
        eos_token_id: what comes after a whole semantic ID; needed where lengths differ. None:
            generation ends after ``trie.levels`` tokens.
        keep: which items may come out, for all requests or for each; None: all.

    Raises:
        ValueError: a catalogue of mixed lengths without ``eos_token_id``, or a filter of another
            catalogue.
    """

    def __init__(
        self,
        trie: ItemTrie,
        prompt_length: int,
        eos_token_id: int | None = None,
        keep: RowFilter | None = None,
    ) -> None:
        if trie.mixed and eos_token_id is None:
            raise ValueError(
                "eos_token_id is None: semantic IDs of different lengths need a token to end with"
            )
        super().__init__(trie, prompt_length, keep, -1 if eos_token_id is None else eos_token_id)
        self.eos_token_id = eos_token_id

    def generate_options(self) -> dict[str, Any]:
        """Arguments for ``generate``: this processor, the length, and no warpers or penalties."""
        ends = self.eos_token_id is not None
        return {
            **NEUTRAL,
            "logits_processor": LogitsProcessorList([self]),
            "max_new_tokens": self.trie.levels + ends,
            "length_penalty": 0.0,
            "early_stopping": False,
            # These three change only the score of an end token, which here is part of the item.
            "min_length": 0,
            "min_new_tokens": None,
            "exponential_decay_length_penalty": None,
        }

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Masked scores [R, V] for the token after ``input_ids`` [R, N].

        Raises:
            ValueError: a prompt shorter than ``prompt_length``, rows that are no multiple of the
                filter's requests, scores without a column for every item token, or a token wanted
                after whole semantic IDs without an ``eos_token_id``.
        """
        depth = self._check(input_ids, scores)
        generated = input_ids[:, self.prompt_length :]
        if depth < self.trie.levels:
            node_R = self.trie.walk(generated)
            child_RC, real_RC = self.trie.children(node_R, self.trie.level_degree[depth])
            below_RC = self._items_below(torch.where(real_RC, child_RC, -1))
            masked = self._only(scores, child_RC, below_RC > 0)
        else:
            masked = torch.full_like(scores, -torch.inf)
        if self.eos_token_id is None:
            if depth >= self.trie.levels:
                raise ValueError(
                    f"{depth} tokens were generated and semantic IDs have {self.trie.levels}: "
                    "wanted max_new_tokens of that number, or an eos_token_id"
                )
            return masked
        whole_R = self._whole(generated, self.eos_token_id)
        masked[:, self.eos_token_id] = torch.where(
            whole_R, scores[:, self.eos_token_id], masked[:, self.eos_token_id]
        )
        return masked

    def _whole(self, generated: Tensor, eos: int) -> Tensor:
        """Rows that hold one whole semantic ID, and perhaps its end token and padding after it."""
        ended = generated.eq(eos).cumsum(1) > 0
        return self.trie.is_leaf(self.trie.walk(generated.masked_fill(ended, -1)))
