"""MovieLens as GroupLens publishes it: 100K, 1M and the "latest" releases, in one reader.

release  events                          items                users
100K     u.data (tabs, no header)        u.item (|, latin-1)  u.user (|)
1M       ratings.dat (::)                movies.dat (latin-1) users.dat
latest   ratings.csv                     movies.csv           -
order    interactions.parquet            movies.dat           users.dat
         (user_id, item_id, position: the 1M events where only their order is known)

Items get `item_id, title, year, genres`: the title as published ("Toy Story (1995)", white space
tidied), the year out of it, genres separated by spaces.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gr.data import columns as cols
from gr.data.checks import Repairs, build_interactions
from gr.data.errors import DataError
from gr.data.schema import Interactions
from gr.data.text_files import TextFormat, missing_column, read_delimited

GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)  # fmt: skip
RATING = ("user_id", "item_id", "value", "timestamp")
USER_100K = ("user_id", "age", "gender", "occupation", "zip_code")
USER_1M = ("user_id", "gender", "age", "occupation", "zip_code")


def read_movielens(
    folder: str | Path, *, repair: Iterable[str] = (), name: str | None = None
) -> Interactions:
    """Read an unpacked MovieLens release; which one is told by the files in `folder`.

    `value` is the rating and `action` is "interact" (see `actions_from_value`). Files are read as
    UTF-8 where they are valid UTF-8 and as latin-1, the encoding of the old releases, elsewhere.
    Raises `DataError` where no release is recognised, and for everything `read_table` refuses.
    """
    folder = Path(folder)
    fixes = Repairs.of(repair)
    users: pa.Table | None = None
    if (events := folder / "u.data").is_file():
        raw = read_delimited(events, TextFormat("\t", header=RATING, quoted=False), fixes, 4)
        items = _items_100k(folder / "u.item", fixes)
        users = _users(folder / "u.user", "|", USER_100K, fixes)
    elif (events := folder / "ratings.dat").is_file():
        raw = read_delimited(events, TextFormat("::", header=RATING, quoted=False), fixes, 4)
        items = _items_1m(folder / "movies.dat", fixes)
        users = _users(folder / "users.dat", "::", USER_1M, fixes)
    elif (events := folder / "ratings.csv").is_file():
        raw = _named(
            read_delimited(events, TextFormat(","), fixes),
            {
                "userId": "user_id",
                "movieId": "item_id",
                "rating": "value",
                "timestamp": "timestamp",
            },
            events,
        )
        items = _items_latest(folder / "movies.csv", fixes)
    elif (events := folder / "interactions.parquet").is_file():
        raw = _named(
            pq.read_table(events),
            {"user_id": "user_id", "item_id": "item_id", "position": "order"},
            events,
        )
        items = _items_1m(folder / "movies.dat", fixes)
        users = _users(folder / "users.dat", "::", USER_1M, fixes)
    else:
        seen = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise DataError(
            f"{folder}: not a MovieLens release: wanted u.data, ratings.dat, ratings.csv or "
            f"interactions.parquet, seen {seen}"
        )
    return build_interactions(
        raw, name or folder.name, str(events), items=items, users=users, repairs=fixes
    )


def movie_items(
    item_id: pa.ChunkedArray, title: pa.ChunkedArray, genres: pa.ChunkedArray
) -> pa.Table:
    """The item table of every MovieLens release; `genres` may be separated by `|` or spaces."""
    title = pc.utf8_trim_whitespace(pc.replace_substring_regex(title, r"\s+", " "))
    # The greedy prefix finds the last year: titles such as "1984 (1956)" or "X (1995) (V)".
    found = pc.extract_regex(title, r".*\((?P<year>\d{4})\)")
    year = pc.fill_null(pc.struct_field(found, "year"), "")
    genres = pc.if_else(pc.equal(genres, "(no genres listed)"), "", genres)
    genres = pc.replace_substring(genres, "|", " ")
    return pa.table([item_id, title, year, genres], names=["item_id", "title", "year", "genres"])


def recbole_movie_items(items: pa.Table) -> pa.Table:
    """The same table out of RecBole's `ml-100k.item`, which cuts the year off the title.

    Gluing it on again gives back the published titles, also of the two rows whose year it misread
    (item 267, "unknown", has no year and is misspelt; item 1412 ends in "(1995) (V)").
    """
    year = items["release_year"]
    title = pc.binary_join_element_wise(items["title"], " (", year, ")", "")
    nameless = pc.equal(items["title"], "unkonwn")
    title = pc.if_else(nameless, "unknown", title)
    return movie_items(items["item_id"], title, items["class"])


def _encoding(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"{path}: no such file; the release keeps item and user metadata there")
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8"


def _items_100k(path: Path, fixes: Repairs) -> pa.Table:
    header = ("item_id", "title", "release", "video_release", "url", *GENRES_100K)
    form = TextFormat("|", _encoding(path), header, quoted=False)
    table = read_delimited(path, form, fixes, len(header))
    flags = [pc.equal(table[genre], "1").to_numpy() for genre in GENRES_100K]
    genres = cols.join_flags(flags, GENRES_100K, " ", "")
    return movie_items(table["item_id"], table["title"], genres)


def _items_1m(path: Path, fixes: Repairs) -> pa.Table:
    form = TextFormat("::", _encoding(path), ("item_id", "title", "genres"), quoted=False)
    table = read_delimited(path, form, fixes, 3)
    return movie_items(table["item_id"], table["title"], table["genres"])


def _items_latest(path: Path, fixes: Repairs) -> pa.Table:
    table = _named(
        read_delimited(path, TextFormat(",", _encoding(path)), fixes),
        {"movieId": "item_id", "title": "title", "genres": "genres"},
        path,
    )
    return movie_items(table["item_id"], table["title"], table["genres"])


def _users(path: Path, delimiter: str, header: tuple[str, ...], fixes: Repairs) -> pa.Table:
    form = TextFormat(delimiter, _encoding(path), header, quoted=False)
    return read_delimited(path, form, fixes, len(header))


def _named(table: pa.Table, names: dict[str, str], path: Path) -> pa.Table:
    for source, name in names.items():
        if source not in table.column_names:
            raise missing_column(name, source, table.column_names, str(path))
    return table.select(list(names)).rename_columns(list(names.values()))
