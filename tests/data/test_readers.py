"""Every reader on a few hand-written rows of its format."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gr.data import (
    DataError,
    Interactions,
    read_kuairand,
    read_movielens,
    read_recbole,
    read_s3rec,
    read_table,
    read_user_items,
)

DAY = 86_400
T0 = 881_250_949


def rows(interactions: Interactions, *names: str) -> list[tuple[object, ...]]:
    columns = [interactions.events[name].to_pylist() for name in names]
    return list(zip(*columns, strict=True))


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def test_csv_with_column_mapping(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.csv",
        f'uid,"thing",when,stars,what\n007,"a,b",{T0},4.5,view\n8,c,{T0 + 1},1,buy\n',
    )
    got = read_table(
        path,
        {
            "user_id": "uid",
            "item_id": "thing",
            "timestamp": "when",
            "value": "stars",
            "action": "what",
        },
    )
    assert rows(got, "user_id", "item_id", "timestamp", "action", "value") == [
        ("007", "a,b", T0, "view", 4.5),
        ("8", "c", T0 + 1, "buy", 1.0),
    ]
    assert got.name == "log" and got.time_column == "timestamp" and got.repairs == {}
    assert got.events.schema == pa.schema(
        [
            ("user_id", pa.string()),
            ("item_id", pa.string()),
            ("timestamp", pa.int64()),
            ("action", pa.string()),
            ("value", pa.float64()),
        ]
    )
    got.validate()


@pytest.mark.parametrize("form", ["csv", "tsv", "dat", "jsonl", "parquet"])
def test_one_table_in_every_format(tmp_path: Path, form: str) -> None:
    data = {"user_id": [1, 2, 1], "item_id": [10, 10, 11], "timestamp": [T0, T0 + 1, T0 + 2]}
    path = tmp_path / f"events.{form}"
    if form == "parquet":
        pq.write_table(pa.table(data), path)
    elif form == "jsonl":
        lines = [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
        write(path, "\n".join(json.dumps(line) for line in lines))
    else:
        delimiter = {"csv": ",", "tsv": "\t", "dat": "::"}[form]
        lines_ = [delimiter.join(data)]
        lines_ += [delimiter.join(map(str, row)) for row in zip(*data.values(), strict=True)]
        write(path, "\r\n".join(lines_) + "\r\n")
    got = read_table(path)
    assert rows(got, "user_id", "item_id", "timestamp", "action") == [
        ("1", "10", T0, "interact"),
        ("2", "10", T0 + 1, "interact"),
        ("1", "11", T0 + 2, "interact"),
    ]


def test_byte_order_mark_and_utf8_text_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", f"\ufeffuser_id,item_id,timestamp\nü,é,{T0}\n")
    assert rows(read_table(path), "user_id", "item_id") == [("ü", "é")]


def test_parquet_timestamps_become_seconds(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    times = pa.array([T0 * 1_000_000 + 999_999], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"user_id": ["a"], "item_id": ["b"], "timestamp": times}), path)
    assert rows(read_table(path), "timestamp") == [(T0,)]


def test_finer_times_order_the_events_of_one_second(tmp_path: Path) -> None:
    """Of typed timestamps and of fractions; a type's unit is not applied a second time."""
    path = tmp_path / "fine.parquet"
    ticks = [T0 * 1000 + 900, T0 * 1000 + 500, T0 * 1000 + 100]
    typed = pa.array(ticks, pa.timestamp("ms"))
    ids = {"user_id": ["a", "a", "a"], "item_id": ["late", "middle", "early"]}
    wanted = [("early", T0), ("middle", T0), ("late", T0)]
    pq.write_table(pa.table({**ids, "timestamp": typed}), path)
    for unit in ("s", "ms"):
        assert rows(read_table(path, time_unit=unit), "item_id", "timestamp") == wanted
    pq.write_table(pa.table({**ids, "timestamp": [tick / 1000 for tick in ticks]}), path)
    got = read_table(path, repair={"fractional_seconds"})
    assert rows(got, "item_id", "timestamp") == wanted
    pq.write_table(pa.table({**ids, "order": typed}), path)
    assert rows(read_table(path), "order") == [(tick,) for tick in ticks]
    pq.write_table(pa.table({**ids, "timestamp": pa.array([-500] * 3, pa.timestamp("ms"))}), path)
    with pytest.raises(DataError, match="timestamp -1 is negative"):
        read_table(path)


