"""Sequences and splits against plain Python over the events, and what the hash may depend on."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset

from gr.data import (
    DataError,
    Interactions,
    build_sequences,
    global_temporal,
    held_out_users,
    leave_one_out,
    sequences,
    time_unit,
)

Row = tuple[str, str, int, str]


def make(rows: list[Row], time: str = "timestamp", **options: Any) -> Interactions:
    names = ("user_id", "item_id", time, "action")
    columns = {n: [row[i] for row in rows] for i, n in enumerate(names)}
    return Interactions("toy", pa.table(columns), **options)


def random_rows(seed: int, users: int = 9, per_user: int = 6, times: int = 30) -> list[Row]:
    """Few distinct times, so that many events of a user are ties."""
    rng = random.Random(seed)
    rows = [
        (f"u{u}", f"i{rng.randrange(40)}", rng.randrange(times), rng.choice(["like", "skip"]))
        for u in range(users)
        for _ in range(3 + rng.randrange(per_user))
    ]
    rng.shuffle(rows)
    return rows


def plain_sequences(rows: list[Row]) -> dict[str, list[Row]]:
    by_user: dict[str, list[Row]] = {}
    for row in rows:
        by_user.setdefault(row[0], []).append(row)
    # list.sort is stable: ties stay in file order
    return {user: sorted(events, key=lambda e: e[2]) for user, events in by_user.items()}


def record(user: str, events: list[Row], target: Row | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "user_id": user,
        "item_id": [e[1] for e in events],
        "action": [e[3] for e in events],
        "timestamp": [e[2] for e in events],
    }
    if target is not None:
        row |= {
            "target_item_id": target[1],
            "target_action": target[3],
            "target_timestamp": target[2],
        }
    return row


@pytest.mark.parametrize(("seed", "users"), [(0, 9), (1, 9), (2, 9), (3, 2_100)])
def test_sequences_and_leave_one_out_against_plain_python(seed: int, users: int) -> None:
    rows = random_rows(seed, users)
    built = build_sequences(make(rows))
    want = plain_sequences(rows)
    assert built.to_list() == [record(u, e) for u, e in want.items()]
    split = leave_one_out(built)
    assert split.train.to_list() == [record(u, e[:-2]) for u, e in want.items()]
    assert split.validation.to_list() == [record(u, e[:-2], e[-2]) for u, e in want.items()]
    assert split.test.to_list() == [record(u, e[:-1], e[-1]) for u, e in want.items()]
    assert split.repairs == {}
    assert split.split_hash in split.summary()


def test_users_without_training_events_are_in_no_training_row() -> None:
    # A whole batch of users that start late must not upset the ones before and after it.
    rows: list[Row] = [("first", f"i{t}", t, "v") for t in range(100)]
    rows += [(f"late{u}", "x", 95, "v") for u in range(1_999)]
    split = global_temporal(build_sequences(make(rows)), horizon=10)
    assert split.train["user_id"][:] == ["first"]
    assert len(split.test) == 10 and split.repairs["targets_without_history"] == 1_999


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("history", ["window", "rolling"])
def test_global_temporal_against_plain_python(seed: int, history: str) -> None:
    rows = random_rows(seed, times=60)
    split = global_temporal(build_sequences(make(rows)), horizon=12, history=history, max_history=3)
    end = max(row[2] for row in rows) + 1
    windows = {"validation": (end - 24, end - 12), "test": (end - 12, end)}
    users = plain_sequences(rows)
    train = {u: [e for e in events if e[2] < end - 24] for u, events in users.items()}
    assert split.train.to_list() == [record(u, e) for u, e in train.items() if e]
    cut = orphans = 0
    for name, (begin, stop) in windows.items():
        want = []
        for user, events in users.items():
            for at, event in enumerate(events):
                if not begin <= event[2] < stop:
                    continue
                known = events[:at] if history == "rolling" else [e for e in events if e[2] < begin]
                orphans += not known
                cut += len(known) > 3
                if known:
                    want.append(record(user, known[-3:], event))
        assert getattr(split, name).to_list() == want
    assert split.repairs.get("targets_without_history", 0) == orphans
    assert split.repairs.get("histories_cut", 0) == cut


def test_global_temporal_fractions_never_part_equal_times() -> None:
    rows = [(f"u{i % 3}", f"i{i}", i // 4, "like") for i in range(40)]
    split = global_temporal(build_sequences(make(rows)), validation_fraction=0.2, test_fraction=0.2)
    last = [max(t for r in split.train for t in r["timestamp"])]
    last += [max(part["target_timestamp"]) for part in (split.validation, split.test)]
    first = [min(part["target_timestamp"]) for part in (split.validation, split.test)]
    assert last[0] < first[0] and last[1] < first[1]
    assert len(split.validation) == len(split.test) == 8
    with pytest.raises(DataError, match=r"wanted both above 0 and their sum below 1"):
        global_temporal(build_sequences(make(rows)), validation_fraction=0.6, test_fraction=0.4)
    with pytest.raises(DataError, match=r"the train part is empty"):
        global_temporal(build_sequences(make(rows)), horizon=1_000)
    with pytest.raises(DataError, match=r"horizon: 0 seconds"):
        global_temporal(build_sequences(make(rows)), horizon=0)


def test_a_user_with_one_event() -> None:
    rows = [("a", "x", 1, "v"), ("b", "x", 1, "v"), ("b", "y", 2, "v"), ("b", "z", 3, "v")]
    built = build_sequences(make(rows))
    with pytest.raises(DataError, match=r"user 'a' has 1 events, wanted at least 3"):
        leave_one_out(built)
    split = leave_one_out(built, short_users="train")
    assert split.train["item_id"][:] == [["x"], ["x"]]
    assert split.test["target_item_id"][:] == ["z"]
    assert split.repairs == {"short_users": 1} and "short_users 1" in split.summary()


def test_time_units() -> None:
    rows = random_rows(0)
    built = build_sequences(make(rows, time="order"))
    assert time_unit(built) == "order"
    assert time_unit(leave_one_out(built).test) == "order"
    assert time_unit(build_sequences(make(rows))) == "seconds"
    assert time_unit(built.select([0]).map(lambda row: {"n": 1})) == "order"
    with pytest.raises(DataError, match=r"no clock shared by users \(time_unit 'order'"):
        global_temporal(built)
    with pytest.raises(DataError, match=r"relative_time True"):
        global_temporal(build_sequences(make(rows, relative_time=True)))


def test_extra_columns_ride_along() -> None:
    rows = random_rows(1)
    inter = make(rows)
    inter.events = inter.events.append_column(
        "value", pa.array([float(i) for i in range(len(rows))])
    )
    split = leave_one_out(build_sequences(inter, ["value"]))
    row, users = split.test[0], plain_sequences(rows)
    own = [float(rows.index(event)) for event in users[row["user_id"]]]
    assert [*row["value"], row["target_value"]] == own
    with pytest.raises(DataError, match=r"extra column 'scenario'"):
        build_sequences(inter, ["scenario"])


def test_large_data_is_memory_mapped_and_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inter = make(random_rows(2, users=30))
    small = build_sequences(inter)
    assert small.cache_files == []
    monkeypatch.setattr(sequences, "EVENTS_PER_BLOCK", 7)  # many blocks, some of one user
    large = build_sequences(inter, cache_dir=tmp_path, in_memory_bytes=100)
    files = list(tmp_path.iterdir())
    assert [f["filename"] for f in large.cache_files] == [str(files[0])] and len(files) == 1
    assert large.to_list() == small.to_list()
    assert time_unit(large) == "seconds"
    assert leave_one_out(large).split_hash == leave_one_out(small).split_hash
    build_sequences(inter, cache_dir=tmp_path, in_memory_bytes=100)
    assert list(tmp_path.iterdir()) == files  # same content, same file


def literal_hash(parts: dict[str, Dataset]) -> str:
    """The definition at the top of split.py, row by row."""
    whole = hashlib.sha256()
    for name, part in parts.items():
        texts: list[list[str]] = [[], [], []]
        counts = []
        for row in sorted(part.to_list(), key=lambda r: r["user_id"]):
            texts[0].append(row["user_id"])
            counts.append(len(row["item_id"]))
            texts[1].extend(row["item_id"])
            if "target_item_id" in row:
                texts[2].append(row["target_item_id"])
        streams: list[bytes] = []
        for column in texts:
            raw = [text.encode() for text in column]
            streams.append(b"".join(len(r).to_bytes(8, "little") for r in raw))
            streams.append(b"".join(raw))
        streams.insert(2, b"".join(n.to_bytes(8, "little") for n in counts))
        whole.update(name.encode())
        whole.update(b"".join(hashlib.sha256(s).digest() for s in streams))
    return whole.hexdigest()[:16]


def test_split_hash_is_its_definition() -> None:
    for split in (
        leave_one_out(build_sequences(make(random_rows(3)))),
        global_temporal(build_sequences(make(random_rows(3))), horizon=8, history="rolling"),
    ):
        parts = {"train": split.train, "validation": split.validation, "test": split.test}
        assert split.split_hash == literal_hash(parts)


def test_split_hash_ignores_user_order_and_sees_ties_and_targets() -> None:
    rows = random_rows(4)
    base = leave_one_out(build_sequences(make(rows))).split_hash
    by_user = sorted(rows, key=lambda r: r[0], reverse=True)  # stable: own order is kept
    assert leave_one_out(build_sequences(make(by_user))).split_hash == base
    renamed = [(u, i, t, "other") for u, i, t, _ in rows]
    assert leave_one_out(build_sequences(make(renamed))).split_hash == base

    tie = [("a", item, 5, "v") for item in ("x", "y", "z")]
    swapped = [tie[0], tie[2], tie[1]]
    hashes = {leave_one_out(build_sequences(make(r))).split_hash for r in (tie, swapped)}
    assert len(hashes) == 2  # another tie order is another task, and says so
    shifted = [("a", "xy", 1, "v"), ("a", "z", 2, "v"), ("a", "w", 3, "v")]
    glued = [("a", "x", 1, "v"), ("a", "yz", 2, "v"), ("a", "w", 3, "v")]
    assert (
        leave_one_out(build_sequences(make(shifted))).split_hash
        != leave_one_out(build_sequences(make(glued))).split_hash
    )


def test_splits_refuse_datasets_that_are_not_sequences() -> None:
    with pytest.raises(DataError, match=r"sequences lack columns \['item_id'"):
        leave_one_out(Dataset.from_dict({"user_id": ["a"]}))
    columns = {"user_id": ["a", "b"], "item_id": [["x"] * 3] * 2, "action": [["v"] * 3] * 2}
    times = {"timestamp": [[7, 8, 9], [1, 3, 2]]}
    with pytest.raises(DataError, match=r"timestamps of user 'b' go back in time"):
        leave_one_out(Dataset.from_dict(columns | times))
    with pytest.raises(DataError, match=r"item_id and timestamp differ in length"):
        leave_one_out(Dataset.from_dict(columns | {"timestamp": [[1, 2, 3], [1, 2]]}))


def test_held_out_users_are_those_who_came_last() -> None:
    came = {u: 100 * ((u * 7) % 20) for u in range(20)}
    rows = [(f"u{u}", f"i{n}", came[u] + n, "like") for u in came for n in range(4)]
    sequences = build_sequences(make(rows))
    split = held_out_users(sequences, validation_fraction=0.1, test_fraction=0.2)
    by_time = sorted(came, key=lambda u: came[u])
    for part, users in (
        (split.train, by_time[:14]),
        (split.validation, by_time[14:16]),
        (split.test, by_time[16:]),
    ):
        assert sorted(part["user_id"]) == sorted(f"u{u}" for u in users)
    assert all(row["item_id"] == ["i0", "i1", "i2", "i3"] for row in split.train)
    for row in split.test:
        assert row["item_id"] == ["i0", "i1", "i2"] and row["target_item_id"] == "i3"
        assert row["target_timestamp"] == row["timestamp"][-1] + 1


def test_held_out_users_refuses_what_it_cannot_split() -> None:
    rows = [(f"u{u}", f"i{n}", 10 * u + n, "like") for u in range(4) for n in range(3)]
    sequences = build_sequences(make(rows))
    with pytest.raises(DataError, match=r"fractions 0.05 and 0.1 of 4 users are 0 and 0, wanted"):
        held_out_users(sequences)
    short = build_sequences(make([*rows, ("late", "i0", 99, "like")]))
    with pytest.raises(DataError, match="user 'late' has 1 events, wanted at least 2"):
        held_out_users(short, validation_fraction=0.2, test_fraction=0.2)
