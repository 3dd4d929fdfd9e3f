"""From what callers pass (lists of ids or events) to prefilled batches.

Histories are read in batches of similar length. One without timestamps has all its events at time
0 and asks at time 0, so that no time has passed between any two of them: the bare windows of
training (`gr.training.events.Windows`) look the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gr.data.schema import Event
from gr.inference.branches import Backbone, Prefix, prefill
from gr.tokenizer.semantic_id_tokenizer import MAX_SECONDS, SemanticIdTokenizer

IntArray = npt.NDArray[np.int64]
History: TypeAlias = Sequence["Event | str | int"]

UNKNOWN_ACTION = "[UNK]"


def as_events(history: History) -> list[Event]:
    """Events of a history in which some may be given by their item ids alone."""
    return [e if isinstance(e, Event) else Event(str(e)) for e in history]


@dataclass
class Report:
    """What a call did not take as it was given.

    Attributes:
        unknown_items: history number -> item ids that the catalogue does not have; skipped.
        truncated: history number -> oldest events left out because the model cannot hold them.
        unknown_candidates: history number -> candidates that the catalogue does not have; skipped.
        unknown_allowed: ids in ``allowed`` that the catalogue does not have; ignored.
    """

    unknown_items: dict[int, list[str]] = field(default_factory=dict)
    truncated: dict[int, int] = field(default_factory=dict)
    unknown_candidates: dict[int, list[str]] = field(default_factory=dict)
    unknown_allowed: list[str] = field(default_factory=list)

    def warn(self) -> None:
        """One warning for everything skipped by name; truncation is normal and only recorded."""
        parts = []
        for what, by_row in (
            ("histories", self.unknown_items),
            ("candidates", self.unknown_candidates),
        ):
            if by_row:
                row, items = next(iter(by_row.items()))
                count = sum(len(listed) for listed in by_row.values())
                first = f"first: {what}[{row}], {items[0]!r}"
                parts.append(f"{count} unknown items in {what} ({first})")
        if self.unknown_allowed:
            parts.append(
                f"{len(self.unknown_allowed)} unknown items in allowed (first: "
                f"{self.unknown_allowed[0]!r})"
            )
        if parts:
            message = "skipped " + "; ".join(parts) + "; the recommender's last_report has all"
            warnings.warn(message, UserWarning, stacklevel=3)


@dataclass(frozen=True)
class EncodedRow:
    """One history ready for the model; ``seen`` are catalogue rows of all its known items."""

    tokens: IntArray
    times: IntArray
    request_time: int
    seen: IntArray


class HistoryEncoder:
    """Checks and encodes histories for one tokenizer and one backbone.

    Args:
        tokenizer: with a catalogue.
        backbone: whose positions limit the length.
        missing_action: stands in for the action of an event that has none, on a stream with
            actions; "[UNK]" or None writes [UNK] there.
        max_events: the most recent events kept; None keeps what the model's positions hold.

    Raises:
        ValueError: the model has no room for one event and one candidate, or an action or a
            number of events that cannot be.
    """

    def __init__(
        self,
        tokenizer: SemanticIdTokenizer,
        backbone: Backbone,
        missing_action: str | None,
        max_events: int | None,
    ) -> None:
        self.tokenizer, self.backbone = tokenizer, backbone
        vocabulary = tokenizer.vocabulary
        if missing_action == UNKNOWN_ACTION:
            missing_action = None
        elif missing_action is not None and missing_action not in vocabulary.actions:
            raise ValueError(
                f"missing_action is {missing_action!r}: wanted {UNKNOWN_ACTION!r} or one of "
                f"{vocabulary.actions}"
            )
        self.missing_action = missing_action
        if max_events is not None and max_events < 1:
            raise ValueError(f"max_events is {max_events}: wanted at least 1, or None")
        self.max_events = max_events
        if backbone.max_positions:
            per_event = vocabulary.max_levels + bool(vocabulary.actions)
            # One [BOS] and one candidate with all its tokens must fit beside the history.
            room = (backbone.max_positions - 1 - vocabulary.max_levels) // per_event
            if room < 1:
                raise ValueError(
                    f"the model has {backbone.max_positions} positions: one event takes "
                    f"{per_event} and a candidate {vocabulary.max_levels} more"
                )
            self.max_events = room if max_events is None else min(room, max_events)

    def encode(
        self,
        histories: Sequence[History],
        request_times: Sequence[int | None] | None,
        report: Report,
    ) -> list[EncodedRow]:
        """Encode every history; what is skipped goes into the report.

        Raises:
            ValueError: an argument that is a single history, a bad event, or a request that is not
                in seconds or before the history's last event.
        """
        if isinstance(histories, str):
            raise ValueError("histories is one history: wanted a list of histories")
        for number, history in enumerate(histories):
            if history is None or isinstance(history, (str, int, np.integer, Event)):
                raise ValueError(
                    f"histories[{number}] is {history!r}: wanted a list of histories, each a list "
                    "of item ids or events"
                )
        if request_times is not None and len(request_times) != len(histories):
            raise ValueError(
                f"request_times has {len(request_times)} entries: wanted one for each of "
                f"{len(histories)} histories"
            )
        asked = request_times if request_times is not None else [None] * len(histories)
        return [
            self._row(number, history, at, report)
            for number, (history, at) in enumerate(zip(histories, asked, strict=True))
        ]

    def _row(self, number: int, history: History, asked: int | None, report: Report) -> EncodedRow:
        events = as_events(history)
        if self.tokenizer.vocabulary.actions:
            events = [self._with_action(event) for event in events]
        try:
            encoded = self.tokenizer.encode_history(events, max_events=self.max_events)
        except ValueError as error:
            raise ValueError(f"histories[{number}]: {error}") from error
        if encoded.unknown:
            report.unknown_items[number] = list(encoded.unknown)
        known = len(events) - len(encoded.unknown)
        if self.max_events is not None and known > self.max_events:
            report.truncated[number] = known - self.max_events
        catalog = self.tokenizer.catalog
        assert catalog is not None
        seen = catalog.index([event.item_id for event in events])
        tokens, times = encoded.input_ids, encoded.timestamps
        if asked is not None:
            if not abs(asked) <= MAX_SECONDS:
                raise ValueError(
                    f"request_times[{number}] is {asked}: wanted seconds, not milliseconds"
                )
            latest = max((e.timestamp for e in events if e.timestamp is not None), default=None)
            if latest is not None and asked < latest:
                raise ValueError(
                    f"request_times[{number}] is {asked}, before the last event of its history at "
                    f"{latest}: wanted a time that is not earlier"
                )
            if known and latest is None:
                raise ValueError(
                    f"request_times[{number}] is {asked} and histories[{number}] has no "
                    "timestamps: wanted both or neither"
                )
            if not known:
                times = np.full(len(tokens), asked, dtype=np.int64)
        request = int(times[-1]) if asked is None else int(asked)
        return EncodedRow(tokens, times, request, seen[seen >= 0])

    def _with_action(self, event: Event) -> Event:
        if event.action is not None or self.missing_action is None:
            return event
        return replace(event, action=self.missing_action)

    def batches(
        self, rows: Sequence[EncodedRow], batch_size: int, room: int = 0
    ) -> Iterator[tuple[IntArray, Prefix]]:
        """Prefilled batches and the numbers of their rows; similar lengths together.

        Args:
            room: see ``prefill``.
        """
        by_length = sorted(range(len(rows)), key=lambda i: len(rows[i].tokens))
        for start in range(0, len(by_length), batch_size):
            numbers = np.array(by_length[start : start + batch_size], dtype=np.int64)
            yield numbers, self.prefill([rows[i] for i in numbers], room)

    def prefill(self, rows: Sequence[EncodedRow], room: int = 0) -> Prefix:
        """Encoded rows, read as one batch."""
        width = max(len(row.tokens) for row in rows)
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.full((len(rows), width), pad, dtype=torch.int64)
        times = torch.zeros(len(rows), width, dtype=torch.int64)
        for at, row in enumerate(rows):
            ids[at, : len(row.tokens)] = torch.from_numpy(row.tokens)
            times[at, : len(row.tokens)] = torch.from_numpy(row.times)
        lengths = torch.tensor([len(row.tokens) for row in rows])
        asked = torch.tensor([row.request_time for row in rows])
        return prefill(self.backbone, ids, lengths, times, asked, room)
