import warnings
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gr.tokenizer.collisions import append, resolve
from gr.tokenizer.quantizers import QuantizerWarning, ResidualKMeans

CODES = np.array([[0, 1], [0, 1], [1, 0], [0, 1], [1, 1]])
POPULARITY = [2, 9, 1, 5, 0]


def fitted(seed: int = 0, n: int = 60) -> tuple[ResidualKMeans, np.ndarray, np.ndarray]:
    points = np.random.default_rng(seed).standard_normal((n, 3)).astype(np.float32)
    quantizer = ResidualKMeans(codebook_size=(4, 32), seed=seed).fit(points)
    return quantizer, points, quantizer.encode(points)


def test_popularity_changes_nothing() -> None:
    codes, sizes = resolve(CODES, (2, 2), "popularity", popularity=POPULARITY)
    assert np.array_equal(codes, CODES) and sizes == (2, 2)
    assert append(codes, sizes, [[0, 1]], "popularity").tolist() == [[0, 1]]


def test_extra_level_numbers_a_bucket_by_popularity() -> None:
    codes, sizes = resolve(CODES, (2, 2), "extra_level", popularity=POPULARITY)
    assert codes[:, :2].tolist() == CODES.tolist()
    assert codes[:, 2].tolist() == [2, 0, 0, 1, 0]
    assert sizes[:2] == (2, 2) and sizes[2] > 3
    new = append(codes, sizes, [[0, 1], [0, 0], [0, 1]], "extra_level", popularity=[1, 1, 7])
    assert new.tolist() == [[0, 1, 4], [0, 0, 0], [0, 1, 3]]


def test_extra_level_that_is_full_shares_and_says_so() -> None:
    codes, sizes = resolve(CODES, (2, 2), "extra_level")
    many = np.zeros((sizes[2] + 2, 2), dtype=int)
    with pytest.warns(QuantizerWarning, match=rf"2 of {sizes[2] + 2} items still share"):
        new = append(codes, sizes, many, "extra_level")
    assert new[:, 2].max() == sizes[2] - 1


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 50))
def test_reassign_leaves_no_collision_while_codes_are_free(seed: int) -> None:
    quantizer, points, codes = fitted(seed)
    counts = np.random.default_rng(seed).integers(0, 50, len(points))
    new, sizes = resolve(
        codes, (4, 32), "reassign", popularity=counts, quantizer=quantizer, embeddings=points
    )
    assert sizes == (4, 32)
    assert np.array_equal(new[:, 0], codes[:, 0])
    assert len(np.unique(new, axis=0)) == len(points)
    for bucket in map(np.array, {tuple(c) for c in codes.tolist()}):
        rows = np.flatnonzero((codes == bucket).all(axis=1))
        best = rows[np.argmax(counts[rows])]
        assert np.array_equal(new[best], codes[best])


def test_reassign_takes_the_nearest_free_code() -> None:
    quantizer, points, _ = fitted()
    codes = quantizer.encode(points)
    order = np.arange(len(points))
    new, _ = resolve(codes, (4, 32), "reassign", quantizer=quantizer, embeddings=points)
    # Literal: holders of each ID first, then the others in order, each to its nearest free code.
    taken: dict[tuple[int, int], int] = {}
    for row in order:
        taken.setdefault((int(codes[row, 0]), int(codes[row, 1])), int(row))
    for row in order:
        own = (int(codes[row, 0]), int(codes[row, 1]))
        if taken[own] == row:
            assert new[row].tolist() == list(own)
            continue
        free = [c for c in range(32) if (own[0], c) not in taken]
        there = quantizer.decode([[own[0], c] for c in free])
        best = free[int(((there - points[row]) ** 2).sum(axis=1).argmin())]
        assert new[row].tolist() == [own[0], best]
        taken[own[0], best] = int(row)
    assert (new != codes).any()


def test_reassign_without_room_shares_and_says_how_many() -> None:
    points = np.random.default_rng(0).standard_normal((30, 3)).astype(np.float32)
    quantizer = ResidualKMeans(codebook_size=(2, 4)).fit(points)
    with pytest.warns(QuantizerWarning, match=r"22 of 30 items still share"):
        codes, _ = resolve(
            quantizer.encode(points), (2, 4), "reassign", quantizer=quantizer, embeddings=points
        )
    assert len(np.unique(codes, axis=0)) == 8


def test_reassign_moves_the_surplus_of_a_full_prefix_to_the_nearest_with_room() -> None:
    # Twenty items in one place, four far away: the crowded prefix has eight codes.
    points = np.concatenate([np.zeros((20, 2)), 10 + np.arange(8).reshape(4, 2)]).astype(np.float32)
    points += np.random.default_rng(0).normal(0, 0.01, points.shape).astype(np.float32)
    quantizer = ResidualKMeans(codebook_size=(4, 8)).fit(points)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes, _ = resolve(
            quantizer.encode(points), (4, 8), "reassign", quantizer=quantizer, embeddings=points
        )
    assert len(np.unique(codes, axis=0)) == len(points)
    kept = quantizer.encode(points)
    crowded = np.bincount(kept[:20, 0]).argmax()
    assert (codes[:20, 0] == crowded).sum() == 8


@pytest.mark.parametrize("policy", ["popularity", "extra_level", "reassign"])
def test_appending_moves_nothing_and_avoids_published_ids(policy: str) -> None:
    quantizer, points, codes = fitted()
    published, sizes = resolve(
        codes, quantizer.level_sizes, policy, quantizer=quantizer, embeddings=points
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = append(
            published,
            sizes,
            codes[:5],
            policy,
            quantizer=quantizer,
            embeddings=points[:5],
        )
    assert new.dtype == np.int32 and new.shape == (5, len(sizes))
    counts = Counter(map(tuple, np.concatenate([published, new]).tolist()))
    if policy == "popularity":
        assert np.array_equal(new, codes[:5])
    else:
        assert max(counts.values()) == 1


def test_refuses() -> None:
    with pytest.raises(ValueError, match="policy is 'none'"):
        resolve(CODES, (2, 2), "none")
    with pytest.raises(ValueError, match="needs quantizer"):
        resolve(CODES, (2, 2), "reassign")
    quantizer, points, codes = fitted()
    with pytest.raises(ValueError, match="needs embeddings"):
        resolve(codes, (4, 32), "reassign", quantizer=quantizer)
    with pytest.raises(ValueError, match="embeddings have 3 rows: there are 60"):
        resolve(codes, (4, 32), "reassign", quantizer=quantizer, embeddings=points[:3])
    with pytest.raises(ValueError, match=r"popularity has shape \(2,\)"):
        resolve(CODES, (2, 2), popularity=[1, 2])
    with pytest.raises(ValueError, match=r"codes\[0, 1\] is 1: level 1 has 1 codes"):
        resolve(CODES, (2, 1))
