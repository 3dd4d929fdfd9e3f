"""Sessions and their store against the recommender that reads every history from its start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from gr import Event, Recommender
from gr.inference import Session, UserStateStore
from gr.tokenizer import Catalog, ItemTrie

NOW = 1_700_000_000
EVENTS = [
    Event(f"i{item}", action, NOW + 60 * at)
    for at, (item, action) in enumerate(
        [(3, "like"), (7, "skip"), (1, "like"), (12, "dislike"), (3, "skip"), (20, "like")]
    )
]


@pytest.fixture
def make(make_model: Callable[..., Any], make_tokenizer: Callable[..., Any]) -> Any:
    def recommender(kind: str = "hstu", **options: Any) -> Recommender:
        tokenizer = make_tokenizer()
        model = make_model(kind, vocab_size=tokenizer.vocabulary.end)
        return Recommender(model, tokenizer, **options)

    return recommender


def count_tokens(recommender: Recommender) -> list[int]:
    """Tokens of every forward that reads a history or more of one; branches are not counted."""
    read: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        read.append(kwargs["input_ids"].shape[1])

    recommender.model.register_forward_pre_hook(note, with_kwargs=True)
    return read


def same(got: list[Any], expected: list[Any]) -> None:
    """Equal scores in order; items too, where nothing but rounding orders them."""
    assert len(got) == len(expected)
    scores = torch.tensor([[s.score for s in got], [s.score for s in expected]])
    torch.testing.assert_close(scores[0], scores[1], atol=2e-5, rtol=1e-5)
    for one, other in zip(got, expected, strict=True):
        if other.score - expected[-1].score < 1e-4:
            break  # equals of the last one may have been cut off
        ties = {s.item_id for s in expected if abs(s.score - other.score) < 1e-4}
        assert one.item_id in ties


def check(session: Session, recommender: Recommender, request_time: int | None = None) -> None:
    whole = [session.history]
    asked = None if request_time is None else [request_time]
    same(session.retrieve(5), recommender.retrieve(whole, 5, request_times=asked)[0])
    candidates = ["i1", "i9", "i25", "i2"]
    same(session.rank(candidates), recommender.rank(whole, candidates, request_times=asked)[0])
    same(session.recommend(4), recommender.recommend(whole, 4, request_times=asked)[0])
    torch.testing.assert_close(
        session.score_catalog(),
        recommender.score_catalog(whole, asked)[0],
        atol=2e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("kind", ["hstu", "transformer", "llama", "gpt2"])
def test_a_session_answers_as_the_whole_history_does(kind: str, make: Any) -> None:
    recommender = make(kind)
    session = recommender.session(EVENTS[:2])
    check(session, recommender)
    session.append(EVENTS[2:5], NOW + 10**6)
    check(session, recommender, NOW + 10**6)
    session.append([])
    check(session, recommender)
    session.append(EVENTS[5:])
    check(session, recommender)
    assert session.history == EVENTS


@pytest.mark.parametrize("kind", ["hstu", "llama"])
def test_what_was_read_is_not_read_again(kind: str, make: Any) -> None:
    recommender = make(kind)
    session = recommender.session(EVENTS[:4])
    read = count_tokens(recommender)
    session.retrieve(5)
    session.retrieve(3, num_beams=20, allowed=["i2", "i4", "i9"])
    session.rank(["i1", "i2"], action="skip")
    session.recommend(3)
    # Branches only: no forward of a whole history, whose 17 tokens begin with [BOS].
    branches = len(read)
    prefix = session._prefix
    assert prefix is not None and prefix.num_keys == 1 + 4 * 4
    session.append(EVENTS[4:])
    # Two events of four tokens, and the last token again, which now knows what time follows it.
    assert read[branches:] == [1 + 2 * 4]


def test_sessions_of_strangers_and_of_bare_items(make: Any) -> None:
    recommender = make()
    session = recommender.session()
    check(session, recommender)
    session.append(["i3", "i4"])
    check(session, recommender)
    session.append(["i5"])
    check(session, recommender)
    with pytest.raises(ValueError, match="timestamp"):
        session.append(EVENTS[:1])
    assert [e.item_id for e in session.history] == ["i3", "i4", "i5"]
    check(session, recommender)


def test_a_bad_event_changes_nothing(make: Any) -> None:
    recommender = make()
    session = recommender.session(EVENTS[:3])
    before = session.retrieve(5)
    with pytest.raises(ValueError, match="before"):
        session.append([replace(EVENTS[3], timestamp=NOW - 5)])
    with pytest.raises(ValueError, match="action"):
        session.append([replace(EVENTS[3], action="buy")])
    with pytest.raises(ValueError, match="request_times"):
        session.append([], NOW - 10**6)
    assert session.history == EVENTS[:3]
    assert session.retrieve(5) == before


def test_a_history_that_outgrows_the_model_is_read_anew(make: Any) -> None:
    recommender = make("llama", max_events=3)
    session = recommender.session(EVENTS[:3])
    for event in EVENTS[3:]:
        session.append([event])
        check(session, recommender)
    # What is too old to be read is still not recommended.
    assert "i7" not in [s.item_id for s in session.retrieve(30)]


def test_many_small_steps_do_not_pile_up_dead_keys(make: Any) -> None:
    recommender = make()
    session = recommender.session(EVENTS[:1])
    for step in range(18):
        session.append([Event(f"i{step}", "like", NOW + 100 + step)])
    assert session._prefix is not None
    assert session._prefix.num_keys <= 1.25 * session._prefix.longest + 1
    check(session, recommender)


def test_unknown_items_are_reported(make: Any) -> None:
    recommender = make()
    session = recommender.session(EVENTS[:1])
    with pytest.warns(UserWarning, match="nobody"):
        session.append([Event("nobody", "like", NOW + 5)])
    with pytest.warns(UserWarning, match="no-such"):
        assert [s.item_id for s in session.rank(["no-such", "i1"])] == ["i1"]
    assert session.last_report.unknown_candidates == {0: ["no-such"]}


def smaller(catalog: Catalog, drop: set[str]) -> Catalog:
    keep = [i for i, name in enumerate(catalog.item_ids) if name not in drop]
    return Catalog(
        item_ids=[catalog.item_ids[i] for i in keep],
        codes=catalog.codes[keep],
        level_sizes=catalog.level_sizes,
        popularity=catalog.popularity[keep],
    )


def test_a_swapped_catalogue_is_served_without_reading_again(make: Any) -> None:
    recommender = make()
    session = recommender.session(EVENTS)
    old = recommender.retrieve([EVENTS], 5)[0]
    gone = {old[0].item_id, old[2].item_id}
    read = count_tokens(recommender)
    recommender.swap_catalog(smaller(recommender.catalog, gone))
    assert len(recommender.catalog) == 28
    got = session.retrieve(5)
    # Only branches: one node per beam, never more than there are items.
    assert read and session._prefix is not None and session._prefix.num_keys == 25
    kept = recommender.retrieve([EVENTS], 5)[0]
    same(got, kept)
    assert not gone & {s.item_id for s in got}
    check(session, recommender)
    # The tokenizer that the recommender was made with keeps its own items.
    with pytest.raises(ValueError, match="trie has 30 items: the catalogue has 28"):
        recommender.swap_catalog(
            recommender.catalog,
            ItemTrie.from_catalog(make().catalog, recommender.vocabulary),
        )
    assert len(recommender.catalog) == 28


def test_the_catalogue_can_be_swapped_while_requests_run(make: Any) -> None:
    """Every answer is of one catalogue or the other, and both come up."""
    recommender = make("llama")
    whole = recommender.catalog
    half = smaller(whole, {f"i{i}" for i in range(0, 30, 2)})
    expected = []
    for catalog in (half, whole):
        recommender.swap_catalog(catalog)
        expected.append([s.item_id for s in recommender.retrieve([["i3"], ["i5"]], 30)[1]])
    wrong: list[Any] = []
    seen: set[int] = set()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            got = [s.item_id for s in recommender.retrieve([["i3"], ["i5"]], 30)[1]]
            if got in expected:
                seen.add(expected.index(got))
            else:
                wrong.append(got)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(60):
        recommender.swap_catalog(half if number % 2 else whole)
        if seen == {0, 1} and number > 20:
            break
        stop.wait(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert seen == {0, 1}


def test_the_store_reads_new_events_only(make: Any) -> None:
    recommender = make()
    store = UserStateStore(recommender, max_bytes=2**20)
    store.session("a", EVENTS[:3]).retrieve(3)
    read = count_tokens(recommender)
    session = store.session("a", EVENTS[:4])
    assert read == [1 + 4]
    check(session, recommender)
    assert (store.hits, store.misses, len(store)) == (1, 1, 1)
    # Another past: nothing of it can be used.
    session = store.session("a", EVENTS[1:3])
    check(session, recommender)
    assert (store.hits, store.misses, len(store)) == (1, 2, 1)
    with pytest.raises(ValueError, match="action"):
        store.session("a", [*EVENTS[1:3], Event("i1", "buy", NOW + 10**6)])
    assert store.session("a", EVENTS[1:3]) is session
    store.discard("a")
    store.discard("nobody")
    assert "a" not in store and store.num_bytes == 0


def test_the_store_keeps_within_its_bytes(make: Any) -> None:
    recommender = make()
    size = recommender.session(EVENTS[:2]).num_bytes
    # Two layers, keys and values of 4 heads x 8 numbers, 9 tokens, float32.
    assert size == 2 * 2 * 32 * 9 * 4
    store = UserStateStore(recommender, max_bytes=3 * size)
    for user in "abc":
        store.session(user, EVENTS[:2])
    store.session("a", EVENTS[:2])
    store.session("d", EVENTS[:2])
    assert [user for user in "abcd" if user in store] == ["a", "c", "d"]
    assert (store.evictions, store.num_bytes) == (1, 3 * size)
    tiny = UserStateStore(recommender, max_bytes=size - 1)
    assert tiny.session("a", EVENTS[:2]).retrieve(3)
    assert (len(tiny), tiny.evictions) == (0, 1)
    with pytest.raises(ValueError, match="max_bytes is 0"):
        UserStateStore(recommender, 0)
