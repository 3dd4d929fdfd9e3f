"""Logits processors that leave rows inside a span alone.

Legend: R rows, N tokens so far, V vocabulary; a span is ``[SID] codes [/SID]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor


class OutsideSpans(LogitsProcessor):
    """Other logits processors, applied to rows outside spans only; others keep their scores.

    `TextTrieLogitsProcessor.generate_options` puts those of transformers in here. Put your own in
    another one before you append it to the list.

    Args:
        open_token_id, close_token_id: the tokens around an item.
        processors: called with all rows; what they see of rows inside a span are zeros.
    """

    def __init__(
        self, open_token_id: int, close_token_id: int, processors: Sequence[LogitsProcessor]
    ) -> None:
        self.open_token_id, self.close_token_id = open_token_id, close_token_id
        self.processors = list(processors)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [R, V] for the token after ``input_ids`` [R, N]."""
        outside_R1 = open_span(input_ids, self.open_token_id, self.close_token_id)[:, None] < 0
        # Zeros, as some warpers refuse the all -inf of a dead beam.
        processed = scores.where(outside_R1, 0.0)
        for processor in self.processors:
            processed = processor(input_ids, processed)
        return torch.where(outside_R1, processed, scores)


class PaddedRepetitionPenalty(LogitsProcessor):
    """The stock penalty without the padding on the left, which would make it depend on the batch.

    Newer releases of transformers leave that out too, by an attention mask.
    """

    def __init__(self, penalty: float, pad_token_id: int | None) -> None:
        self.penalty, self.pad_token_id = RepetitionPenaltyLogitsProcessor(penalty), pad_token_id

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.pad_token_id is not None:
            padding = (input_ids != self.pad_token_id).cumsum(1) == 0
            # Only the set of tokens counts, so the last one can stand in.
            input_ids = torch.where(padding, input_ids[:, -1:], input_ids)
        penalised: Tensor = self.penalty(input_ids, scores)
        return penalised


def open_span(input_ids: Tensor, open_token_id: int, close_token_id: int) -> Tensor:
    """Where the span that each row ends in was opened: int64 [R]; -1 for rows outside spans."""
    # A column in front, so that there is one where there are no tokens yet.
    ids = pad(input_ids, (1, 0), value=-1)
    position = torch.arange(-1, input_ids.shape[1], device=ids.device)
    opened = position.where(ids == open_token_id, -1).amax(1)
    closed = position.where(ids == close_token_id, -1).amax(1)
    return opened.where(opened > closed, -1)
