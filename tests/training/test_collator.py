"""Batches against the tokenizer's own encoding of each window, event by event."""

from __future__ import annotations

import numpy as np
import pytest

from gr.data import Event
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


def test_hidden_actions_are_unknown_tokens_without_labels(world: World) -> None:
    tokenizer, events = world.tokenizer, world.events()
    collator = StreamCollator(events, tokenizer)
    both = cut_windows(events.offsets, 9).take(np.array([0, 0]))
    batch = collator(Windows(both.start, both.stop, both.first_target, np.array([False, True])))
    shown, hidden = batch["input_ids"]
    is_action = shown >= tokenizer.vocabulary.first_action
    assert is_action.any()
    assert (hidden[is_action] == tokenizer.vocabulary.special_token("[UNK]")).all()
    assert (hidden[~is_action] == shown[~is_action]).all()
    assert (batch["labels"][1][is_action] == -100).all()
    assert (batch["labels"][1][~is_action] == batch["labels"][0][~is_action]).all()


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
    batch = StreamCollator(events, world.tokenizer)(cut_windows(events.offsets, 9))
    assert "timestamps" not in batch
