"""Events to token streams, many users at once and without Python per event.

Legend: U users, E events of all users one after another, n catalogue items, M_max levels,
A actions, N tokens of all users one after another.

A native stream is ``[BOS] Φ0 a0 Φ1 a1 …`` where Φ is an item's semantic ID and a the action token.
The rhythm never breaks: [UNK] stands for an action nobody knows. A vocabulary without actions
makes a stream of items only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gr.tokenizer.catalog import Catalog
from gr.tokenizer.vocabulary import IntArray, SidVocabulary


@dataclass(frozen=True)
class TokenStreams:
    """Token streams of U users, concatenated.

    ``input_ids``, ``timestamps`` and ``event`` are int64 [N]; user u owns
    ``offsets[u]:offsets[u + 1]`` (int64 [U + 1]). Every token carries its event's timestamp, and
    BOS that of the user's first kept event (0 when there is none). ``event`` is the position of
    the token's event in the arrays that were encoded, -1 at BOS.
    """

    input_ids: IntArray
    timestamps: IntArray
    offsets: IntArray
    event: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1


class StreamEncoder:
    """Table lookups that turn catalogue rows and action numbers into tokens.

    Args:
        item_tokens: int64 [n, M_max], -1 padded on the right.
        action_tokens: int64 [A]; empty for streams of items only.
        bos: token id that opens every stream, or None for none.
        unknown_action: token id in the place of a missing action, or None to leave it out (text
            models, whose streams have no rhythm to keep).
    """

    def __init__(
        self,
        item_tokens: npt.ArrayLike,
        action_tokens: npt.ArrayLike,
        bos: int | None,
        unknown_action: int | None = None,
    ) -> None:
        self.item_tokens: IntArray = np.asarray(item_tokens, dtype=np.int64)
        self.action_tokens: IntArray = np.asarray(action_tokens, dtype=np.int64)
        self.bos = bos
        self.unknown_action = unknown_action

    @classmethod
    def from_catalog(cls, catalog: Catalog, vocabulary: SidVocabulary) -> StreamEncoder:
        """The encoder of a catalogue's items in a vocabulary's ids.

        Raises:
            ValueError: the vocabulary lacks the catalogue's types or sizes.
        """
        tokens, actions = catalog_tokens(catalog, vocabulary), vocabulary.action_tokens
        if "[BOS]" not in vocabulary.specials:
            return cls(tokens, actions, None)
        bos, unknown = vocabulary.special_token("[BOS]"), vocabulary.special_token("[UNK]")
        return cls(tokens, actions, bos, unknown)

    def encode_batch(
        self,
        item_index: npt.ArrayLike,
        action_index: npt.ArrayLike | None,
        timestamps: npt.ArrayLike | None,
        offsets: npt.ArrayLike,
        max_events: int | None = None,
    ) -> TokenStreams:
        """Encode the events of U users.

        Args:
            item_index: int64 [E] catalogue rows; events of unknown items (-1) are left out.
            action_index: int64 [E] positions among the actions, -1 for none; None: no actions.
            timestamps: int64 [E] seconds (or order); None: zeros.
            offsets: int64 [U + 1], user u's events are ``offsets[u]:offsets[u + 1]``.
            max_events: keep only each user's last that many known events.

        Raises:
            ValueError: arrays of different lengths, offsets that do not cover them, or an index
                outside its table.
        """
        items = np.asarray(item_index, dtype=np.int64)
        bounds = np.asarray(offsets, dtype=np.int64)
        count = len(items)
        actions = _events("action_index", action_index, count, fill=-1)
        times = _events("timestamps", timestamps, count, fill=0)
        if len(bounds) < 1 or bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 0).any():
            raise ValueError(
                f"offsets run {bounds[:1].tolist()} .. {bounds[-1:].tolist()}: wanted a "
                f"non-decreasing list from 0 to the number of events, {count}"
            )
        _check_index("item_index", items, len(self.item_tokens), "items of the catalogue")
        if len(self.action_tokens):
            _check_index("action_index", actions, len(self.action_tokens), "actions")
        if max_events is not None and max_events < 0:
            raise ValueError(f"max_events is {max_events}: wanted a number >= 0, or None for all")

        users = len(bounds) - 1
        event = np.flatnonzero(items >= 0)
        user = np.repeat(np.arange(users, dtype=np.int64), np.diff(bounds))[event]
        if max_events is not None:
            last = np.cumsum(np.bincount(user, minlength=users))
            recent = last[user] - np.arange(len(event)) <= max_events
            event, user = event[recent], user[recent]

        width = self.item_tokens.shape[1]
        rows = np.full((len(event), width + 1), -1, dtype=np.int64)
        rows[:, :width] = self.item_tokens[items[event]]
        if len(self.action_tokens):
            chosen = actions[event]
            missing = -1 if self.unknown_action is None else self.unknown_action
            known = self.action_tokens[np.maximum(chosen, 0)]
            rows[:, width] = np.where(chosen >= 0, known, missing)
        present = rows >= 0
        tokens_of_event = present.sum(axis=1)
        head = 0 if self.bos is None else 1
        lengths = np.bincount(user, weights=tokens_of_event, minlength=users).astype(np.int64)
        out_offsets = np.zeros(users + 1, dtype=np.int64)
        np.cumsum(lengths + head, out=out_offsets[1:])

        token_event = np.repeat(event, tokens_of_event)
        at = np.arange(len(token_event)) + head * (np.repeat(user, tokens_of_event) + 1)
        total = int(out_offsets[-1])
        input_ids = np.zeros(total, dtype=np.int64)
        token_times = np.zeros(total, dtype=np.int64)
        source = np.full(total, -1, dtype=np.int64)
        input_ids[at] = rows[present]
        token_times[at] = times[token_event]
        source[at] = token_event
        if self.bos is not None:
            starts = out_offsets[:-1]
            input_ids[starts] = self.bos
            filled = starts[lengths > 0]
            token_times[filled] = token_times[filled + 1]
        return TokenStreams(input_ids, token_times, out_offsets, source)


def catalog_tokens(catalog: Catalog, vocabulary: SidVocabulary) -> IntArray:
    """Token ids of every catalogue item: int64 [n, M_max], -1 padded on the right.

    Raises:
        ValueError: the vocabulary lacks one of the catalogue's types, or sizes differ.
    """
    for name, sizes in catalog.level_sizes.items():
        known = vocabulary.level_sizes.get(name)
        if known != sizes:
            raise ValueError(
                f"type {name!r} has level sizes {sizes} in the catalogue and {known} in the "
                "vocabulary: they must agree"
            )
    to_vocabulary = np.array([vocabulary.types.index(t) for t in catalog.types], dtype=np.int64)
    return vocabulary.mixed_item_tokens(catalog.codes, to_vocabulary[catalog.type_index])


def _events(name: str, values: npt.ArrayLike | None, count: int, fill: int) -> IntArray:
    if values is None:
        return np.full(count, fill, dtype=np.int64)
    array = np.asarray(values, dtype=np.int64)
    if array.shape != (count,):
        raise ValueError(f"{name} has shape {array.shape}: wanted one per event, ({count},)")
    return array


def _check_index(name: str, index: IntArray, size: int, of: str) -> None:
    if len(index) and (index.max() >= size or index.min() < -1):
        at = int(np.flatnonzero((index >= size) | (index < -1))[0])
        raise ValueError(f"{name}[{at}] is {index[at]}: there are {size} {of} (-1 for none)")
