"""Item embeddings: from text, from co-occurrence, from a user's own array, or several joined.

Legend: n items, d dimensions, V words. Every function returns float32 [n, d], rows in item order;
an item about which a source knows nothing is a zero row.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gr.tokenizer.quantizers.base import FloatArray, QuantizerWarning, checked_points
from gr.tokenizer.vocabulary import IntArray

_SMOOTHING = 0.75  # exponent of context counts in PMI: tames rare items


def text_embeddings(
    texts: Sequence[str],
    model: str | os.PathLike[str] | None = None,
    dim: int | None = 128,
    seed: int = 0,
) -> FloatArray:
    """Embeddings of texts, rows of length 1.

    Args:
        texts: one per item; may be empty for some.
        model: a sentence-transformers model by name or folder; None: TF-IDF and truncated SVD.
        dim: columns wanted; None keeps a model's own number (128 for TF-IDF). Fewer come back, with
            a warning, where the texts do not support as many.
        seed: of the SVD.

    Raises:
        ValueError: no text has a word, or dim < 1.
        ImportError: a model is named and sentence-transformers is not installed.
    """
    cleaned = [text or "" for text in texts]
    if dim is not None and dim < 1:
        raise ValueError(f"dim is {dim}: wanted a number >= 1")
    if not any(text.strip() for text in cleaned):
        raise ValueError(f"none of the {len(cleaned)} texts has a word")
    if model is None:
        return _unit_rows(_tfidf(cleaned, dim or 128, seed))
    return _unit_rows(_sentence_model(cleaned, os.fspath(model), dim, seed))


def array_embeddings(array: npt.ArrayLike, n_items: int) -> FloatArray:
    """A user's own embeddings, checked: float [n_items, d].

    Raises:
        ValueError: another number of rows, not two-dimensional, or a value that is not finite.
    """
    points = checked_points(array)
    if len(points) != n_items:
        raise ValueError(f"the array has {len(points)} rows: there are {n_items} items")
    return points


def cooccurrence_embeddings(
    sequences: Sequence[npt.ArrayLike],
    n_items: int,
    dim: int = 64,
    window: int | None = 10,
    seed: int = 0,
) -> FloatArray:
    """Embeddings of items that appear in the same histories: PPMI, then SVD.

    PMI(i, j) = log(#(i, j) #total / (#(i) #(j)^0.75)) with #(j)^0.75 scaled to sum to #total,
    negative values cut to 0; an item's embedding is its row of U sqrt(S).
    (Levy, Goldberg: Neural word embedding as implicit matrix factorization, 2014, section 5; the
    exponent: Levy, Goldberg, Dagan 2015, section 3.2.) Use training histories only.

    Args:
        sequences: item indices 0 .. n_items - 1 per user, oldest first; negative ones are skipped.
        n_items: n.
        dim: columns wanted; fewer come back, with a warning, where the data supports fewer.
        window: how many events apart two items may be; None: the whole history, each pair of
            different items once per user.
        seed: of the SVD.

    Raises:
        ValueError: an index outside the items, dim or window below 1, or no pair at all.
    """
    from scipy import sparse

    if dim < 1:
        raise ValueError(f"dim is {dim}: wanted a number >= 1")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: wanted a number >= 1, or None for all")
    user, item = _flat(sequences, n_items)
    shape = (n_items, n_items)
    counts = sparse.csr_matrix(shape, dtype=np.float64)
    if window is None:
        seen = sparse.csr_matrix(
            (np.ones(len(item)), (user, item)), shape=(len(sequences), n_items)
        )
        seen.data[:] = 1.0
        counts = seen.T @ seen
    else:
        for lag in range(1, min(window, max(len(item) - 1, 0)) + 1):
            same = user[lag:] == user[:-lag]
            pair = (item[:-lag][same], item[lag:][same])
            counts = counts + sparse.csr_matrix((np.ones(len(pair[0])), pair), shape=shape)
        counts = counts + counts.T
    counts = sparse.csr_matrix(counts)
    counts.setdiag(0.0)
    counts.eliminate_zeros()
    if not counts.nnz:
        raise ValueError(f"no two items occur together in the {len(sequences)} sequences")
    return _svd(_ppmi(counts), dim, seed, "co-occurrence counts", root=True)


def join_embeddings(
    embeddings: Sequence[npt.ArrayLike], weights: Sequence[float] | None = None
) -> FloatArray:
    """Several embeddings of the same items side by side: float32 [n, sum of d].

    Each is scaled to a mean squared row length of 1 and then by sqrt(weight), so that a weight is
    its share of squared distances, whatever its number of columns.

    Raises:
        ValueError: nothing to join, different numbers of rows or weights, or a negative weight.
    """
    parts = [checked_points(e) for e in embeddings]
    if not parts:
        raise ValueError("embeddings is empty: wanted at least one array")
    shares = [1.0] * len(parts) if weights is None else [float(w) for w in weights]
    if len(shares) != len(parts):
        raise ValueError(f"weights has {len(shares)} values: there are {len(parts)} embeddings")
    if min(shares) < 0 or not sum(shares):
        raise ValueError(f"weights are {shares}: wanted values >= 0, one of them > 0")
    rows = [len(part) for part in parts]
    if len(set(rows)) != 1:
        raise ValueError(f"embeddings have {rows} rows: wanted the same number in each")
    scaled = []
    for part, share in zip(parts, shares, strict=True):
        size = float(np.sqrt((part.astype(np.float64) ** 2).sum(axis=1).mean()))
        scaled.append(part * np.float32(np.sqrt(share) / size) if size else part)
    return np.concatenate(scaled, axis=1)


def _flat(sequences: Sequence[npt.ArrayLike], n_items: int) -> tuple[IntArray, IntArray]:
    arrays = [np.asarray(s, dtype=np.int64).ravel() for s in sequences]
    lengths = np.array([len(a) for a in arrays], dtype=np.int64)
    user = np.repeat(np.arange(len(arrays), dtype=np.int64), lengths)
    item = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
    if len(item) and item.max() >= n_items:
        at = int(item.argmax())
        raise ValueError(f"sequences[{user[at]}] has item {item[at]}: there are {n_items} items")
    known = item >= 0
    return user[known], item[known]


def _ppmi(counts: object) -> object:
    from scipy import sparse

    matrix = sparse.coo_matrix(counts)
    rows = np.bincount(matrix.row, weights=matrix.data, minlength=matrix.shape[0])
    context = rows**_SMOOTHING
    context *= rows.sum() / context.sum()
    pmi = np.log(matrix.data * rows.sum() / (rows[matrix.row] * context[matrix.col]))
    positive = pmi > 0
    return sparse.csr_matrix(
        (pmi[positive], (matrix.row[positive], matrix.col[positive])), shape=matrix.shape
    )


def _tfidf(texts: list[str], dim: int, seed: int) -> FloatArray:
    from sklearn.feature_extraction.text import TfidfVectorizer

    # One-letter words count too: model numbers and years are often all that tells items apart.
    vectorizer = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    try:
        matrix = vectorizer.fit_transform(texts)
    except ValueError as error:
        raise ValueError(f"none of the {len(texts)} texts has a word") from error
    return _svd(matrix, dim, seed, "texts")


def _svd(matrix: object, dim: int, seed: int, of: str, root: bool = False) -> FloatArray:
    from sklearn.utils.extmath import randomized_svd

    rows, columns = matrix.shape  # type: ignore[attr-defined]  # scipy has no annotations
    possible = min(rows, columns)
    u, s, _ = randomized_svd(
        matrix, n_components=min(dim, possible), n_iter=7, random_state=seed, flip_sign=True
    )
    keep = s > s[0] * 1e-6 if s[0] > 0 else np.arange(len(s)) < 1
    if int(keep.sum()) < dim:
        warnings.warn(
            f"{dim} dimensions wanted: the {of} of {rows} items support {int(keep.sum())}",
            QuantizerWarning,
            stacklevel=3,
        )
    out = u[:, keep] * (np.sqrt(s[keep]) if root else s[keep])
    return np.ascontiguousarray(out, dtype=np.float32)


def _sentence_model(texts: list[str], model: str, dim: int | None, seed: int) -> FloatArray:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            f"text model {model!r} needs sentence-transformers: pip install 'gr-recsys[text]', or "
            "leave model out for TF-IDF"
        ) from error
    encoder = SentenceTransformer(model)
    out = np.asarray(encoder.encode(texts, show_progress_bar=False), dtype=np.float32)
    out[[not text.strip() for text in texts]] = 0.0
    if dim is None or dim >= out.shape[1]:
        return out
    return _svd(out - out.mean(axis=0), dim, seed, "text embeddings")


def _unit_rows(x: FloatArray) -> FloatArray:
    length = np.linalg.norm(x, axis=1, keepdims=True)
    # A text of words the decomposition dropped is rounding noise: it stays near zero.
    out: FloatArray = np.where(length > 1e-6, x / np.maximum(length, 1e-6), 0.0).astype(np.float32)
    return out
