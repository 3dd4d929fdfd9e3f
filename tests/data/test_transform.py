"""Filters against a literal loop, and action rules at their boundaries."""

from __future__ import annotations

import random
from collections import Counter

import pyarrow as pa
import pytest

from gr.data import DataError, Interactions, actions_from_value, k_core, min_events


def make(pairs: list[tuple[str, str]], values: list[float] | None = None) -> Interactions:
    columns = {
        "user_id": [u for u, _ in pairs],
        "item_id": [i for _, i in pairs],
        "timestamp": list(range(len(pairs))),
        "action": ["interact"] * len(pairs),
    }
    if values is not None:
        columns["value"] = values
    names = sorted({i for _, i in pairs})
    items = pa.table({"item_id": names, "title": [n.upper() for n in names]})
    return Interactions("toy", pa.table(columns), items)


def pairs_of(interactions: Interactions) -> list[tuple[str, str]]:
    table = interactions.events
    return list(zip(table["user_id"].to_pylist(), table["item_id"].to_pylist(), strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_k_core_is_the_literal_fixed_point(seed: int) -> None:
    rng = random.Random(seed)
    pairs = [(f"u{rng.randrange(12)}", f"i{rng.randrange(10)}") for _ in range(70)]
    want = pairs
    while True:
        users, items = Counter(u for u, _ in want), Counter(i for _, i in want)
        kept = [(u, i) for u, i in want if users[u] >= 4 and items[i] >= 4]
        if kept == want:
            break
        want = kept
    got = k_core(make(pairs), 4)
    assert pairs_of(got) == want
    assert got.repairs == ({"k_core": 70 - len(want)} if len(want) < 70 else {})
    assert got.items is not None
    if len(want) < 70:
        assert set(got.items["item_id"].to_pylist()) == {i for _, i in want}


def test_k_core_cascades_and_refuses_to_empty_the_data() -> None:
    chain = [("a", "x"), ("a", "y"), ("b", "y"), ("b", "z")]  # x and z go, then a and b
    with pytest.raises(DataError, match=r"k_core\(k=2\) leaves no events of 4, wanted a smaller k"):
        k_core(make(chain), 2)
    assert pairs_of(k_core(make(chain), 1)) == chain
    with pytest.raises(DataError, match=r"k is 0"):
        k_core(make(chain), 0)


def test_min_events_drops_users_only_and_counts_them() -> None:
    got = min_events(make([("a", "x"), ("b", "x"), ("a", "y")]), 2)
    assert pairs_of(got) == [("a", "x"), ("a", "y")]
    assert got.repairs == {"min_events": 1}
    assert got.items is not None and got.items.num_rows == 2
    with pytest.raises(DataError, match=r"min_events\(n=3\) leaves no events"):
        min_events(got, 3)


def test_actions_from_value() -> None:
    inter = make([("a", "x"), ("a", "y"), ("b", "x"), ("b", "z")], [3.5, 4.0, 5.0, 0.5])
    got = actions_from_value(inter, [("like", 4.0, None), ("dislike", None, 4.0)])
    assert got.events["action"].to_pylist() == ["dislike", "like", "like", "dislike"]
    assert got.events["value"].to_pylist() == [3.5, 4.0, 5.0, 0.5]
    assert inter.events["action"].to_pylist() == ["interact"] * 4  # the input is left alone
    first = actions_from_value(inter, [("top", 5.0, None), ("any", None, None)])
    assert first.events["action"].to_pylist() == ["any", "any", "top", "any"]
    got.validate()


def test_actions_from_value_refuses_gaps() -> None:
    inter = make([("a", "x"), ("a", "y")], [3.0, 1.0])
    with pytest.raises(DataError, match=r"event 2 has value 1\.0, which no rule covers \(1 such"):
        actions_from_value(inter, [("like", 2.0, None)])
    with pytest.raises(DataError, match=r"rule \('like', 4, 2\) never holds"):
        actions_from_value(inter, [("like", 4, 2)])
    with pytest.raises(DataError, match=r"no rules"):
        actions_from_value(inter, [])
    with pytest.raises(DataError, match=r"needs a column 'value'"):
        actions_from_value(make([("a", "x")]), [("like", 2.0, None)])
