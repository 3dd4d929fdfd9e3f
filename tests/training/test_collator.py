"""Batches against the tokenizer's own encoding of each window, event by event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gr.data import Event
from gr.inference import Backbone
from gr.inference.histories import HistoryEncoder, Report
from gr.tokenizer import SemanticIdTokenizer
from gr.training import EventArrays, StreamCollator, Windows, cut_windows
from tests.training.world import World


def _window_events(world: World, events: EventArrays, start: int, stop: int) -> list[Event]:
    user = int(np.searchsorted(events.offsets, start, side="right")) - 1
    row, base = world.rows[user], int(events.offsets[user])
    return [
        Event(row["item_id"][n], row["action"][n], row["timestamp"][n])
        for n in range(start - base, stop - base)
    ]


@pytest.mark.parametrize("positive", [(), ("like",)])
@pytest.mark.parametrize("with_actions", [True, False])
def test_batches_equal_encoded_windows(
    world: World, positive: tuple[str, ...], with_actions: bool
) -> None:
    actions = ("like", "dislike") if with_actions else ()
    tokenizer = SemanticIdTokenizer.from_catalog(world.catalog, actions)
    events = world.events(positive, actions)
    collator = StreamCollator(events, tokenizer)
    windows = cut_windows(events.offsets, 9, 4)
    batch = collator(windows)
    assert batch["input_ids"].shape[1] == collator.lengths(windows).max()
    for row in range(len(windows)):
        history = _window_events(world, events, windows.start[row], windows.stop[row])
        encoded = tokenizer.encode_history(history)
        size = len(encoded.input_ids)
        assert size == collator.lengths(windows)[row]
        assert batch["input_ids"][row, :size].tolist() == encoded.input_ids.tolist()
        assert batch["timestamps"][row, :size].tolist() == encoded.timestamps.tolist()
        assert batch["attention_mask"][row].tolist() == [1] * size + [0] * (
            batch["input_ids"].shape[1] - size
        )
        labels = [-100]
        context = windows.first_target[row] - windows.start[row]
        for place, event in enumerate(history):
            sid = tokenizer.encode_items([event.item_id])[0].tolist()
            action = [tokenizer.vocabulary.action_token(event.action or "")] if actions else []
            if place < context:
                sid, action = [-100] * len(sid), [-100] * len(action)
            elif positive and event.action not in positive:
                sid = [-100] * len(sid)
            labels += sid + action
        assert batch["labels"][row, :size].tolist() == labels
        assert (batch["labels"][row, size:] == -100).all()
        assert (batch["input_ids"][row, size:] == 0).all()


def _bare(windows: Windows, bare: list[bool]) -> Windows:
    return replace(windows, bare=np.array(bare))


def test_a_bare_window_hides_actions_and_times_and_teaches_both(world: World) -> None:
    tokenizer, events = world.tokenizer, world.events()
    collator = StreamCollator(events, tokenizer)
    both = cut_windows(events.offsets, 9).take(np.array([0, 0]))
    batch = collator(_bare(both, [False, True]))
    shown, hidden = batch["input_ids"]
    is_action = shown >= tokenizer.vocabulary.first_action
    assert is_action.any()
    assert (hidden[is_action] == tokenizer.vocabulary.special_token("[UNK]")).all()
    assert (hidden[~is_action] == shown[~is_action]).all()
    assert (batch["timestamps"][0] >= 10**9).all()
    assert (batch["timestamps"][1] == 0).all()
    assert (batch["labels"][1] == batch["labels"][0]).all()
    assert (batch["labels"][1][is_action] == shown[is_action]).all()
    assert not np.isin(batch["labels"], range(len(tokenizer.vocabulary.specials))).any()


@pytest.mark.parametrize("positive", [(), ("like",)])
def test_bare_windows_are_those_of_events_without_actions_and_times(
    world: World, positive: tuple[str, ...]
) -> None:
    events = world.events(positive)
    blank = replace(
        events, action=np.full_like(events.action, -1), timestamp=np.zeros(len(events), np.int64)
    )
    windows = cut_windows(events.offsets, 9, 4)
    bare = np.arange(len(windows)) % 3 == 0
    batch = StreamCollator(events, world.tokenizer)(replace(windows, bare=bare))
    shown = StreamCollator(events, world.tokenizer)(windows)
    hidden = StreamCollator(blank, world.tokenizer)(windows)
    assert batch.keys() == {"input_ids", "attention_mask", "timestamps", "labels"}
    for name, values in batch.items():
        expected = shown if name == "labels" else hidden
        assert (values[bare] == expected[name][bare]).all(), name
        assert (values[~bare] == shown[name][~bare]).all(), name


def test_a_bare_window_is_what_a_served_history_of_item_ids_reads_as(world: World) -> None:
    events = world.events()
    windows = cut_windows(events.offsets, 9)
    batch = StreamCollator(events, world.tokenizer)(_bare(windows, [True] * len(windows)))
    encoder = HistoryEncoder(world.tokenizer, Backbone(world.model()), "[UNK]", None)
    histories = [
        [event.item_id for event in _window_events(world, events, start, stop)]
        for start, stop in zip(windows.start, windows.stop, strict=True)
    ]
    for row, encoded in enumerate(encoder.encode(histories, None, Report())):
        size = len(encoded.tokens)
        assert batch["attention_mask"][row].sum() == size
        assert batch["input_ids"][row, :size].tolist() == encoded.tokens.tolist()
        assert batch["timestamps"][row, :size].tolist() == encoded.times.tolist()
        assert encoded.request_time == batch["timestamps"][row, size - 1] == 0


def test_unknown_actions_keep_the_stream_rigid(world: World) -> None:
    world.rows[0]["action"] = ["share"] * len(world.rows[0]["action"])
    collator = world.collator()
    window = cut_windows(collator.events.offsets, 9).take(np.array([0]))
    batch = collator(window)
    events = int(window.stop[0] - window.start[0])
    unknown = world.tokenizer.vocabulary.special_token("[UNK]")
    assert batch["input_ids"].shape[1] == 1 + 3 * events == collator.lengths(window)[0]
    assert (batch["input_ids"] == unknown).sum() == events


def test_without_a_clock_there_are_no_timestamps(world: World) -> None:
    events = EventArrays.from_sequences(
        world.sequences, world.catalog, ("like", "dislike"), has_clock=False
    )
    windows = cut_windows(events.offsets, 9)
    collator = StreamCollator(events, world.tokenizer)
    assert "timestamps" not in collator(windows)
    assert "timestamps" not in collator(_bare(windows, [True] * len(windows)))


def test_ties_change_the_order_and_no_target(world: World) -> None:
    """Events of one time trade places whole: item, action and label together."""
    events = world.events()
    events = replace(events, timestamp=10**9 + np.arange(len(events)) // 4)
    collator = StreamCollator(events, world.tokenizer)
    windows = cut_windows(events.offsets, 9, 4)
    draw = np.arange(len(windows), dtype=np.uint64)
    plain, drawn = collator(windows), collator(replace(windows, tie_draw=draw))
    assert (plain["timestamps"] == drawn["timestamps"]).all()
    assert (plain["input_ids"] != drawn["input_ids"]).any()
    for row in range(len(windows)):
        both = []
        for batch in (plain, drawn):
            size = int(batch["attention_mask"][row].sum())
            ids = batch["input_ids"][row, 1:size].view(-1, 3).tolist()
            labels = batch["labels"][row, 1:size].view(-1, 3).tolist()
            both.append(sorted(zip(ids, labels, strict=True)))
        assert both[0] == both[1]
