"""What every question about a user is answered with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scored:
    """An item and its score; which score it is, the method that returns it says."""

    item_id: str
    score: float
