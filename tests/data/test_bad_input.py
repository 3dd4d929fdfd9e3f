"""Each kind of bad input has an error that names file, row, value seen and value wanted.

Where a repair exists, the same input passes with it and the repair is counted.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gr.data import DataError, Interactions, read_recbole, read_table

T0 = 881_250_949
HEAD = "user_id,item_id,timestamp\n"
GOOD = f"a,x,{T0}\n"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def events(interactions: Interactions) -> list[tuple[str, str, int]]:
    table = interactions.events
    return list(
        zip(
            *(table[c].to_pylist() for c in ("user_id", "item_id", "timestamp")),
            strict=True,
        )
    )


REPAIRABLE = [
    # (repair, file content, message, events after the repair, count)
    ("nan", HEAD + GOOD + f"a,,{T0}\n", r"data row 2: item_id is missing", [("a", "x", T0)], 1),
    ("nan", HEAD + GOOD + "a,y,NaN\n", r"data row 2: timestamp is missing", [("a", "x", T0)], 1),
    (
        "negative",
        HEAD + GOOD + "a,y,-5\n",
        r"data row 2: timestamp -5 is negative, wanted unix seconds",
        [("a", "x", T0)],
        1,
    ),
    (
        "future",
        HEAD + GOOD + "a,y,9000000000\n",
        r"data row 2: timestamp 9000000000 lies after now",
        [("a", "x", T0)],
        1,
    ),
    (
        "milliseconds",
        HEAD + GOOD + f"a,y,{T0 + 1}500\n",
        rf"data row 2: timestamp {T0 + 1}500 looks like milliseconds, wanted unix seconds; 1 rows",
        [("a", "x", T0), ("a", "y", T0 + 1)],
        1,
    ),
    (
        "duplicates",
        HEAD + GOOD + f"b,x,{T0}\n" + GOOD + GOOD,
        r"data row 3 repeats data row 1 \(user_id='a', item_id='x', .*2 duplicate events",
        [("a", "x", T0), ("b", "x", T0)],
        2,
    ),
    (
        "fractional_seconds",
        HEAD + f"a,x,{T0}.75\n",
        rf"data row 1: timestamp is {T0}\.75, wanted a whole number",
        [("a", "x", T0)],
        1,
    ),
    (
        "trailing_delimiter",
        HEAD + f"a,x,{T0},\nb,x,{T0},\n",
        r"data row 1: every line must have 3 columns, this one ends with one more ','",
        [("a", "x", T0), ("b", "x", T0)],
        2,
    ),
    (
        "encoding",
        HEAD.encode() + f"é,x,{T0}\n".encode("latin-1"),
        r"line 2 is not utf-8 \(byte 0xe9 at offset 26\).*encoding='latin-1'",
        [("é", "x", T0)],
        1,
    ),
]


@pytest.mark.parametrize(("repair", "content", "message", "kept", "count"), REPAIRABLE)
def test_bad_input_raises_or_is_repaired_and_counted(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    repair: str,
    content: str | bytes,
    message: str,
    kept: list[tuple[str, str, int]],
    count: int,
) -> None:
    path = write(tmp_path / "bad.csv", content)
    with pytest.raises(DataError, match=rf"bad\.csv: {message}") as caught:
        read_table(path)
    assert f"repair={{'{repair}'}} would" in str(caught.value)
    got = read_table(path, repair={repair})
    assert events(got) == kept
    assert got.repairs == {repair: count}
    assert f"{repair!r}" in caplog.text  # a repair is printed as well as counted
    assert got.repair_report() == f"bad: {repair}: {count}"


UNREPAIRABLE = [
    ("", r"bad\.csv: the file is empty"),
    ("\n\n", r"bad\.csv: the file is empty"),
    (HEAD, r"bad\.csv: no events: 0 rows"),
    (
        f"userId,item_id,timestamp\na,x,{T0}\n",
        r"no column for user_id; the file has \['userId', 'item_id', 'timestamp'\]\. "
        r"Did you mean 'userId'\? Say which with columns=",
    ),
    ("user_id,item_id\na,x\n", r"no column for timestamp \(or an order column\)"),
    (
        f"user_id;item_id;timestamp\na;x;{T0}\n",
        r"first line has 1 columns with delimiter ','.*pass delimiter=';'",
    ),
    (f"user_id\titem_id\ttimestamp\na\tx\t{T0}\n", r"pass delimiter='\\t'"),
    (HEAD + GOOD + "a,x\n", r"data row 2 has 2 columns, wanted 3 \(delimiter ','\): 'a,x'"),
    (HEAD + GOOD + "a,y,12x\n", r"data row 2: timestamp is '12x', wanted an integer"),
    (HEAD + GOOD + "a,y,2020-01-01\n", r"data row 2: timestamp is '2020-01-01', wanted"),
    (HEAD + f"a,x,{T0}000000\n", r"too large for seconds.*time_unit='us'"),
    (f"user_id,item_id,item_id,timestamp\na,x,y,{T0}\n", r"header names \['item_id'\] more"),
    (
        f"user_id,item_id,timestamp,value\na,x,{T0},good\n",
        r"data row 1: value is 'good', wanted a number",
    ),
    (f"user_id,item_id,timestamp,value\na,x,{T0},inf\n", r"value is inf, wanted a finite number"),
    (HEAD.strip(), r"bad\.csv: no events: 0 rows"),
    # A quote that is not closed would take in the rows below it, in the middle or to the end.
    (f'{HEAD.strip()},title\na,x,{T0},"X\nb,y,{T0},Y\n', r"line 2 has a quote that is not closed"),
    (
        f'{HEAD.strip()},title\nb,y,{T0},Y\na,x,{T0},"X\nb,z,{T0},"Z\nb,w,{T0},W\n',
        r"bad\.csv: line 3 has a quote that is not closed",
    ),
    ("user_id,item_id,timestamp," + "x" * 200_000 + f"\na,x,{T0},1\n", r"line 1 is not a header"),
]


@pytest.mark.parametrize(("content", "message"), UNREPAIRABLE)
def test_bad_input_raises(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path / "bad.csv", content)
    with pytest.raises(DataError, match=message):
        read_table(path)


def test_misnamed_column_in_the_mapping(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.csv", HEAD + GOOD)
    with pytest.raises(DataError, match=r"user_id \(asked for as 'user'\).*mean 'user_id'"):
        read_table(path, {"user_id": "user"})
    with pytest.raises(DataError, match=r"columns: unknown schema names \['user'\]"):
        read_table(path, {"user": "user_id"})


def test_missing_file_unknown_suffix_unit_and_repair(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv: no such file"):
        read_table(tmp_path / "none.csv")
    path = write(tmp_path / "a.xls", HEAD + GOOD)
    with pytest.raises(DataError, match=r"unknown suffix '\.xls'"):
        read_table(path)
    assert read_table(path, delimiter=",").num_events == 1
    with pytest.raises(DataError, match=r"repair: unknown \['nans'\]"):
        read_table(path, delimiter=",", repair={"nans"})
    with pytest.raises(DataError, match=r"time_unit: 'm', wanted one of"):
        read_table(path, delimiter=",", time_unit="m")


def test_repair_that_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.csv", HEAD + "a,x,-1\n")
    with pytest.raises(DataError, match=r"no events left after repair 'negative'"):
        read_table(path, repair={"negative"})


def test_mixed_types_in_json_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl",
        f'{{"user_id": 1, "item_id": 2, "timestamp": {T0}}}\n'
        f'{{"user_id": "b", "item_id": 2, "timestamp": {T0}}}\n',
    )
    with pytest.raises(DataError, match=r"m\.jsonl: .*mixed types.*user_id.*row 1"):
        read_table(path)


def test_float_ids_and_float32_times_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"user_id": [1.0], "item_id": ["x"], "timestamp": [T0]}), path)
    with pytest.raises(DataError, match=r"user_id is double \(first value 1\.0\)"):
        read_table(path)
    got = read_table(path, repair={"float_ids"})
    assert events(got) == [("1", "x", T0)] and got.repairs == {"float_ids": 1}
    pq.write_table(pa.table({"user_id": [1.5], "item_id": ["x"], "timestamp": [T0]}), path)
    with pytest.raises(DataError, match=r"data row 1: user_id is 1\.5, wanted text or an integer"):
        read_table(path, repair={"float_ids"})
    times = pa.array([float(T0)], pa.float32())
    pq.write_table(pa.table({"user_id": ["a"], "item_id": ["x"], "timestamp": times}), path)
    with pytest.raises(DataError, match=r"timestamp is float, which cannot tell seconds apart"):
        read_table(path)


def test_numbers_too_large_to_be_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "f.parquet"
    for large in (2.0**53, 1e300, float("inf")):
        table = {"user_id": [1.0, large], "item_id": ["x", "y"], "timestamp": [T0, T0]}
        pq.write_table(pa.table(table), path)
        with pytest.raises(DataError, match=r"data row 2: user_id is .*an integer below 2\^53"):
            read_table(path, repair={"float_ids"})
    order = pa.array([1, 2**63 + 5], pa.uint64())
    pq.write_table(pa.table({"user_id": ["a"] * 2, "item_id": ["x", "y"], "order": order}), path)
    with pytest.raises(DataError, match=r"data row 2: order is 9223372036854775813, wanted an int"):
        read_table(path)


def test_nulls_and_nan_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "n.parquet"
    data = {
        "user_id": ["a", None, "c"],
        "item_id": ["x", "x", "x"],
        "timestamp": [T0, T0, T0],
        "value": [1.0, 2.0, float("nan")],
    }
    pq.write_table(pa.table(data), path)
    with pytest.raises(DataError, match=r"data row 2: user_id is missing .*2 such rows of 3"):
        read_table(path)
    got = read_table(path, repair={"nan"})
    assert events(got) == [("a", "x", T0)] and got.repairs == {"nan": 2}


def test_item_without_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.csv", HEAD + GOOD + f"a,y,{T0}\n")
    items = pa.table({"item_id": ["x"], "title": ["The X"]})
    with pytest.raises(DataError, match=r"1 of 2 items have events but no metadata \(first: 'y'\)"):
        read_table(path, items=items)
    got = read_table(path, items=items, repair={"metadata"})
    assert got.items is not None
    assert got.items.to_pylist()[1] == {"item_id": "y", "title": ""}
    assert got.repairs == {"metadata": 1}
    with pytest.raises(DataError, match=r"item metadata has columns \['item_id'\], wanted"):
        read_table(path, items=items.select(["item_id"]))
    nameless = pa.table({"item_id": ["x", None, "y"], "title": ["X", "?", "Y"], "row": [1, 2, 3]})
    with pytest.raises(DataError, match=r"\(item metadata\): data row 2: item_id is missing"):
        read_table(path, items=nameless)
    got = read_table(path, items=nameless, repair={"nan"})
    assert got.repairs == {"nan": 1}
    assert got.items is not None and got.items["row"].to_pylist() == ["1", "3"]
    halves = pa.table({"item_id": [1.0, 1.5], "title": ["X", "Y"], "row": [1, 2]})
    with pytest.raises(DataError, match=r"data row 2: item_id is 1\.5"):
        read_table(path, items=halves)
    lists = pa.table({"item_id": ["x", "y"], "title": ["X", "Y"], "tags": [["a"], ["b"]]})
    with pytest.raises(DataError, match=r"column 'tags' is list<.*>, wanted text"):
        read_table(path, items=lists)
    twice = pa.concat_tables([items, items])
    with pytest.raises(DataError, match=r"describes item 'x' more than once"):
        read_table(path, items=twice)


def test_latin_1_in_a_recbole_file(tmp_path: Path) -> None:
    text = f"user_id:token\titem_id:token\ttimestamp:float\né\tx\t{T0}\n"
    path = write(tmp_path / "l.inter", text.encode("latin-1"))
    with pytest.raises(DataError, match=r"l\.inter: line 2 is not utf-8"):
        read_recbole(path)
    got = read_recbole(path, repair={"encoding"})
    assert events(got) == [("é", "x", T0)] and got.repairs == {"encoding": 1}


def test_validate_refuses_tables_made_by_hand() -> None:
    good = pa.table({"user_id": ["a"], "item_id": ["x"], "timestamp": [T0], "action": ["v"]})
    Interactions("mine", good).validate()
    with pytest.raises(DataError, match=r"mine: events have no time"):
        Interactions("mine", good.drop_columns(["timestamp"])).validate()
    with pytest.raises(DataError, match=r"mine: events column 'action' is None, wanted string"):
        Interactions("mine", good.drop_columns(["action"])).validate()
    ints = good.set_column(0, "user_id", pa.array([1]))
    with pytest.raises(DataError, match=r"column 'user_id' is int64, wanted string"):
        Interactions("mine", ints).validate()
    with pytest.raises(DataError, match=r"lies after now"):
        Interactions("mine", good).validate(now=1000.0)
