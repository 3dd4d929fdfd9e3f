import numpy as np
import pyarrow as pa
import pytest

from gr.tokenizer import (
    AtomicQuantizer,
    ItemTable,
    ResidualKMeans,
    append_items,
    build_catalog,
)


def table(prefix: str, n: int, seed: int, metadata: bool = False) -> ItemTable:
    rng = np.random.default_rng(seed)
    return ItemTable(
        item_ids=[f"{prefix}{i}" for i in range(n)],
        embeddings=rng.standard_normal((n, 4)),
        titles=[f"{prefix.upper()} {i}" for i in range(n)],
        popularity=rng.integers(0, 9, n),
        metadata=pa.table({"genre": [str(i % 3) for i in range(n)]}) if metadata else None,
    )


def test_one_type_equals_the_quantizers_own_codes() -> None:
    items = table("i", 40, 0, metadata=True)
    quantizer = ResidualKMeans(codebook_size=(8, 4))
    catalog = build_catalog(items, quantizer)
    assert np.array_equal(catalog.codes, quantizer.encode(items.embeddings))
    assert catalog.level_sizes == {"item": (8, 4)}
    assert catalog.title("i3") == "I 3" and catalog.policy == "popularity"
    assert catalog.metadata is not None and catalog.metadata.num_rows == 40


def test_types_with_their_own_levels_and_sizes() -> None:
    tables = {"track": table("t", 30, 0, metadata=True), "artist": table("a", 20, 1)}
    quantizers = {
        "track": ResidualKMeans(codebook_size=(8, 4)),
        "artist": ResidualKMeans(codebook_size=(4, 4, 2)),
    }
    catalog = build_catalog(tables, quantizers, "extra_level")
    assert [len(sizes) for sizes in catalog.level_sizes.values()] == [3, 4]
    assert catalog.item_types == ["track"] * 30 + ["artist"] * 20
    assert (catalog.codes[:30, 3] == -1).all() and (catalog.codes[30:, 3] >= 0).all()
    assert len(np.unique(catalog.codes, axis=0)) == 50
    grown = append_items(catalog, table("n", 5, 2), quantizers["artist"], "artist")
    assert np.array_equal(grown.codes[:50], catalog.codes)
    assert grown.item_types[50:] == ["artist"] * 5
    assert len(np.unique(grown.codes[grown.type_index == 1], axis=0)) == 25
    with pytest.raises(ValueError, match="tables are of types"):
        build_catalog(tables, {"artist": quantizers["artist"], "track": quantizers["track"]})


def test_atomic_items_are_appended_while_there_is_room() -> None:
    quantizer = AtomicQuantizer(capacity=12)
    catalog = build_catalog(table("i", 10, 0), quantizer)
    assert catalog.codes[:, 0].tolist() == list(range(10))
    grown = append_items(catalog, table("n", 2, 1), quantizer)
    assert grown.codes[:, 0].tolist() == list(range(12))
    with pytest.raises(ValueError, match="1 new items for 0 free atomic codes of 12"):
        append_items(grown, table("m", 1, 2), quantizer)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="embeddings has 1 rows: wanted one for each of 2"):
        ItemTable(["a", "b"], np.ones((1, 3)))
    catalog = build_catalog(table("i", 10, 0), AtomicQuantizer())
    with pytest.raises(KeyError, match="'film'"):
        append_items(catalog, table("n", 2, 1), AtomicQuantizer(), "film")
