import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gr.tokenizer.quantizers import (
    AtomicQuantizer,
    LSHQuantizer,
    Quantizer,
    QuantizerWarning,
    ResidualKMeans,
    ShuffledQuantizer,
)
from gr.tokenizer.quantizers.clustering import _fill_empty, assign

BACKENDS = ["faiss", "sklearn"]

Points = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def points() -> Points:
    return np.random.default_rng(0).standard_normal((120, 6)).astype(np.float32)


def every_kind() -> list[Quantizer]:
    return [
        ResidualKMeans(codebook_size=(8, 4)),
        LSHQuantizer(codebook_size=(8, 4)),
        AtomicQuantizer(),
        AtomicQuantizer(capacity=150),
        ShuffledQuantizer(ResidualKMeans(codebook_size=(8, 4))),
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_are_the_nearest_centroids_level_by_level(points: Points, backend: str) -> None:
    quantizer = ResidualKMeans(codebook_size=(8, 4, 2), backend=backend).fit(points)
    codes = quantizer.encode(points)
    assert codes.dtype == np.int32 and quantizer.level_sizes == (8, 4, 2)
    assert quantizer.codebooks is not None
    for row, point in enumerate(points):
        residual = point
        for level, book in enumerate(quantizer.codebooks):
            code = int(((residual - book) ** 2).sum(axis=1).argmin())
            assert codes[row, level] == code
            residual = residual - book[code]
        assert np.allclose(quantizer.decode(codes[row : row + 1])[0], point - residual, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_error_falls_with_each_level_and_comes_near_scikit_learns(
    points: Points, backend: str
) -> None:
    from sklearn.cluster import KMeans

    quantizer = ResidualKMeans(codebook_size=(8, 8, 8), backend=backend).fit(points)
    codes = quantizer.encode(points)
    errors = [float(((points - quantizer.decode(codes[:, :m])) ** 2).sum()) for m in (1, 2, 3)]
    assert errors[0] > errors[1] > errors[2]
    best = KMeans(8, n_init=10, random_state=1).fit(points).inertia_
    assert best * 0.999 <= errors[0] <= best * 1.15  # one start instead of ten


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_seed_same_codes_and_codes_do_not_depend_on_batch_mates(
    points: Points, backend: str
) -> None:
    first = ResidualKMeans(codebook_size=(8, 4), seed=3, backend=backend).fit(points)
    again = ResidualKMeans(codebook_size=(8, 4), seed=3, backend=backend).fit(points)
    codes = first.encode(points)
    assert np.array_equal(codes, again.encode(points))
    one_by_one = np.concatenate([first.encode(points[i : i + 1]) for i in range(len(points))])
    assert np.array_equal(codes, one_by_one)
    other = ResidualKMeans(codebook_size=(8, 4), seed=4, backend=backend).fit(points)
    assert not np.array_equal(codes, other.encode(points))


@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_distinct_points_than_codes_are_exact_and_said(backend: str) -> None:
    distinct = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
    points = np.repeat(distinct, 7, axis=0)
    with pytest.warns(QuantizerWarning) as caught:
        quantizer = ResidualKMeans(codebook_size=(8, 4), backend=backend).fit(points)
    messages = [str(w.message) for w in caught]
    assert messages[0] == ("level 0: 5 distinct points (of 35) for 8 codes: 3 codes stay unused")
    assert messages[1].startswith("level 1: 1 distinct points (of 35) for 4 codes")
    codes = quantizer.encode(points)
    assert len(np.unique(codes[:, 0])) == 5
    assert np.array_equal(quantizer.decode(codes), points)
    every = np.stack(np.meshgrid(np.arange(8), np.arange(4)), axis=-1).reshape(-1, 2)
    assert np.isfinite(quantizer.decode(every)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_point(backend: str) -> None:
    with pytest.warns(QuantizerWarning, match="1 distinct points"):
        quantizer = ResidualKMeans(levels=2, codebook_size=4, backend=backend).fit([[1.0, 2.0]])
    assert quantizer.encode([[1.0, 2.0]]).tolist() == [[0, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_code_is_left_empty_on_lopsided_data(backend: str) -> None:
    rng = np.random.default_rng(2)
    lump = np.zeros((400, 4)) + 1e-3 * rng.standard_normal((400, 4))
    points = np.concatenate([lump, 1e3 * rng.standard_normal((20, 4))]).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantizer = ResidualKMeans(codebook_size=(16, 16), backend=backend).fit(points)
    codes = quantizer.encode(points)
    assert len(np.unique(codes[:, 0])) == 16
    assert np.isfinite(quantizer.decode(codes)).all()


def test_empty_and_broken_centroids_are_repaired(points: Points) -> None:
    centroids = np.repeat(points[:1], 10, axis=0)  # nine of ten can win nothing
    centroids[4] = np.nan
    repaired = _fill_empty(points, centroids)
    index, distance = assign(points, repaired)
    assert np.isfinite(repaired).all()
    assert np.bincount(index, minlength=10).min() > 0
    worse = assign(points, centroids[:1])[1].sum()
    assert distance.sum() < worse


@pytest.mark.parametrize("quantizer", every_kind(), ids=lambda q: type(q).__name__)
def test_save_and_load(quantizer: Quantizer, points: Points, tmp_path: Path) -> None:
    quantizer.fit(points)
    quantizer.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "quantizer.json",
        "quantizer.safetensors",
    ]
    for loaded in (
        Quantizer.from_pretrained(tmp_path),
        type(quantizer).from_pretrained(tmp_path),
    ):
        assert type(loaded) is type(quantizer)
        assert loaded.level_sizes == quantizer.level_sizes
        codes = quantizer.encode(points)
        assert np.array_equal(loaded.encode(points), codes)
        assert np.array_equal(loaded.encode(points + 0.1), quantizer.encode(points + 0.1))
        assert np.array_equal(loaded.decode(codes), quantizer.decode(codes))


@pytest.mark.parametrize("quantizer", every_kind(), ids=lambda q: type(q).__name__)
def test_bad_points_are_refused(quantizer: Quantizer, points: Points) -> None:
    with pytest.raises(RuntimeError, match="not fitted"):
        quantizer.encode(points)
    with pytest.raises(RuntimeError, match="not fitted"):
        quantizer.save_pretrained("never-written")
    broken = points.copy()
    broken[7, 2] = np.nan
    with pytest.raises(ValueError, match=r"x\[7, 2\] is nan"):
        quantizer.fit(broken)
    with pytest.raises(ValueError, match="at least one point"):
        quantizer.fit(points[:0])
    quantizer.fit(points)
    with pytest.raises(ValueError, match="x has 5 dimensions: the quantizer has 6"):
        quantizer.encode(points[:, :5])
    with pytest.raises(ValueError, match=r"codes\[0, 0\] is 999"):
        quantizer.decode([[999]])


def test_loading_says_what_is_wrong(points: Points, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"quantizer\.json is missing"):
        Quantizer.from_pretrained(tmp_path)
    LSHQuantizer(codebook_size=(4,)).fit(points).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a LSHQuantizer, not a ResidualKMeans"):
        ResidualKMeans.from_pretrained(tmp_path)
    about = json.loads((tmp_path / "quantizer.json").read_text())
    (tmp_path / "quantizer.json").write_text(json.dumps({**about, "kind": "tree"}))
    with pytest.raises(ValueError, match="kind 'tree'"):
        Quantizer.from_pretrained(tmp_path)
    (tmp_path / "quantizer.json").write_text(json.dumps(about)[:20])
    with pytest.raises(ValueError, match=r"quantizer\.json is not JSON"):
        Quantizer.from_pretrained(tmp_path)
    (tmp_path / "quantizer.json").write_text(json.dumps(about))
    whole = (tmp_path / "quantizer.safetensors").read_bytes()
    (tmp_path / "quantizer.safetensors").write_bytes(whole[:40])
    with pytest.raises(ValueError, match=r"quantizer\.safetensors is not a safetensors file"):
        Quantizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("exponent", [-100, 70])
def test_codes_do_not_depend_on_the_scale(points: Points, backend: str, exponent: int) -> None:
    """Squares of such values leave float32; faiss ended the process."""
    codes = ResidualKMeans(codebook_size=(8, 4), backend=backend).fit(points).encode(points)
    scaled = np.ldexp(points, exponent)
    quantizer = ResidualKMeans(codebook_size=(8, 4), backend=backend).fit(scaled)
    assert np.array_equal(quantizer.encode(scaled), codes)


def test_level_sizes() -> None:
    assert ResidualKMeans().level_sizes == (256, 256, 256)
    assert ResidualKMeans(2, 16).level_sizes == (16, 16)
    assert ResidualKMeans(codebook_size=[64, 32]).level_sizes == (64, 32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"levels": 2, "codebook_size": (8, 8, 8)}, "levels is 2"),
        ({"codebook_size": (8, 0)}, r"\(8, 0\)"),
        ({"levels": 0}, "wanted one or more"),
        ({"backend": "cuml"}, "'cuml'"),
        ({"iterations": 0}, "iterations is 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResidualKMeans(**settings)


def test_lsh_codes_are_the_signs_of_projections(points: Points) -> None:
    quantizer = LSHQuantizer(codebook_size=(8, 4), seed=5).fit(points)
    assert quantizer.planes is not None
    signs = (points - points.mean(axis=0)) @ quantizer.planes > 0
    wanted = [
        [
            int("".join("01"[int(b)] for b in bits[:3]), 2),
            int("".join("01"[int(b)] for b in bits[3:]), 2),
        ]
        for bits in signs
    ]
    assert quantizer.encode(points).tolist() == wanted
    codes = quantizer.encode(points)
    variance = float(((points - points.mean(axis=0)) ** 2).sum())
    errors = [float(((points - quantizer.decode(codes[:, :m])) ** 2).sum()) for m in (1, 2)]
    assert variance > errors[0] > errors[1]
    with pytest.raises(ValueError, match="power of two"):
        LSHQuantizer(codebook_size=(8, 6))


def test_atomic_gives_every_item_its_own_code(points: Points) -> None:
    doubled = np.concatenate([points[:3], points[:3], points[3:]])  # equal embeddings
    quantizer = AtomicQuantizer().fit(doubled)
    assert quantizer.level_sizes == (len(doubled),)
    assert quantizer.encode(doubled)[:, 0].tolist() == list(range(len(doubled)))
    assert quantizer.encode(doubled[::-1])[:, 0].tolist()[:4] == [122, 121, 120, 119]
    assert np.array_equal(quantizer.decode(quantizer.encode(doubled)), doubled)
    assert quantizer.encode(points[50:51] + 1e-4).tolist() == [[53]]
    with pytest.raises(ValueError, match="capacity is 5"):
        AtomicQuantizer(5).fit(points)


def test_shuffled_keeps_the_ids_and_loses_the_meaning(points: Points) -> None:
    base = ResidualKMeans(codebook_size=(8, 4)).fit(points).encode(points)
    quantizer = ShuffledQuantizer(ResidualKMeans(codebook_size=(8, 4)), seed=1).fit(points)
    codes = quantizer.encode(points)
    assert sorted(map(tuple, codes.tolist())) == sorted(map(tuple, base.tolist()))
    assert (codes[:, 0] == base[:, 0]).mean() < 0.4
    order = np.random.default_rng(0).permutation(len(points))
    assert np.array_equal(quantizer.encode(points[order]), codes[order])
