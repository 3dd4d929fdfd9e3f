import json
from pathlib import Path

import numpy as np
import pytest

from gr.tokenizer import (
    ItemTable,
    LSHQuantizer,
    ResidualKMeans,
    ShuffledQuantizer,
    build_catalog,
    catalog_report,
    quality_report,
)


def clustered(n: int = 80) -> np.ndarray:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((8, 5)) * 5
    return (centres[rng.integers(0, 8, n)] + rng.standard_normal((n, 5))).astype(np.float32)


def test_counts_by_hand() -> None:
    codes = [[0, 0], [0, 0], [0, 0], [0, 1], [1, 1], [1, 1], [2, 0], [2, 1]]
    report = quality_report(codes, (4, 2))
    assert (report.items, report.distinct_ids) == (8, 5)
    assert report.collision_rate == 5 / 8
    assert report.largest_bucket == 3
    assert report.bucket_sizes == (0, 3, 1, 1)
    first, second = report.levels
    assert first.usage == 3 / 4 and second.usage == 1.0
    shares = np.array([4, 2, 2]) / 8
    assert first.perplexity == pytest.approx(np.prod(shares**-shares))
    assert second.perplexity == pytest.approx(2.0)
    assert first.pairs_sharing_prefix == pytest.approx((4 * 3 + 2 + 2) / 56)
    assert second.pairs_sharing_prefix == pytest.approx((3 * 2 + 2) / 56)
    assert first.error is None and first.neighbours_sharing_prefix is None
    assert report.code_counts == ((4, 2, 2, 0), (4, 4))


def test_errors_and_neighbours_by_brute_force() -> None:
    x = clustered()
    quantizer = ResidualKMeans(codebook_size=(6, 4)).fit(x)
    codes = quantizer.encode(x)
    report = quality_report(codes, (6, 4), embeddings=x, quantizer=quantizer, neighbours=3)
    distance = ((x[:, None].astype(float) - x[None]) ** 2).sum(axis=-1)
    np.fill_diagonal(distance, np.inf)
    nearest = distance.argsort(axis=1)[:, :3]
    variance = ((x - x.mean(axis=0)) ** 2).sum()
    for level, quality in enumerate(report.levels):
        prefix = codes[:, : level + 1]
        same = (prefix[nearest] == prefix[:, None]).all(axis=-1).mean()
        assert quality.neighbours_sharing_prefix == pytest.approx(same)
        error = ((x - quantizer.decode(prefix)) ** 2).sum() / variance
        assert quality.error == pytest.approx(error, rel=1e-4)


def test_meaning_shows_and_its_absence_too() -> None:
    x = clustered()

    def lift(quantizer: ResidualKMeans | LSHQuantizer | ShuffledQuantizer) -> float:
        codes = quantizer.fit(x).encode(x)
        level = quality_report(codes, quantizer.level_sizes, embeddings=x).levels[0]
        assert level.neighbours_sharing_prefix is not None
        return level.neighbours_sharing_prefix / level.pairs_sharing_prefix

    semantic = ResidualKMeans(codebook_size=(8, 4))
    assert lift(semantic) > 3
    assert lift(LSHQuantizer(codebook_size=(8, 4))) > 1.5
    assert 0.6 < lift(ShuffledQuantizer(ResidualKMeans(codebook_size=(8, 4)))) < 1.5


def test_catalogue_with_an_extra_level_and_plots(tmp_path: Path) -> None:
    x = clustered()
    quantizer = ResidualKMeans(codebook_size=(6, 4))
    catalog = build_catalog(ItemTable([str(i) for i in range(len(x))], x), quantizer, "extra_level")
    report = catalog_report(catalog, embeddings=x, quantizer=quantizer)
    assert report.collision_rate == 0.0
    assert [level.error is None for level in report.levels] == [False, False, True]
    json.dumps(report.to_dict())
    files = report.plot(tmp_path)
    assert len(files) == 4
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == sorted(files)
    with pytest.raises(KeyError, match="'film'"):
        catalog_report(catalog, "film")


def test_one_item_and_none() -> None:
    report = quality_report([[0]], (1,), embeddings=[[1.0]])
    assert report.levels[0].perplexity == 1.0 and report.collision_rate == 0.0
    with pytest.raises(ValueError, match="neighbours is 0: wanted a number >= 1"):
        quality_report([[0], [0]], (1,), embeddings=[[1.0], [2.0]], neighbours=0)
    with pytest.raises(ValueError, match="no rows"):
        quality_report(np.zeros((0, 1), dtype=int), (1,))
