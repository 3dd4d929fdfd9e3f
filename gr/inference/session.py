"""One user's history, read once and held: several questions, and events as they happen.

session = rec.session(history)
session.retrieve(10); session.rank(candidates)      no second reading
session.append([event, …]); session.recommend(10)   reads the new events only
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gr.data.schema import Event
from gr.inference.beam_options import BeamOptions
from gr.inference.branches import Prefix
from gr.inference.constraint import RowFilter
from gr.inference.histories import EncodedRow, History, Report, as_events
from gr.inference.scored import Scored
from gr.inference.serving import AllowedToOne, Items, ServedCatalog, Wanted

if TYPE_CHECKING:
    from gr.inference.recommender import Recommender

# Keys nobody sees any more are cleared away once they are this share of those that are seen.
STALE = 0.25
# The place of the only request in its call.
FIRST = np.zeros(1, dtype=np.int64)


class Session:
    """A history and the keys and values that the model made of it.

    Every answer is the one that the recommender gives to the whole history. What the model has read
    is used again as far as it is the beginning of what it should read now; where it is not (the
    history outgrew ``max_events``, so that its oldest events fall out), it is read anew. A session
    belongs to one thread at a time.

    Args:
        recommender: answers from its own catalogue, also after it was swapped.
        history: as in ``Recommender.retrieve``.
        request_time: seconds at which the user asks; None is the time of the last event.

    Attributes:
        last_report: what the last call skipped.

    Raises:
        ValueError: as for histories in ``Recommender.retrieve``.
    """

    def __init__(
        self, recommender: Recommender, history: History = (), request_time: int | None = None
    ) -> None:
        self._recommender = recommender
        self._events: list[Event] = []
        self._served: ServedCatalog | None = None
        self._row: EncodedRow | None = None
        self._prefix: Prefix | None = None
        self.request_time: int | None = None
        self.last_report = Report()
        self.append(history, request_time)

    @property
    def history(self) -> list[Event]:
        """The events held, oldest first."""
        return list(self._events)

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values held."""
        return self._prefix.num_bytes if self._prefix is not None else 0

    def append(self, events: History, request_time: int | None = None) -> None:
        """Add events to the end of the history; the model reads no others.

        Args:
            events: later than those held; none is allowed.
            request_time: seconds at which the user asks next; None is the time of the last event.

        Raises:
            ValueError: as for histories in ``Recommender.retrieve``; the session then stays as it
                was.
        """
        self._read(self._recommender.served, [*self._events, *as_events(events)], request_time)

    # ---- questions, as those of the recommender about one history ----------------------------

    def retrieve(
        self,
        k: int = 10,
        num_beams: int | None = None,
        exclude_seen: bool = True,
        allowed: AllowedToOne = None,
        options: BeamOptions | None = None,
    ) -> list[Scored]:
        """See `Recommender.retrieve`."""
        served, prefix = self._current()
        keep = self._filter(served, allowed, exclude_seen)
        return self._done(served.retrieve(prefix, keep, k, num_beams, options, FIRST)[0])

    def rank(self, candidates: Items, action: Wanted = None, microbatch: int = 64) -> list[Scored]:
        """See `Recommender.rank`."""
        served, prefix = self._current()
        weights = served.weights(action, self._recommender.default_action)
        rows = served.candidates([candidates], 1, self.last_report)
        return self._done(served.rank(prefix, rows, weights, microbatch)[0])

    def recommend(
        self,
        k: int = 10,
        action: Wanted = None,
        action_weight: float = 1.0,
        exclude_seen: bool = True,
        allowed: AllowedToOne = None,
    ) -> list[Scored]:
        """See `Recommender.recommend`."""
        served, prefix = self._current()
        weights = served.event_weights(action, self._recommender.default_action)
        keep = self._filter(served, allowed, exclude_seen)
        return self._done(served.recommend(prefix, keep, k, weights, action_weight)[0])

    def score_catalog(self, chunk: int = 256) -> Tensor:
        """See `Recommender.score_catalog`; float32 [n]."""
        served, prefix = self._current()
        return served.score_catalog(prefix, chunk)[0].cpu()

    # ---- shared steps ------------------------------------------------------------------------

    def _current(self) -> tuple[ServedCatalog, Prefix]:
        served = self._recommender.served
        if served is not self._served:
            self._read(served, self._events, self.request_time)
        self.last_report = Report()
        assert self._prefix is not None
        return served, self._prefix

    def _filter(
        self, served: ServedCatalog, allowed: AllowedToOne, exclude_seen: bool
    ) -> RowFilter:
        assert self._row is not None
        permitted = served.allowed(None if allowed is None else [allowed], 1, self.last_report)
        return served.filter([self._row.seen], permitted, exclude_seen)

    def _done(self, answer: list[Scored]) -> list[Scored]:
        self.last_report.warn()
        return answer

    def _read(self, served: ServedCatalog, events: list[Event], request_time: int | None) -> None:
        report = Report()
        row = served.encoder.encode([events], [request_time], report)[0]
        self._prefix = self._extended(row) or served.encoder.prefill([row])
        self._served, self._row, self._events = served, row, events
        self.request_time, self.last_report = request_time, report
        report.warn()

    def _extended(self, row: EncodedRow) -> Prefix | None:
        """What is held, up to the end of ``row``; None if that does not begin with it."""
        held, prefix = self._row, self._prefix
        if held is None or prefix is None:
            return None
        length = len(held.tokens)
        same = (
            len(row.tokens) >= length
            and (row.tokens[:length] == held.tokens).all()
            and (row.times[:length] == held.times).all()
        )
        if not same:
            return None
        if len(row.tokens) == length and row.request_time == held.request_time:
            return prefix
        longer = prefix.extend(
            torch.from_numpy(row.tokens[length:])[None],
            torch.tensor([len(row.tokens) - length]),
            torch.from_numpy(row.times[length:])[None],
            torch.tensor([row.request_time]),
        )
        stale = longer.num_keys - longer.longest
        return longer.compact() if stale > STALE * longer.longest else longer
