from __future__ import annotations

import datasets
import numpy as np
import pytest

from gr.training import EventArrays, cut_windows
from gr.training.events import draw_ties
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


def test_only_simultaneous_events_change_places() -> None:
    rng = np.random.default_rng(0)
    count = rng.integers(1, 12, 200)
    window = np.repeat(np.arange(200), count)
    position = 7 + np.arange(len(window))
    timestamp = np.sort(rng.integers(0, 5, len(window)) + 10 * window)
    draw = rng.integers(2**64, size=200, dtype=np.uint64)
    drawn = draw_ties(position, window, timestamp, draw)
    # Time goes on as it did, and every time has the events it had.
    assert (timestamp[drawn - 7] == timestamp).all() and (window[drawn - 7] == window).all()
    assert sorted(drawn) == position.tolist()
    assert (drawn != position).mean() > 0.3
    assert (draw_ties(position, window, timestamp, draw) == drawn).all()
    # A window's order is its own affair.
    only = window == 17
    alone = draw_ties(position[only], 0 * window[only], timestamp[only], draw[17:18])
    assert (alone == drawn[only]).all()


def test_every_order_of_ties_is_as_likely() -> None:
    position, window = np.tile(np.arange(3), 6000), np.repeat(np.arange(6000), 3)
    draw = np.random.default_rng(1).integers(2**64, size=6000, dtype=np.uint64)
    drawn = draw_ties(position, window, 0 * window, draw).reshape(-1, 3)
    counts = np.unique(drawn, axis=0, return_counts=True)[1]
    # 6 orders, 1000 expected of each; four standard deviations are 116.
    assert len(counts) == 6 and abs(counts - 1000).max() < 116
