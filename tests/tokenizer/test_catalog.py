import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gr.tokenizer import Catalog

SIZES = {"item": (4, 3), "artist": (5, 2, 2)}


def mixed() -> Catalog:
    return Catalog(
        item_ids=["a", "b", "c", "d"],
        codes=np.array([[0, 0, -1], [3, 2, -1], [4, 1, 1], [0, 0, -1]], dtype=np.int32),
        level_sizes=SIZES,
        item_types=["item", "item", "artist", "item"],
        titles=["A", "B", "C", "D"],
        popularity=np.array([1, 2, 3, 9]),
        metadata=pa.table({"genre": ["x", "y", None, "x"]}),
        policy="popularity",
    )


def test_index_and_title() -> None:
    catalog = mixed()
    assert catalog.index(["c", "nobody", "a"]).tolist() == [2, -1, 0]
    assert catalog.index([]).shape == (0,)
    assert catalog.title("b") == "B"
    assert "d" in catalog and "e" not in catalog
    assert catalog.levels.tolist() == [2, 2, 3, 2]
    with pytest.raises(KeyError, match="'nobody'"):
        catalog.title("nobody")


def test_integer_ids_are_strings() -> None:
    catalog = Catalog([7, 8], np.zeros((2, 1), dtype=np.int32), {"item": (1,)})  # type: ignore[list-item]  # what is tested
    assert catalog.item_ids == ["7", "8"]
    assert catalog.index([8, "7"]).tolist() == [1, 0]


def test_a_missing_title_is_the_id() -> None:
    codes = np.zeros((2, 1), dtype=np.int32)
    titles: list[str | None] = ["A", None]
    assert Catalog(["a", "b"], codes, {"item": (1,)}, titles=titles).titles == ["A", "b"]  # type: ignore[arg-type]  # what is tested


def test_lookup_is_the_most_popular_of_the_bucket() -> None:
    catalog = mixed()
    found = catalog.lookup([[0, 0, -1], [4, 1, 1], [0, 0, -1], [1, 0, -1]], [0, 1, 1, 0])
    assert found.tolist() == [3, 2, -1, -1]


def test_lookup_against_brute_force() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, (60, 2)).astype(np.int32)
    counts = rng.integers(0, 4, 60)
    catalog = Catalog([str(i) for i in range(60)], codes, {"item": (3, 4)}, popularity=counts)
    asked = [[i, j] for i in range(3) for j in range(4)]
    wanted = []
    for sid in asked:
        rows = [r for r in range(60) if codes[r].tolist() == sid]
        wanted.append(max(rows, key=lambda r: (counts[r], -r)) if rows else -1)
    assert catalog.lookup(asked, [0] * len(asked)).tolist() == wanted
    assert -1 in wanted


def test_save_and_load(tmp_path: Path) -> None:
    catalog = mixed()
    catalog.save(tmp_path / "deep" / "folder")
    files = sorted(p.name for p in (tmp_path / "deep" / "folder").iterdir())
    assert files == ["catalog.json", "catalog.parquet"]
    back = Catalog.load(tmp_path / "deep" / "folder")
    assert back.item_ids == catalog.item_ids
    assert np.array_equal(back.codes, catalog.codes) and back.codes.dtype == np.int32
    assert back.item_types == catalog.item_types
    assert back.titles == catalog.titles
    assert np.array_equal(back.popularity, catalog.popularity)
    assert list(back.level_sizes.items()) == list(SIZES.items())
    assert back.metadata is not None and back.metadata.equals(catalog.metadata)
    assert back.policy == "popularity"


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"catalog\.parquet is missing"):
        Catalog.load(tmp_path)
    mixed().save(tmp_path)
    about = json.loads((tmp_path / "catalog.json").read_text())
    (tmp_path / "catalog.json").write_text(json.dumps({**about, "items": 5}))
    with pytest.raises(ValueError, match=r"has 4 rows.*says 5"):
        Catalog.load(tmp_path)
    (tmp_path / "catalog.json").write_text(json.dumps(about)[:30])
    with pytest.raises(ValueError, match=r"catalog\.json is not JSON"):
        Catalog.load(tmp_path)
    mixed().save(tmp_path)
    whole = (tmp_path / "catalog.parquet").read_bytes()
    (tmp_path / "catalog.parquet").write_bytes(whole[:200])
    with pytest.raises(ValueError, match=r"catalog\.parquet is not a Parquet file"):
        Catalog.load(tmp_path)


def test_with_items_appends_and_moves_nothing() -> None:
    catalog = mixed()
    grown = catalog.with_items(["e"], [[2, 2]], titles=["E"], popularity=[4])
    assert len(catalog) == 4 and len(grown) == 5
    assert np.array_equal(grown.codes[:4], catalog.codes)
    assert grown.codes[4].tolist() == [2, 2, -1]
    assert grown.item_types[4] == "item" and grown.title("e") == "E"
    assert grown.metadata is not None and grown.metadata.column("genre").to_pylist()[4] is None
    assert catalog.with_items([], []).item_ids == catalog.item_ids
    with pytest.raises(ValueError, match="'b' is already in the catalogue"):
        catalog.with_items(["b"], [[0, 0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item_ids": ["a", "b", "c", "a"]}, r"item_ids\[3\] 'a'"),
        ({"item_ids": ["a", None, "c", "d"]}, r"item_ids\[1\] is None: wanted an id"),
        ({"item_ids": ["a", "b", float("nan"), "d"]}, r"item_ids\[2\] is nan: wanted an id"),
        ({"titles": ["A"]}, "titles has 1 rows"),
        ({"item_types": ["item", "item", "film", "item"]}, r"item_types\[2\] is 'film'"),
        ({"popularity": np.array([0, -2, 0, 0])}, r"popularity\[1\] is -2"),
        ({"codes": np.zeros((4, 2))}, r"codes have shape \(4, 2\)"),
        ({"codes": np.zeros((4, 3))}, r"codes\[0, 2\] of item 'a' is 0"),
        ({"level_sizes": {}}, "level_sizes is empty"),
        ({"metadata": pa.table({"genre": ["x"]})}, "metadata has 1 rows"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    good = mixed()
    fields = {
        name: getattr(good, name)
        for name in ("item_ids", "codes", "level_sizes", "item_types", "titles", "popularity")
    }
    with pytest.raises(ValueError, match=message):
        Catalog(**{**fields, **change})
