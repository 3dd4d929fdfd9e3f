import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gr.tokenizer import Catalog, SidVocabulary, StreamEncoder, catalog_tokens

CATALOG = Catalog(
    ["a", "b", "c"],
    np.array([[0, 0, -1], [3, 2, -1], [4, 1, 1]], dtype=np.int32),
    {"item": (4, 3), "artist": (5, 2, 2)},
    item_types=["item", "item", "artist"],
)
VOCABULARY = SidVocabulary(CATALOG.level_sizes, ("like", "skip"))

UNKNOWN = VOCABULARY.special_token("[UNK]")
EVENT = st.tuples(st.integers(-1, 2), st.integers(-1, 1), st.integers(0, 10**10))


def literal(
    events: list[tuple[int, int, int]], max_events: int | None, actions: bool
) -> tuple[list[int], list[int]]:
    """One user's stream, spelt out event by event."""
    known = [event for event in events if event[0] >= 0]
    if max_events is not None:
        known = known[max(0, len(known) - max_events) :]
    ids, times = [1], [known[0][2] if known else 0]
    for item, action, time in known:
        tokens = [t for t in catalog_tokens(CATALOG, VOCABULARY)[item].tolist() if t >= 0]
        if actions:
            known_action = action >= 0
            name = VOCABULARY.actions[action]
            tokens.append(VOCABULARY.action_token(name) if known_action else UNKNOWN)
        ids += tokens
        times += [time] * len(tokens)
    return ids, times


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(EVENT, max_size=5), max_size=4),
    st.one_of(st.none(), st.integers(0, 3)),
    st.booleans(),
)
def test_batch_equals_event_by_event(
    users: list[list[tuple[int, int, int]]], max_events: int | None, actions: bool
) -> None:
    vocabulary = VOCABULARY if actions else SidVocabulary(CATALOG.level_sizes)
    encoder = StreamEncoder.from_catalog(CATALOG, vocabulary)
    flat = [event for events in users for event in events]
    offsets = np.cumsum([0, *(len(events) for events in users)])
    columns = np.array(flat, dtype=np.int64).reshape(-1, 3)
    streams = encoder.encode_batch(columns[:, 0], columns[:, 1], columns[:, 2], offsets, max_events)
    assert len(streams) == len(users)
    for user, events in enumerate(users):
        span = slice(streams.offsets[user], streams.offsets[user + 1])
        ids, times = literal(events, max_events, actions)
        assert streams.input_ids[span].tolist() == ids
        assert streams.timestamps[span].tolist() == times
        source = streams.event[span]
        assert source[0] == -1
        assert all(offsets[user] <= e < offsets[user + 1] for e in source[1:])
        assert (np.diff(source[1:]) >= 0).all()


def test_without_bos_for_an_appended_vocabulary() -> None:
    vocabulary = SidVocabulary(CATALOG.level_sizes, base=100)
    encoder = StreamEncoder.from_catalog(CATALOG, vocabulary)
    streams = encoder.encode_batch([1, 0], None, None, [0, 0, 2])
    assert streams.offsets.tolist() == [0, 0, 4]
    assert streams.input_ids.tolist() == vocabulary.item_tokens([[3, 2], [0, 0]]).ravel().tolist()
    assert streams.timestamps.tolist() == [0] * 4


def test_types_may_come_in_another_order_in_the_vocabulary() -> None:
    swapped = SidVocabulary({"artist": (5, 2, 2), "item": (4, 3)})
    tokens = catalog_tokens(CATALOG, swapped)
    names = np.array(swapped.tokens())
    assert names[tokens[2]].tolist() == ["<artist:0:4>", "<artist:1:1>", "<artist:2:1>"]
    assert names[tokens[1, :2]].tolist() == ["<item:0:3>", "<item:1:2>"]


def test_refuses() -> None:
    encoder = StreamEncoder.from_catalog(CATALOG, VOCABULARY)
    with pytest.raises(ValueError, match=r"item_index\[1\] is 3: there are 3 items"):
        encoder.encode_batch([0, 3], None, None, [0, 2])
    with pytest.raises(ValueError, match=r"action_index\[0\] is 2: there are 2 actions"):
        encoder.encode_batch([0], [2], None, [0, 1])
    with pytest.raises(ValueError, match="number of events, 2"):
        encoder.encode_batch([0, 1], None, None, [0, 1])
    with pytest.raises(ValueError, match="timestamps has shape"):
        encoder.encode_batch([0, 1], None, [5], [0, 2])
    with pytest.raises(ValueError, match="max_events is -1"):
        encoder.encode_batch([0, 1], None, None, [0, 2], -1)
    with pytest.raises(ValueError, match=r"type 'item' has level sizes \(4, 3\)"):
        catalog_tokens(CATALOG, SidVocabulary({"item": (4, 4), "artist": (5, 2, 2)}))
