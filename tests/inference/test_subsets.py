"""Parts of a catalogue, and beam options, through the public face."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gr import BeamOptions, CatalogSubset, Recommender
from gr.tokenizer import Catalog, SemanticIdTokenizer

Make = Callable[..., Any]
HISTORIES = [["m1", "s2"], [], ["s3"]]


@pytest.fixture
def recommender(make_model: Make) -> Recommender:
    """Movies of three tokens and songs of two."""
    rng = np.random.default_rng(2)
    movies = np.unique(rng.integers(0, (3, 4, 5), (25, 3)), axis=0)
    songs = np.unique(rng.integers(0, (4, 6), (15, 2)), axis=0)
    codes = np.concatenate([movies, np.pad(songs, ((0, 0), (0, 1)), constant_values=-1)])
    names = [f"m{i}" for i in range(len(movies))] + [f"s{i}" for i in range(len(songs))]
    catalog = Catalog(
        item_ids=names,
        codes=codes.astype(np.int32),
        level_sizes={"movie": (3, 4, 5), "song": (4, 6)},
        item_types=["movie"] * len(movies) + ["song"] * len(songs),
        popularity=rng.permutation(len(names)),
    )
    tokenizer = SemanticIdTokenizer.from_catalog(catalog, ("like", "skip"))
    model = make_model("hstu", tokenizer.vocabulary.size)
    return Recommender(model, tokenizer, batch_size=2)


def odd(catalog: Catalog) -> Any:
    return np.array([int(name[1:]) % 2 == 1 for name in catalog.item_ids])


def ids(answers: list[Any]) -> list[list[str]]:
    return [[scored.item_id for scored in answer] for answer in answers]


def test_types_rules_and_their_combinations(recommender: Recommender) -> None:
    songs, uneven = CatalogSubset.of_types("song"), CatalogSubset(odd)
    few = CatalogSubset.of_items(["s1", "s2", "m3", "nobody"])
    everything = ids(recommender.retrieve(HISTORIES, 40, 100))
    for subset, permitted in (
        (songs, lambda name: name[0] == "s"),
        (~songs, lambda name: name[0] == "m"),
        (songs & uneven, lambda name: name[0] == "s" and int(name[1:]) % 2),
        (
            few | songs & uneven,
            lambda n: n == "m3" or n in "s1 s2" or (n[0] == "s" and int(n[1:]) % 2),
        ),
    ):
        got = ids(recommender.retrieve(HISTORIES, 40, 100, allowed=subset))
        assert got == [[name for name in row if permitted(name)] for row in everything]
        assert got == ids(
            [recommender.session(h).retrieve(40, 100, allowed=subset) for h in HISTORIES]
        )
        mixed = recommender.retrieve(HISTORIES, 40, 100, allowed=[subset, None, ["s1", "m1"]])
        assert ids(mixed)[:2] == [got[0], everything[1]]
        assert ids(mixed)[2] == [name for name in everything[2] if name in ("s1", "m1")]
    with pytest.raises(ValueError, match="type is 'book': wanted one of"):
        recommender.retrieve(HISTORIES, allowed=CatalogSubset.of_types("book"))
    with pytest.raises(ValueError, match=r"rule of a subset gave int64 of shape \(2,\)"):
        recommender.retrieve(HISTORIES, allowed=CatalogSubset(lambda catalog: np.arange(2)))


def test_a_rule_is_asked_once_per_catalogue(recommender: Recommender) -> None:
    asked: list[int] = []

    def rule(catalog: Catalog) -> Any:
        asked.append(len(catalog))
        return odd(catalog)

    subset = CatalogSubset(rule)
    first = ids(recommender.retrieve(HISTORIES, 40, 100, allowed=subset))
    recommender.retrieve(HISTORIES, 5, allowed=[subset, None, subset])
    assert len(asked) == 1
    old = recommender.catalog
    keep = [i for i, name in enumerate(old.item_ids) if name not in ("m1", "s5")]
    smaller = Catalog(
        item_ids=[old.item_ids[i] for i in keep],
        codes=old.codes[keep],
        level_sizes=old.level_sizes,
        item_types=[old.item_types[i] for i in keep],
        popularity=old.popularity[keep],
    )
    recommender.swap_catalog(smaller)
    with pytest.warns(UserWarning, match="m1"):
        second = ids(recommender.retrieve([["m1", "s2"], [], ["s3"]], 40, 100, allowed=subset))
    assert asked == [len(old), len(old) - 2]
    assert second[1] == [name for name in first[1] if name not in ("m1", "s5")]


def test_options_reach_the_beams(recommender: Recommender) -> None:
    spread = BeamOptions(max_per_prefix=2, prefix_levels=1)
    catalog = recommender.catalog
    for answer in ids(recommender.retrieve(HISTORIES, 20, 100, options=spread)):
        rows = catalog.index(answer)
        first = list(
            zip(catalog.type_index[rows].tolist(), catalog.codes[rows, 0].tolist(), strict=True)
        )
        assert len(answer) > 8 and max(first.count(code) for code in first) <= 2
    hot = recommender.retrieve(HISTORIES, 5, options=BeamOptions(temperature=3.0))
    assert ids(hot) != ids(recommender.retrieve(HISTORIES, 5))
    drawn = [recommender.retrieve(HISTORIES, 5, options=BeamOptions(seed=s)) for s in (1, 2, 1)]
    assert ids(drawn[0]) == ids(drawn[2]) != ids(drawn[1])
    # A request's draw depends on its place in the call, not on the batches it is read in.
    recommender.batch_size = 32
    assert ids(recommender.retrieve(HISTORIES, 5, options=BeamOptions(seed=1))) == ids(drawn[0])
    alone = recommender.session(HISTORIES[0]).retrieve(5, options=BeamOptions(seed=1))
    assert ids([alone]) == ids(drawn[0][:1])
