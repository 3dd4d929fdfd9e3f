"""The trie as a logits processor for stock ``generate``.

Legend: R rows (requests times beams), V vocabulary, C children.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from gr.inference.constraint import RowFilter
from gr.tokenizer.trie import ItemTrie


class TrieLogitsProcessor(LogitsProcessor):
    """Lets only tokens through that continue a permitted semantic ID; the others become -inf.

    It looks at what was generated after the prompt, for all rows at once, and keeps no state. It
    masks and does not renormalise, so beam search (which hands it log-probabilities) sums the
    same scores as without it. A row outside the trie, which beam search keeps when there are more
    beams than items, gets -inf everywhere: its score says that it is dead.

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
        ValueError: a catalogue of mixed lengths without ``eos_token_id``.
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
        self.trie, self.prompt_length, self.eos_token_id = trie, prompt_length, eos_token_id
        self.keep = keep or RowFilter.everything(trie.num_items, trie.device)

    def generate_options(self) -> dict[str, Any]:
        """Arguments for ``generate``: this processor, the length, and no warpers or penalties."""
        ends = self.eos_token_id is not None
        return {
            "logits_processor": LogitsProcessorList([self]),
            "max_new_tokens": self.trie.levels + ends,
            "length_penalty": 0.0,
            "early_stopping": False,
            "repetition_penalty": 1.0,
            "no_repeat_ngram_size": 0,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": None,
            "typical_p": 1.0,
            "top_h": None,
            "epsilon_cutoff": 0.0,
            "eta_cutoff": 0.0,
            "encoder_repetition_penalty": 1.0,
            "guidance_scale": None,
            "renormalize_logits": False,
            "sequence_bias": None,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
            "bad_words_ids": None,
            "forced_bos_token_id": None,
            "forced_eos_token_id": None,
        }

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Masked scores [R, V] for the token after ``input_ids`` [R, length].

        Raises:
            ValueError: a prompt shorter than ``prompt_length``, rows that are no multiple of the
                filter's requests, or a token wanted after whole semantic IDs without an
                ``eos_token_id``.
        """
        length = input_ids.shape[1]
        if length < self.prompt_length:
            raise ValueError(
                f"input_ids has {length} tokens: prompt_length is {self.prompt_length}"
            )
        num_requests = self.keep.num_requests
        if len(input_ids) % num_requests:
            raise ValueError(
                f"input_ids has {len(input_ids)} rows: wanted a multiple of the filter's "
                f"{num_requests} requests"
            )
        generated = input_ids[:, self.prompt_length :]
        depth = generated.shape[1]
        masked = torch.full_like(scores, -torch.inf)
        if depth < self.trie.levels:
            node_R = self.trie.walk(generated)
            child_RC, real_RC = self.trie.children(node_R, self.trie.level_degree[depth])
            grouped = torch.where(real_RC, child_RC, -1).view(num_requests, -1, child_RC.shape[1])
            real_RC = real_RC & (self.keep.count(self.trie, grouped) > 0).view(real_RC.shape)
            # One extra column takes what is not real.
            vocabulary = scores.shape[1]
            token_RC = self.trie.token[child_RC].long()
            open_RV = torch.zeros(
                len(scores), vocabulary + 1, dtype=torch.bool, device=scores.device
            ).scatter_(1, torch.where(real_RC, token_RC, vocabulary), True)[:, :vocabulary]
            masked = torch.where(open_RV, scores, masked)
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