def test_old_mac_line_ends_and_quoted_line_breaks(tmp_path: Path) -> None:
    path = write(tmp_path / "mac.csv", f"user_id,item_id,timestamp\ra,x,{T0}\rb,y,{T0}\r")
    assert rows(read_table(path), "user_id", "item_id") == [("a", "x"), ("b", "y")]
    text = f'user_id,item_id,timestamp,note\na,x,{T0},"two\nlines, ""so"""\nb,5" disk,{T0},\n'
    path = write(tmp_path / "quoted.csv", text)
    assert rows(read_table(path), "user_id", "item_id") == [("a", "x"), ("b", '5" disk')]


def test_items_file_with_names_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", f"user_id,film,timestamp\na,x,{T0}\n")
    items = write(tmp_path / "films.tsv", "genre\tname\tfilm\nnoir\tThe X\tx\n")
    columns = {"item_id": "film", "title": "name"}
    got = read_table(path, columns, items=items)
    assert got.items is not None
    assert got.items.to_pylist() == [{"item_id": "x", "title": "The X", "genre": "noir"}]
    with pytest.raises(DataError, match=r"films\.tsv: no column for title; the file has"):
        read_table(path, {"item_id": "film"}, items=items)


def test_order_column_instead_of_a_timestamp(tmp_path: Path) -> None:
    path = write(tmp_path / "o.csv", "user_id,item_id,position\na,x,0\na,y,1\n")
    got = read_table(path, {"order": "position"})
    assert got.time_column == "order"
    assert rows(got, "item_id", "order") == [("x", 0), ("y", 1)]
    got.validate()


def test_items_file_beside_the_events(tmp_path: Path) -> None:
    path = write(tmp_path / "e.csv", f"user_id,item_id,timestamp,scenario\na,x,{T0},home\n")
    items = write(tmp_path / "i.csv", "item_id,title,brand\nx,The X,\ny,The Y,B\n")
    got = read_table(path, items=items)
    assert got.items is not None
    assert got.items.to_pylist() == [
        {"item_id": "x", "title": "The X", "brand": ""},
        {"item_id": "y", "title": "The Y", "brand": "B"},
    ]
    assert rows(got, "scenario") == [("home",)]


def test_milliseconds_keep_the_order_within_one_second(tmp_path: Path) -> None:
    path = write(
        tmp_path / "ms.csv",
        f"user_id,item_id,timestamp\na,late,{T0 * 1000 + 900}\na,early,{T0 * 1000 + 100}\n",
    )
    got = read_table(path, time_unit="ms")
    assert rows(got, "item_id", "timestamp") == [("early", T0), ("late", T0)]


RECBOLE = (
    "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    f"u1\ti2\t3\t{T0}\nu1\ti1\t5.0\t{T0 + 5}.0\n"
)


def test_recbole_folder(tmp_path: Path) -> None:
    write(tmp_path / "toy.inter", RECBOLE)
    write(
        tmp_path / "toy.item",
        'item_id:token\tmovie_title:token_seq\tclass:token_seq\ni1\tThe "One\tA B\ni2\tTwo\tC\n',
    )
    write(tmp_path / "toy.user", "user_id:token\tage:token\nu1\t24\n")
    got = read_recbole(tmp_path)
    assert got.name == "toy"
    assert rows(got, "user_id", "item_id", "timestamp", "value") == [
        ("u1", "i2", T0, 3.0),
        ("u1", "i1", T0 + 5, 5.0),
    ]
    assert got.items is not None and got.users is not None
    assert got.items.to_pylist()[0] == {"item_id": "i1", "title": 'The "One', "class": "A B"}
    assert got.users.to_pylist() == [{"user_id": "u1", "age": "24"}]
    assert read_recbole(tmp_path / "toy.inter").events == got.events


def test_recbole_header_without_types(tmp_path: Path) -> None:
    path = write(tmp_path / "toy.inter", f"user_id\titem_id\ttimestamp\na\tb\t{T0}\n")
    with pytest.raises(DataError, match=r"toy\.inter: header field 'user_id' has no type"):
        read_recbole(path)
    (tmp_path / "other.inter").write_text("x")
    with pytest.raises(DataError, match=r"2 files \*\.inter .* wanted exactly one"):
        read_recbole(tmp_path)


