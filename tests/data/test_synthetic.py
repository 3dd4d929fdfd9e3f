"""The synthetic stream of HSTU's appendix C: what was drawn, counted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gr.data import synthetic
from gr.data.errors import DataError
from gr.data.schema import Interactions
from gr.data.synthetic import SyntheticStream, dirichlet_process, synthetic_stream

SMALL = SyntheticStream(items=600, categories=12, records=400, length=20)


@pytest.fixture(scope="module")
def stream() -> Interactions:
    return synthetic_stream(SMALL, seed=3)


def items_of(stream: Interactions) -> np.ndarray:
    found = np.array(stream.events["item_id"].to_pylist()).astype(np.int64)
    return found.reshape(SMALL.records, SMALL.length)


def test_the_table_keeps_the_schema(stream: Interactions) -> None:
    stream.validate()
    assert stream.time_column == "order"
    assert stream.num_users == 400 and stream.num_events == 8000
    assert stream.events["order"].to_pylist() == list(range(8000))
    assert stream.events["user_id"].to_pylist()[19:21] == ["0", "1"]
    assert stream.items is not None and stream.items.num_rows == 600


def test_a_seed_repeats_the_stream_and_another_changes_it(stream: Interactions) -> None:
    again = synthetic_stream(SMALL, seed=3)
    assert again.events.equals(stream.events)
    assert again.items is not None and again.items.equals(stream.items)
    assert not synthetic_stream(SMALL, seed=4).events.equals(stream.events)


@pytest.mark.parametrize("block", [8192, 150])
def test_no_item_comes_before_its_release(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "BLOCK", block)
    item = items_of(synthetic_stream(SMALL, seed=3))
    # No block repeats another.
    assert len({tuple(row) for row in item.tolist()}) == 400
    for record in range(400):
        assert item[record].max() < math.floor(600 * (0.4 + 0.6 * record / 400) + 1e-9)
    # And those released late do come: the bound is reached, not only kept.
    assert item[:40].max() >= 230 and item[360:].max() >= 560


def test_the_papers_example_of_a_release() -> None:
    record = np.array([0, 500_000])
    assert SyntheticStream().released(record).tolist() == [8000, 14_000]
    assert SyntheticStream().first_test_record == 900_000


def test_records_keep_to_their_categories(stream: Interactions) -> None:
    assert stream.items is not None
    category = np.array(stream.items["category"].to_pylist()).astype(np.int64)
    assert set(category.tolist()) == set(range(12))
    seen = [len(set(row.tolist())) for row in category[items_of(stream)]]
    assert max(seen) == 5 and min(seen) == 1


def test_a_categorys_items_are_all_alike() -> None:
    sizes = replace(SMALL, items=24, categories=2, initial_share=1.0, record_categories=1)
    stream = synthetic_stream(sizes, seed=0)
    assert stream.items is not None
    category = np.array(stream.items["category"].to_pylist())
    item = np.array(stream.events["item_id"].to_pylist()).astype(np.int64)
    count = np.bincount(item, minlength=24)
    for c in ("0", "1"):
        mine = count[category == c]
        wanted = mine.sum() / len(mine)
        assert np.abs(mine - wanted).max() < 5 * math.sqrt(wanted)


def test_new_categories_come_as_a_dirichlet_process_has_them() -> None:
    # With so many choices a draw from the prior is a new one, but for 12 in 1,000.
    records, choices, concentration = 4000, 1000, 5.0
    prior = np.full((records, choices), 1 / choices)
    rng = np.random.default_rng(0)
    choice = dirichlet_process(prior, np.full(records, concentration), 12, rng)
    for n in range(1, 12):
        new = (choice[:, n, None] != choice[:, :n]).all(axis=1).mean()
        wanted = concentration / (concentration + n)
        assert abs(new - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / records) + 12 / choices


def test_the_rich_get_richer() -> None:
    # After a, b, …: P(a again) = (concentration H_a + n_a) / (concentration + n).
    records, concentration = 60_000, 2.0
    prior = np.tile([0.2, 0.8], (records, 1))
    rng = np.random.default_rng(1)
    choice = dirichlet_process(prior, np.full(records, concentration), 4, rng)
    before = (choice[:, :3] == 0).sum(axis=1)
    for count in range(4):
        mine = before == count
        wanted = (concentration * 0.2 + count) / (concentration + 3)
        limit = 5 * math.sqrt(wanted * (1 - wanted) / mine.sum())
        assert abs((choice[mine, 3] == 0).mean() - wanted) < limit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"items": 0}, "items: 0, wanted at least 1"),
        ({"record_categories": 13}, "record_categories: 13, wanted at most the 12"),
        ({"initial_share": 0.0}, r"initial_share: 0\.0"),
        ({"concentration": (0.0, 1.0)}, "concentration: "),
    ],
)
def test_bad_sizes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(SMALL, **change)


def test_a_category_without_items_is_named() -> None:
    with pytest.raises(DataError, match=r"items: category \d+ has none among the first 6 of 15"):
        synthetic_stream(replace(SMALL, items=15))
