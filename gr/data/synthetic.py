"""The synthetic stream of HSTU's appendix C: users who come back to a few categories.

Items lie in categories at random and are released in the order of their ids: ``initial_share`` of
them from the start, the rest evenly over the records. Of R records, number r (from 0) can hold the
items below items · (initial_share + (1 − initial_share) r / R). A record has up to
``record_categories`` categories, a prior H over them, and a concentration a. The category of its
n-th event is

    a new draw from H with probability a / (a + n − 1), else that of one of the n − 1 events before,

(a Dirichlet process: the rich get richer), and its item is any released one of the category.

The paper leaves open how many categories "up to 5" are and what prior is sampled. Here the number
is uniform from 1, the categories are distinct, and H is uniform among all distributions
(Dirichlet(1, …, 1)). In the paper the first 90 % of the records are for training and the last 10 %
for tests, see ``SyntheticStream.first_test_record``.

Legend: R records of a block, N events of a record, K categories of a record, C categories.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gr.data.checks import build_interactions
from gr.data.errors import DataError
from gr.data.schema import Interactions

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Records drawn at a time. Each block has a generator of its own, so this is part of the result.
BLOCK = 8192
TRAIN_SHARE = 0.9


@dataclass(frozen=True)
class SyntheticStream:
    """Sizes of the stream; the defaults are the paper's.

    Attributes:
        length: events of a record.
        initial_share: share of the items that can occur from the first record on.
        record_categories: most categories that a record draws from.
        concentration: the ends of the uniform distribution of a.
    """

    items: int = 20_000
    categories: int = 100
    records: int = 1_000_000
    length: int = 128
    initial_share: float = 0.4
    record_categories: int = 5
    concentration: tuple[float, float] = (1.0, 500.0)

    def __post_init__(self) -> None:
        for name in ("items", "categories", "records", "length", "record_categories"):
            if getattr(self, name) < 1:
                raise DataError(f"{name}: {getattr(self, name)}, wanted at least 1")
        if self.record_categories > self.categories:
            raise DataError(
                f"record_categories: {self.record_categories}, wanted at most the "
                f"{self.categories} categories"
            )
        if not 0 < self.initial_share <= 1:
            raise DataError(f"initial_share: {self.initial_share}, wanted a share above 0")
        low, high = self.concentration
        if not 0 < low <= high:
            raise DataError(f"concentration: {self.concentration}, wanted 0 < low <= high")

    @property
    def first_test_record(self) -> int:
        """Records from this number on are the paper's test set."""
        return int(self.records * TRAIN_SHARE + 1e-9)

    def released(self, record: IntArray) -> IntArray:
        """How many items, those with the lowest numbers, can occur in a record: int64."""
        share = self.initial_share + (1 - self.initial_share) * record / self.records
        count: IntArray = (self.items * share + 1e-9).astype(np.int64)
        return count


def synthetic_stream(sizes: SyntheticStream | None = None, seed: int = 0) -> Interactions:
    """Draw the stream; the same sizes and seed give the same table.

    Users are records, named by their number, as items are. ``order`` runs on through the whole
    stream. The metadata holds every item's ``category``.

    Raises:
        DataError: a category has no item among the first released.
    """
    sizes = sizes or SyntheticStream()
    rng = np.random.default_rng([seed, 0])
    category = rng.integers(sizes.categories, size=sizes.items)
    first = int(sizes.released(np.zeros(1, dtype=np.int64))[0])
    filled = np.bincount(category[:first], minlength=sizes.categories) > 0
    if not filled.all():
        raise DataError(
            f"items: category {int(filled.argmin())} has none among the first {first} of "
            f"{sizes.items}, wanted at least one in each of {sizes.categories} categories"
        )
    blocks = [
        _block(sizes, category, begin, np.random.default_rng([seed, 1, begin]))
        for begin in range(0, sizes.records, BLOCK)
    ]
    item = np.concatenate(blocks).ravel()
    record = np.repeat(np.arange(sizes.records), sizes.length)
    events = pa.table(
        {
            "user_id": _numbers(sizes.records).take(pa.array(record)),
            "item_id": _numbers(sizes.items).take(pa.array(item)),
            "order": np.arange(len(item)),
        }
    )
    items = pa.table(
        {
            "item_id": _numbers(sizes.items),
            "title": [f"item {n} of category {c}" for n, c in enumerate(category.tolist())],
            "category": pa.array(category).cast(pa.string()),
        }
    )
    return build_interactions(events, "synthetic", "synthetic stream", items=items)


def dirichlet_process(
    prior_RK: FloatArray, concentration_R: FloatArray, length: int, rng: np.random.Generator
) -> IntArray:
    """Which of its K choices each record makes at each of its events: int64 [R, N]."""
    upto_RK = prior_RK.cumsum(axis=1)
    # Sums of rounded shares may end just below 1.
    upto_RK[:, -1] = 1.0
    rows = np.arange(len(prior_RK))
    choice_RN = np.empty((len(prior_RK), length), dtype=np.int64)
    for n in range(length):
        fresh = (rng.random(len(rows))[:, None] >= upto_RK).sum(axis=1)
        if n:
            # Any earlier event, all alike: its category is c with probability n_c / n.
            again = choice_RN[rows, rng.integers(n, size=len(rows))]
            is_fresh = rng.random(len(rows)) * (concentration_R + n) < concentration_R
            fresh = np.where(is_fresh, fresh, again)
        choice_RN[:, n] = fresh
    return choice_RN


def _block(
    sizes: SyntheticStream, category: IntArray, begin: int, rng: np.random.Generator
) -> IntArray:
    """Items of the records from ``begin`` on: int64 [R, N]."""
    record = np.arange(begin, min(begin + BLOCK, sizes.records))
    keys = rng.random((len(record), sizes.categories))
    # A whole stable sort: a partition's order may differ between processors.
    own_RK = keys.argsort(axis=1, kind="stable")[:, : sizes.record_categories]
    number = rng.integers(1, sizes.record_categories + 1, size=len(record))
    prior_RK = rng.standard_exponential(own_RK.shape)
    prior_RK[np.arange(sizes.record_categories) >= number[:, None]] = 0.0
    prior_RK /= prior_RK.sum(axis=1, keepdims=True)
    concentration_R = rng.uniform(*sizes.concentration, size=len(record))
    choice_RN = dirichlet_process(prior_RK, concentration_R, sizes.length, rng)
    drawn_RN = np.take_along_axis(own_RK, choice_RN, axis=1)

    # Items by category, then by number: what is released of a category comes first in it.
    by_category = np.argsort(category, kind="stable")
    keys_I = category[by_category] * sizes.items + by_category
    start_C = np.searchsorted(keys_I, np.arange(sizes.categories) * sizes.items)
    wanted_RN = drawn_RN * sizes.items + sizes.released(record)[:, None]
    available_RN = np.searchsorted(keys_I, wanted_RN) - start_C[drawn_RN]
    place_RN = (rng.random(drawn_RN.shape) * available_RN).astype(np.int64)
    item_RN: IntArray = by_category[start_C[drawn_RN] + place_RN]
    return item_RN


def _numbers(count: int) -> pa.Array:
    return pa.array(np.arange(count)).cast(pa.string())
