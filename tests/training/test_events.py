from __future__ import annotations

import datasets
import numpy as np
import pytest

from gr.training import EventArrays, cut_windows
from tests.training.world import World


def test_lookup_equals_a_loop_over_events(world: World) -> None:
    world.rows[3]["item_id"][0] = "not in the catalogue"
    world.rows[4]["action"][0] = "share"
    found = EventArrays.from_sequences(
        world.sequences, world.catalog, ("like", "dislike"), positive_actions=("like",)
    )
    wanted = [
        (
            int(item[1:]),
            {"like": 0, "dislike": 1}.get(action, -1),
            action == "like",
            time,
        )
        for row in world.rows
        for item, action, time in zip(row["item_id"], row["action"], row["timestamp"], strict=True)
        if item.startswith("i")
    ]
    assert found.timestamp is not None
    seen = zip(
        found.item.tolist(),
        found.action.tolist(),
        found.is_target.tolist(),
        found.timestamp.tolist(),
        strict=True,
    )
    assert list(seen) == wanted
    assert found.unknown == 1
    lengths = [len(row["item_id"]) - (n == 3) for n, row in enumerate(world.rows)]
    assert np.diff(found.offsets).tolist() == lengths


def test_a_selection_of_rows_is_respected(world: World) -> None:
    chosen = world.sequences.select([5, 2])
    found = EventArrays.from_sequences(chosen, world.catalog)
    assert np.diff(found.offsets).tolist() == [len(world.rows[n]["item_id"]) for n in (5, 2)]


def test_order_only_data_has_no_timestamps(world: World) -> None:
    found = EventArrays.from_sequences(world.sequences, world.catalog, has_clock=False)
    assert found.timestamp is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": [3, 2]}, "row 0: timestamps go backwards"),
        ({"action": ["like"]}, "row 0: action has 1 entries and item_id 2"),
        ({"item_id": ["x", "y"]}, "none of the 2 events has an item"),
        ({"action": ["a", "b"]}, "no event has one of the actions"),
        ({"timestamp": [1, None]}, "timestamp has 1 nulls"),
    ],
)
def test_bad_sequences_are_refused(
    world: World, change: dict[str, list[object]], message: str
) -> None:
    row = {"item_id": ["i1", "i2"], "action": ["like", "like"], "timestamp": [1, 2]}
    data = datasets.Dataset.from_list([row | change])
    with pytest.raises(ValueError, match=message):
        EventArrays.from_sequences(data, world.catalog, ("like",))


def test_a_missing_column_and_a_missing_positive_action(world: World) -> None:
    with pytest.raises(ValueError, match="wanted also \\['timestamp'\\]"):
        EventArrays.from_sequences(world.sequences.remove_columns(["timestamp"]), world.catalog, ())
    with pytest.raises(ValueError, match="positive_actions: no event has one of \\('buy',\\)"):
        EventArrays.from_sequences(world.sequences, world.catalog, (), ("buy",))


@pytest.mark.parametrize(("longest", "context"), [(1, 0), (7, 0), (7, 3), (7, 6), (1000, 5)])
@pytest.mark.parametrize("random", [False, True])
def test_every_event_is_a_target_exactly_once(longest: int, context: int, random: bool) -> None:
    lengths = np.array([0, 1, 6, 7, 8, 14, 15, 40, 0, 3])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rng = np.random.default_rng(3) if random else None
    windows = cut_windows(offsets, longest, context, rng)
    targets = [
        event
        for stop, first in zip(windows.stop, windows.first_target, strict=True)
        for event in range(first, stop)
    ]
    assert sorted(targets) == list(range(lengths.sum()))
    assert (windows.stop - windows.start <= longest).all()
    user = np.searchsorted(offsets, windows.start, side="right")
    assert (user == np.searchsorted(offsets, windows.stop - 1, side="right")).all()
    # A window that is no user's first has its whole context, as far as the user has so many.
    begin = offsets[user - 1]
    had = np.minimum(windows.first_target - begin, context)
    assert (windows.first_target - windows.start == had).all()


def test_random_cuts_move_from_epoch_to_epoch() -> None:
    offsets = np.array([0, 100])
    firsts = {
        int(cut_windows(offsets, 10, 0, np.random.default_rng(seed)).stop[0]) for seed in range(60)
    }
    assert firsts == set(range(1, 11))


def test_context_must_leave_room() -> None:
    with pytest.raises(ValueError, match="wanted 0 <= context < max_events"):
        cut_windows(np.array([0, 3]), 5, 5)
