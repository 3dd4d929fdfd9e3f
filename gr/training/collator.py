"""Windows to padded batches of token streams.

Legend: B windows of a batch, N tokens of the longest of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gr.tokenizer import SemanticIdTokenizer
from gr.training.events import EventArrays, IntArray, Windows, draw_ties

IGNORED = -100


class StreamCollator:
    """Builds ``input_ids, attention_mask, timestamps, labels``, all int64 [B, N], padded right.

    Every token after BOS is a label except special tokens, the events before a window's first
    target, and semantic IDs of events that are no retrieval targets. Labels are aligned with
    ``input_ids``; the model shifts them. ``timestamps`` is left out where the data has no clock.

    A bare window reads as a history of item ids alone does when it is served: [UNK] for every
    action, and time 0 for every event. What the actions were stays its label, so that candidates
    are ranked after such a history too.

    The request time of a window's last token never matters here: what it predicts lies outside.

    Args:
        events: what the windows point into.
        tokenizer: spells events as tokens; its catalogue is the one ``events`` was looked up in.
    """

    def __init__(self, events: EventArrays, tokenizer: SemanticIdTokenizer) -> None:
        self.events = events
        self.encoder = tokenizer.encoder
        vocabulary = tokenizer.vocabulary
        self.first_sid = vocabulary.base + len(vocabulary.specials)
        self.first_action = vocabulary.first_action
        self.pad = vocabulary.special_token("[PAD]")
        self.unknown = vocabulary.special_token("[UNK]")
        levels = (self.encoder.item_tokens >= 0).sum(axis=1)
        self._tokens: IntArray = levels[events.item] + (1 if vocabulary.actions else 0)

    def lengths(self, windows: Windows) -> IntArray:
        """Tokens of every window, BOS included: int64 [n]."""
        position, count = windows.positions()
        tokens = np.append(0, np.cumsum(self._tokens[position]))
        ends = np.cumsum(count)
        length: IntArray = 1 + tokens[ends] - tokens[ends - count]
        return length

    def __call__(self, windows: Windows) -> dict[str, Tensor]:
        """One padded batch."""
        events = self.events
        source, count = windows.positions()
        offsets = np.append(0, np.cumsum(count))
        if windows.tie_draw is not None and events.timestamp is not None:
            window = np.repeat(np.arange(len(count)), count)
            source = draw_ties(source, window, events.timestamp[source], windows.tie_draw)
        bare = np.repeat(windows.bare, count)
        action = events.action[source]
        times = None if events.timestamp is None else np.where(bare, 0, events.timestamp[source])
        streams = self.encoder.encode_batch(events.item[source], action, times, offsets)

        ids = streams.input_ids
        event = np.maximum(streams.event, 0)
        is_target = (source >= np.repeat(windows.first_target, count))[event]
        is_target &= (streams.event >= 0) & (ids >= self.first_sid)
        is_target &= (ids >= self.first_action) | events.is_target[source][event]
        labels = np.where(is_target, ids, IGNORED)
        hidden = bare[event] & (ids >= self.first_action)
        ids = np.where(hidden, self.unknown, ids)

        length = np.diff(streams.offsets)
        row = np.repeat(np.arange(len(length)), length)
        column = np.arange(len(ids)) - np.repeat(streams.offsets[:-1], length)
        shape = (len(length), int(length.max()))

        def padded(values: IntArray, fill: int) -> Tensor:
            out = np.full(shape, fill, dtype=np.int64)
            out[row, column] = values
            return torch.from_numpy(out)

        batch = {
            "input_ids": padded(ids, self.pad),
            "attention_mask": padded(np.ones_like(ids), 0),
            "labels": padded(labels, IGNORED),
        }
        if times is not None:
            batch["timestamps"] = padded(streams.timestamps, 0)
        return batch
