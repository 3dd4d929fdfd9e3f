"""Data sets by name. `$GR_DATA` (or `root`) is a folder with one folder per data set.

Only `ml-100k` can be fetched; it is looked for in `$GR_DATA/ml-100k`, then in the cache, then at
GroupLens, then inside the package `recbole`, which carries the same events in another format. The
events, their order and the item titles are the same from every source, and so is `split_hash`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from gr.data.arrow_store import cache_folder
from gr.data.errors import DataError
from gr.data.readers import (
    read_kuairand,
    read_movielens,
    read_recbole,
    read_s3rec,
    read_user_items,
)
from gr.data.readers.item_json import read_item_json
from gr.data.readers.movielens import recbole_movie_items
from gr.data.schema import Interactions
from gr.data.sources import Source, mismatches
from gr.data.synthetic import SyntheticStream, synthetic_stream

log = logging.getLogger("gr.data")

ML_100K_SOURCES = (
    Source(
        label="GroupLens",
        url="https://files.grouplens.org/datasets/movielens/ml-100k.zip",
        inside="ml-100k",
        files={
            "u.data": "06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490",
            "u.item": "553841ebc7de3a0fd0d6b62a204ea30c1e651aacfb2814c7a6584ac52f2c5701",
            "u.user": "f120e114da2e8cf314fd28f99417c94ae9ddf1cb6db8ce0e4b5995d40e90e62c",
        },
    ),
    Source(
        label="package recbole==1.2.1",
        requirement="recbole==1.2.1",
        inside="recbole/dataset_example/ml-100k",
        files={
            "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
            "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
            "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
        },
    ),
)


def _read_ml_100k(folder: Path) -> Interactions:
    if (folder / "u.data").is_file():
        return read_movielens(folder)
    # Line by line, RecBole's file is GroupLens's u.data: the row order is the same as well.
    interactions = read_recbole(folder)
    if interactions.items is not None:
        interactions = replace(interactions, items=recbole_movie_items(interactions.items))
    return interactions


def _read_amazon_beauty(folder: Path) -> Interactions:
    items = read_item_json(folder / "Beauty_items.json", title_field="attributes")
    keywords = folder / "Beauty_keywords.txt"
    if keywords.is_file():
        lines = pa.array(keywords.read_text(encoding="utf-8").splitlines(), pa.string())
        pair = pc.extract_regex(lines, r"^(?P<asin>\S+) (?P<words>.*)$")
        # "|▁loss|▁brake": pieces of a word-piece tokenizer; ▁ starts a word.
        words = pc.replace_substring(pc.replace_substring(pair.field("words"), "|", ""), "▁", " ")
        at = pc.index_in(items["asin"], value_set=pair.field("asin"))
        column = pc.fill_null(pc.utf8_trim_whitespace(words.take(at.combine_chunks())), "")
        items = items.append_column("keywords", column)
    gaps = folder / "Beauty_timegaps.txt"
    return read_s3rec(folder / "Beauty.txt", gaps if gaps.is_file() else None, items)


def _read_kuairand(folder: Path) -> Interactions:
    # The published logs repeat a few rows: exactly, or within one second.
    return read_kuairand(folder, repair={"duplicates"})


def _read_amazon_scientific(folder: Path) -> Interactions:
    return read_user_items(folder / "Scientific.inter.json", folder / "Scientific.item.json")


@dataclass(frozen=True)
class Entry:
    """`any_of`: file patterns, one of which tells that a folder holds the data set."""

    any_of: tuple[str, ...]
    read: Callable[[Path], Interactions]
    sources: tuple[Source, ...] = ()


DATASETS: dict[str, Entry] = {
    "ml-100k": Entry(("u.data", "ml-100k.inter"), _read_ml_100k, ML_100K_SOURCES),
    "ml-1m": Entry(("ratings.dat", "interactions.parquet"), read_movielens),
    "ml-latest-small": Entry(("ratings.csv",), read_movielens),
    "amazon-beauty": Entry(("Beauty.txt",), _read_amazon_beauty),
    "amazon-scientific": Entry(("Scientific.inter.json",), _read_amazon_scientific),
    "kuairand": Entry(("log_*.csv", "*.tsv"), _read_kuairand),
}


# Made from a seed instead of read. The paper's stream at a size that two cores train on.
GENERATED: dict[str, SyntheticStream] = {
    "synthetic-stream": SyntheticStream(items=4_000, categories=100, records=20_000),
}


def load(name: str, root: str | Path | None = None) -> Interactions:
    """A named data set as `Interactions`; `root` stands in for `$GR_DATA`.

    Raises `DataError` for an unknown name, and where no source has the data: the message lists
    every source tried and why it failed.
    """
    if name in GENERATED:
        return replace(synthetic_stream(GENERATED[name]), name=name)
    if name not in DATASETS:
        known = sorted([*DATASETS, *GENERATED])
        raise DataError(f"unknown data set {name!r}, wanted one of {known}")
    entry = DATASETS[name]
    tried: list[str] = []
    base = root if root is not None else os.environ.get("GR_DATA") or None
    label = "root" if root is not None else "GR_DATA"
    if base is None:
        tried.append("GR_DATA: not set (wanted a folder with one folder per data set)")
    else:
        folder = Path(base) / name
        if any(any(folder.glob(pattern)) for pattern in entry.any_of):
            _warn_of_other_files(folder, entry)
            return replace(entry.read(folder), name=name)
        seen = "no such folder" if not folder.is_dir() else "none of the files it needs"
        tried.append(f"{label}: {folder}: {seen} (wanted {' or '.join(entry.any_of)})")

    for source in entry.sources:
        folder = _cached(name, source)
        if folder.is_dir() and not mismatches(folder, source.files):
            return replace(entry.read(folder), name=name)
    for source in entry.sources:
        folder = _cached(name, source)
        log.info("%s: fetching from %s into %s", name, source.label, folder)
        try:
            source.fetch(folder)
        except (DataError, OSError) as error:  # OSError: a cache that cannot be written
            tried.append(f"{source.label}: {error}")
            continue
        return replace(entry.read(folder), name=name)

    if not entry.sources:
        tried.append("no download: this data set's terms or host ask you to fetch it yourself")
    lines = "\n".join(f"  - {line}" for line in tried)
    raise DataError(
        f"data set {name!r} is not available:\n{lines}\n"
        f"Put its files into a folder {name}/ and set GR_DATA to the folder that holds it."
    )


def _cached(name: str, source: Source) -> Path:
    # One folder per source: a half-known mix of formats cannot arise.
    kind = "package" if source.requirement else "zip"
    return cache_folder() / "data" / f"{name}-{kind}"


def _warn_of_other_files(folder: Path, entry: Entry) -> None:
    """A user's own copy is used as it is; that it differs from the published one is said."""
    for source in entry.sources:
        if any((folder / file).is_file() for file in source.files):
            if problems := mismatches(folder, source.files):
                log.warning("%s is not the published data set: %s", folder, "; ".join(problems))
            return
