"""The one schema of the library: an event, and a table of events with its metadata.

events table columns (in this order; the last two are optional)
    user_id    string
    item_id    string
    timestamp  int64, unix seconds   OR   order  int64, any increasing number
    action     string, never null ("interact" where the source names none)
    value      float64
    scenario   string
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from gr.data.errors import DataError

DEFAULT_ACTION = "interact"
TIME_COLUMNS = ("timestamp", "order")
ID_COLUMNS = ("user_id", "item_id")
OPTIONAL_COLUMNS = ("action", "value", "scenario")
EVENT_COLUMNS = (*ID_COLUMNS, *TIME_COLUMNS, *OPTIONAL_COLUMNS)


@dataclass(frozen=True)
class Event:
    """One thing a user did: `timestamp` is int64 unix seconds, `None` where unknown."""

    item_id: str
    action: str | None = None
    timestamp: int | None = None


@dataclass
class Interactions:
    """Events of many users, as read from one source.

    `items` has `item_id`, `title` and any other string columns; `users` has `user_id` and any
    other string columns. `repairs` counts what a reader or a filter changed, by name.
    `relative_time` says that `timestamp` counts seconds since the user's own first event, so that
    differences mean something and calendar dates do not.
    """

    name: str
    events: pa.Table
    items: pa.Table | None = None
    users: pa.Table | None = None
    repairs: dict[str, int] = field(default_factory=dict)
    relative_time: bool = False

    @property
    def time_column(self) -> str:
        """`"timestamp"` (seconds) or `"order"`; `DataError` where the table has neither."""
        for column in TIME_COLUMNS:
            if column in self.events.column_names:
                return column
        raise DataError(
            f"{self.name}: events have no time: wanted a column 'timestamp' or 'order', "
            f"seen {self.events.column_names}"
        )

    @property
    def num_events(self) -> int:
        return int(self.events.num_rows)

    @property
    def num_users(self) -> int:
        return int(pc.count_distinct(self.events["user_id"]).as_py())

    @property
    def num_items(self) -> int:
        """Items that occur in events; `items` may describe more."""
        return int(pc.count_distinct(self.events["item_id"]).as_py())

    def validate(self, now: float | None = None) -> None:
        """Raise `DataError` unless the tables keep the schema at the top of this file.

        `now` is the unix time after which a timestamp lies in the future (default: the clock).
        """
        from gr.data.checks import validate_interactions  # checks builds on this module

        validate_interactions(self, now=now)

    def summary(self) -> dict[str, object]:
        """Counts for a table on the screen: users, items, events, time range, actions, repairs."""
        limits = pc.min_max(self.events[self.time_column])
        actions = pc.value_counts(self.events["action"].combine_chunks())
        return {
            "name": self.name,
            "users": self.num_users,
            "items": self.num_items,
            "events": self.num_events,
            "time": self.time_column,
            "first": limits["min"].as_py(),
            "last": limits["max"].as_py(),
            "actions": {row["values"]: row["counts"] for row in actions.to_pylist()},
            "repairs": dict(self.repairs),
        }

    def repair_report(self) -> str:
        """One line per repair, or a line that says there was none."""
        if not self.repairs:
            return f"{self.name}: nothing repaired"
        return "\n".join(f"{self.name}: {what}: {count:,}" for what, count in self.repairs.items())
