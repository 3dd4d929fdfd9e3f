import importlib.util
import math

import numpy as np
import pytest

from gr.tokenizer import (
    QuantizerWarning,
    array_embeddings,
    cooccurrence_embeddings,
    join_embeddings,
    text_embeddings,
)
from gr.tokenizer.embeddings import _ppmi

TEXTS = ["red cat", "red cats cat", "blue dog", "blue dog dog", "", "red cat"]


def test_text_neighbours_share_words() -> None:
    x = text_embeddings(TEXTS, dim=3)
    assert x.dtype == np.float32 and x.shape == (6, 3)
    similarity = x @ x.T
    assert similarity[0, 1] > 0.5 > similarity[0, 2]
    assert similarity[2, 3] > 0.5
    assert np.allclose(x[0], x[5])
    assert np.array_equal(x[4], np.zeros(3))
    lengths = np.linalg.norm(x, axis=1)
    assert np.allclose(lengths[[0, 1, 2, 3, 5]], 1.0, atol=1e-5)


def test_full_rank_text_embeddings_are_the_tfidf_cosines() -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer

    matrix = TfidfVectorizer(sublinear_tf=True).fit_transform(TEXTS).toarray()
    x = text_embeddings(TEXTS, dim=4)
    assert np.allclose(x @ x.T, matrix @ matrix.T, atol=1e-5)


def test_text_is_deterministic_and_says_when_it_has_fewer_dimensions() -> None:
    with pytest.warns(
        QuantizerWarning, match="50 dimensions wanted: the texts of 6 items support 4"
    ):
        first = text_embeddings(TEXTS, dim=50, seed=2)
    with pytest.warns(QuantizerWarning):
        again = text_embeddings(TEXTS, dim=50, seed=2)
    assert first.shape == (6, 4) and np.array_equal(first, again)


def test_text_refuses() -> None:
    for texts in (["", " "], ["!!", "--"]):
        with pytest.raises(ValueError, match="none of the 2 texts has a word"):
            text_embeddings(texts)
    with pytest.raises(ValueError, match="dim is 0"):
        text_embeddings(TEXTS, dim=0)


@pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is not None,
    reason="sentence-transformers is installed: its absence cannot be tested",
)
def test_a_named_model_without_its_library_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"'some-model' needs sentence-transformers.*\[text\]"):
        text_embeddings(TEXTS, model="some-model")


def test_own_array_is_checked() -> None:
    assert array_embeddings([[1, 2], [3, 4]], 2).dtype == np.float32
    with pytest.raises(ValueError, match="has 2 rows: there are 3 items"):
        array_embeddings([[1, 2], [3, 4]], 3)
    with pytest.raises(ValueError, match=r"x\[1, 0\] is inf"):
        array_embeddings(np.array([[1.0, 2.0], [np.inf, 4.0]]), 2)


SEQUENCES = [[0, 1, 2, 0], [2, 3], [], [4], [1, -1, 0]]


def pair_counts(window: int | None) -> np.ndarray:
    counts = np.zeros((5, 5))
    for sequence in SEQUENCES:
        known = [i for i in sequence if i >= 0]
        if window is None:
            for i in set(known):
                for j in set(known) - {i}:
                    counts[i, j] += 1
            continue
        for a in range(len(known)):
            for b in range(len(known)):
                if a != b and abs(a - b) <= window and known[a] != known[b]:
                    counts[known[a], known[b]] += 1
    return counts


@pytest.mark.parametrize("window", [1, 2, 10, None])
def test_cooccurrence_factorises_the_literal_ppmi(window: int | None) -> None:
    counts = pair_counts(window)
    rows = counts.sum(axis=1)
    context = rows**0.75 / (rows**0.75).sum() * rows.sum()
    wanted = np.zeros((5, 5))
    for i in range(5):
        for j in range(5):
            if counts[i, j]:
                pmi = math.log(counts[i, j] * rows.sum() / (rows[i] * context[j]))
                wanted[i, j] = max(0.0, pmi)
    assert np.allclose(_ppmi(counts).toarray(), wanted)  # type: ignore[attr-defined]  # scipy has no annotations
    u, s, _ = np.linalg.svd(wanted)
    gram = (u * s) @ u.T
    dim = int((s > s[0] * 1e-6).sum())
    x = cooccurrence_embeddings(SEQUENCES, 5, dim=dim, window=window)
    assert np.allclose(x @ x.T, gram, atol=1e-4)
    assert not x[4].any()  # never seen beside another item


def test_cooccurrence_refuses() -> None:
    with pytest.raises(ValueError, match=r"sequences\[1\] has item 9: there are 5"):
        cooccurrence_embeddings([[0, 1], [9]], 5)
    with pytest.raises(ValueError, match="no two items occur together"):
        cooccurrence_embeddings([[0], [1]], 5)
    with pytest.raises(ValueError, match="window is 0"):
        cooccurrence_embeddings(SEQUENCES, 5, window=0)


def test_joined_weights_are_shares_of_squared_distance() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((50, 4)) * 100, rng.standard_normal((50, 30)) / 7
    x = join_embeddings([a, b], [3.0, 1.0])
    assert x.shape == (50, 34)
    shares = [(x[:, :4] ** 2).sum() / 50, (x[:, 4:] ** 2).sum() / 50]
    assert np.allclose(shares, [3.0, 1.0], rtol=1e-4)
    assert np.isfinite(join_embeddings([a, np.zeros((50, 2))])).all()


def test_join_refuses() -> None:
    with pytest.raises(ValueError, match="embeddings is empty"):
        join_embeddings([])
    with pytest.raises(ValueError, match=r"\[2, 3\] rows"):
        join_embeddings([np.ones((2, 1)), np.ones((3, 1))])
    with pytest.raises(ValueError, match="weights has 1 values"):
        join_embeddings([np.ones((2, 1)), np.ones((2, 1))], [1.0])
    with pytest.raises(ValueError, match="wanted values >= 0"):
        join_embeddings([np.ones((2, 1))], [0.0])
