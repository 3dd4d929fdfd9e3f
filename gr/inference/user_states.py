"""What was read of many users, kept within a number of bytes; the longest unused go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING

from gr.inference.histories import History, as_events
from gr.inference.session import Session

if TYPE_CHECKING:
    from gr.inference.recommender import Recommender


class UserStateStore:
    """Sessions by user, evicted in the order of their last use once they exceed a bound.

    ``session(user, history)`` is all a service needs: it gives the user's session, brought up to
    the history that the service knows, and reads as little as it can for that. A session that is
    evicted stays usable by whoever still has it. The store may be shared by threads; a session
    belongs to one at a time.

    Args:
        recommender: reads and answers.
        max_bytes: of keys and values held. A session that is larger than that by itself is handed
            out and not kept.

    Attributes:
        hits, misses: requests that found their user, and those that read a history anew.
        evictions: sessions dropped for want of room.

    Raises:
        ValueError: ``max_bytes`` below 1.
    """

    def __init__(self, recommender: Recommender, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}: wanted at least 1")
        self.recommender, self.max_bytes = recommender, max_bytes
        self.hits = self.misses = self.evictions = 0
        self._held: OrderedDict[Hashable, tuple[Session, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, user: Hashable) -> bool:
        return user in self._held

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values held."""
        return self._num_bytes

    def session(self, user: Hashable, history: History, request_time: int | None = None) -> Session:
        """The session of a user, with exactly this history.

        A held session whose history is the beginning of ``history`` reads the rest; any other is
        replaced by a new one.

        Raises:
            ValueError: as for histories in ``Recommender.retrieve``; the store then holds what it
                held.
        """
        events = as_events(history)
        held, size = self._take(user)
        try:
            known = [] if held is None else held.history
            if held is not None and events[: len(known)] == known:
                held.append(events[len(known) :], request_time)
                session, found = held, True
            else:
                session, found = Session(self.recommender, events, request_time), False
        except ValueError:
            if held is not None:
                self._keep(user, held, size)
            raise
        self.hits += found
        self.misses += not found
        self._keep(user, session, session.num_bytes)
        return session

    def discard(self, user: Hashable) -> None:
        """Forget a user; one that is not held is no error."""
        self._take(user)

    def clear(self) -> None:
        """Forget everybody."""
        with self._lock:
            self._held.clear()
            self._num_bytes = 0

    def _take(self, user: Hashable) -> tuple[Session | None, int]:
        """A user's session and its bytes, held no more; None and 0 where there is none."""
        with self._lock:
            session, size = self._held.pop(user, (None, 0))
            self._num_bytes -= size
        return session, size

    def _keep(self, user: Hashable, session: Session, size: int) -> None:
        with self._lock:
            # Another thread may have put the same user back in the meantime.
            _, replaced = self._held.pop(user, (None, 0))
            self._held[user] = session, size
            self._num_bytes += size - replaced
            while self._num_bytes > self.max_bytes:
                _, (_, freed) = self._held.popitem(last=False)
                self._num_bytes -= freed
                self.evictions += 1