def ml_100k(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    write(folder / "u.data", f"1\t2\t3\t{T0}\n1\t1\t4\t{T0}\n")
    flags = ["0"] * 19
    toy, unknown = flags.copy(), flags.copy()
    toy[3] = toy[4] = toy[5] = "1"
    unknown[0] = "1"
    lines = [
        f"1|Misérables,  Les (1995)|01-Jan-1995||http://x|{'|'.join(toy)}",
        f"2|unknown||||{'|'.join(unknown)}",
    ]
    write(folder / "u.item", "\n".join(lines) + "\n", "latin-1")
    write(folder / "u.user", "1|24|M|technician|85711\n")
    return folder


def test_movielens_100k_reads_latin_1_and_genre_flags(tmp_path: Path) -> None:
    got = read_movielens(ml_100k(tmp_path / "ml-100k"))
    assert rows(got, "user_id", "item_id", "timestamp", "value", "action") == [
        ("1", "2", T0, 3.0, "interact"),
        ("1", "1", T0, 4.0, "interact"),
    ]
    assert got.items is not None and got.users is not None
    assert got.items.to_pylist() == [
        {
            "item_id": "1",
            "title": "Misérables, Les (1995)",
            "year": "1995",
            "genres": "Animation Children's Comedy",
        },
        {"item_id": "2", "title": "unknown", "year": "", "genres": "unknown"},
    ]
    assert got.users.column_names == ["user_id", "age", "gender", "occupation", "zip_code"]


def test_movielens_1m(tmp_path: Path) -> None:
    write(tmp_path / "ratings.dat", f"1::1193::5::{T0}\n")
    write(tmp_path / "movies.dat", "1193::Cité: 1984 (1956)::Drama|Sci-Fi\n", "latin-1")
    write(tmp_path / "users.dat", "1::F::1::10::48067\n")
    got = read_movielens(tmp_path, name="ml-1m")
    assert rows(got, "user_id", "item_id", "value") == [("1", "1193", 5.0)]
    assert got.items is not None and got.users is not None
    assert got.items.to_pylist() == [
        {
            "item_id": "1193",
            "title": "Cité: 1984 (1956)",
            "year": "1956",
            "genres": "Drama Sci-Fi",
        }
    ]
    assert got.users.to_pylist()[0]["gender"] == "F"


def test_movielens_latest(tmp_path: Path) -> None:
    write(tmp_path / "ratings.csv", f"userId,movieId,rating,timestamp\r\n1,1,4.5,{T0}\r\n")
    write(
        tmp_path / "movies.csv",
        'movieId,title,genres\r\n1,"Net, The (1995)",Action|Crime\r\n2,B5,(no genres listed)\r\n',
    )
    got = read_movielens(tmp_path)
    assert rows(got, "item_id", "value", "timestamp") == [("1", 4.5, T0)]
    assert got.items is not None
    assert got.items["title"].to_pylist() == ["Net, The (1995)", "B5"]
    assert got.items["genres"].to_pylist() == ["Action Crime", ""]


def test_movielens_order_only(tmp_path: Path) -> None:
    data = {"user_id": [1, 1], "item_id": [7, 8], "position": [1, 0]}
    pq.write_table(pa.table(data), tmp_path / "interactions.parquet")
    write(tmp_path / "movies.dat", "7::A (2000)::Drama\n8::B (2001)::Drama\n")
    write(tmp_path / "users.dat", "1::F::1::10::48067\n")
    assert rows(read_movielens(tmp_path), "item_id", "order") == [("7", 1), ("8", 0)]


def test_movielens_folder_without_a_release(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("x")
    with pytest.raises(DataError, match=r"not a MovieLens release.*seen \['readme.txt'\]"):
        read_movielens(tmp_path)
    write(tmp_path / "u.data", f"1\t2\t3\t{T0}\n")
    with pytest.raises(DataError, match=r"u\.item: no such file"):
        read_movielens(tmp_path)


def test_s3rec_sequences(tmp_path: Path) -> None:
    path = write(tmp_path / "B.txt", "1 5 6 5\n2 6\n")
    got = read_s3rec(path)
    assert rows(got, "user_id", "item_id", "order") == [
        ("1", "5", 0),
        ("1", "6", 1),
        ("1", "5", 2),
        ("2", "6", 0),
    ]
    gaps = write(tmp_path / "gaps.txt", f"1 5 6 5\t0 {DAY} 0\n2 6\t0\n")
    items = write(
        tmp_path / "i.json", '{"5": {"title": "V"}, "6": {"title": "VI", "b": ["x","y"]}}'
    )
    timed = read_s3rec(path, gaps, items)
    assert rows(timed, "item_id", "timestamp") == [("5", 0), ("6", DAY), ("5", DAY), ("6", 0)]
    assert timed.relative_time and not got.relative_time
    assert timed.items is not None
    assert timed.items.to_pylist()[1] == {"item_id": "6", "title": "VI", "b": "x, y"}


@pytest.mark.parametrize(
    ("sequences", "gaps", "message"),
    [
        ("1 5\n2\n", None, r"line 2: '2' has a user and no items"),
        ("1 5\n1 6\n", None, r"user '1' has 2 lines, wanted 1"),
        ("1,5,6\n", None, r"line 1: '1,5,6' has ','.* separated by spaces"),
        ("1 5 6\n", "1 5 6\t0\n", r"line 1: 1 gaps for 2 items"),
        ("1 5 6\n", "1 5 7\t0 0\n", r"users or items differ"),
        ("1 5 6\n", "1 5 6 0 0\n", r"line 1 has 1 tab separated parts, wanted 2"),
        ("1 5\n2 5 6\n", "1 5\t0\n2 5 6\t0 -3\n", r"line 2: negative gap -3"),
        ("1 5\n", "1 5\tx\n", r"a gap is not a whole number of seconds.*x"),
        ("1 5\n\n2\n", None, r"line 2: '' has a user and no items"),
    ],
)
def test_s3rec_bad_lines(tmp_path: Path, sequences: str, gaps: str | None, message: str) -> None:
    path = write(tmp_path / "s.txt", sequences)
    gap_path = write(tmp_path / "g.txt", gaps) if gaps else None
    with pytest.raises(DataError, match=message):
        read_s3rec(path, gap_path)


def test_user_items_json(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", '\ufeff{"a": [3, 1, 3], "b": [1]}')  # a byte order mark
    items = write(tmp_path / "i.json", '{"1": {"title": "one"}, "3": {"title": "three"}}')
    got = read_user_items(path, items)
    assert rows(got, "user_id", "item_id", "order") == [
        ("a", "3", 0),
        ("a", "1", 1),
        ("a", "3", 2),
        ("b", "1", 0),
    ]
    assert got.items is not None and got.items["title"].to_pylist() == ["one", "three"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"holds a list, wanted an object"),
        ("{}", r"the object is empty"),
        ('{"a": 3}', r"user 'a' has int '3', wanted a list"),
        ('{"a": [1],\n "b": [1, "x"]}', r"user 'b' has items of mixed types \['int', 'str'\]"),
        ('{"a": [1], "b": ["x"]}', r"text for some users and numbers for others"),
        ('{"a": [1.5]}', r"user 'a' has items of mixed types \['float'\]"),
        ('{"a": [1]\n "b"}', r"line 2: not JSON"),
        ('{"a": []}', r"user 'a' has no events"),
        ('{"a": [1], "b": [2], "a": [3]}', r"key 'a' comes 2 times in one object, wanted once"),
        ('{"a": [9223372036854775808]}', r"user 'a' has item 9223372036854775808, wanted text or"),
        ("", r"the file is empty"),
    ],
)
def test_user_items_bad_json(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.json: .*{message}"):
        read_user_items(write(tmp_path / "x.json", text))


KUAI = (
    "user_id\tvideo_id\ttime_ms\tis_click\tis_like\tlong_view\tplay_time_ms\ttab\n"
    f"1\t9\t{T0 * 1000 + 700}\t1\t0\t1\t2500\t4\n"
    f"1\t8\t{T0 * 1000 + 300}\t1\t1\t0\t0\t1\n"
    f"2\t8\t{T0 * 1000}\t0\t0\t0\t10\t1\n"
)


def test_kuairand_milliseconds_and_action_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "log.tsv", KUAI)
    got = read_kuairand(path)
    assert rows(got, "user_id", "item_id", "timestamp", "action", "value", "scenario") == [
        ("2", "8", T0, "skip", 0.01, "1"),
        ("1", "8", T0, "like", 0.0, "1"),
        ("1", "9", T0, "long_view", 2.5, "4"),
    ]
    every = read_kuairand(path, combine="all")
    assert rows(every, "action") == [("skip",), ("like+click",), ("long_view+click",)]
    own = read_kuairand(tmp_path, actions=[("is_click", "tap")])
    assert rows(own, "action") == [("skip",), ("tap",), ("tap",)]


def test_kuairand_label_column(tmp_path: Path) -> None:
    text = f"user_id\tvideo_id\ttime_ms\tis_click\tlabel\n1\t9\t{T0 * 1000}\t1\t0\n"
    assert rows(read_kuairand(write(tmp_path / "k.tsv", text)), "action") == [("hate",)]


def test_kuairand_bad_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "k.tsv", KUAI.replace("\t0\t1\t2500", "\t2\t1\t2500"))
    with pytest.raises(DataError, match=r"k\.tsv: data row 1: is_like is '2', wanted 0 or 1"):
        read_kuairand(path)
    with pytest.raises(DataError, match=r"no column for action 'x' \(asked for as 'is_clik'\)"):
        read_kuairand(path, actions=[("is_clik", "x")])
    with pytest.raises(DataError, match=r"no log_\*\.csv"):
        read_kuairand(ml_100k(tmp_path / "empty"))
