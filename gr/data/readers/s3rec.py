"""S3-Rec sequence files: a line is `user item item …` in time order, separated by spaces.

A second file may give the time gaps: `user item item …<tab>gap gap …`, seconds since the previous
event of the user (the first is 0).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gr.data.checks import Repairs, build_interactions
from gr.data.errors import DataError
from gr.data.readers.item_json import read_item_json
from gr.data.readers.user_items import flat_events
from gr.data.schema import Interactions
from gr.data.text_files import read_text

Int64 = npt.NDArray[np.int64]


def read_s3rec(
    path: str | Path,
    time_gaps: str | Path | None = None,
    items: str | Path | pa.Table | None = None,
    *,
    repair: Iterable[str] = (),
    name: str | None = None,
) -> Interactions:
    """Read sequences; order-only without `time_gaps`.

    With `time_gaps`, `timestamp` is the running sum of the gaps: seconds since the user's own first
    event, and `relative_time` is set. `items`: a table, or a JSON file `{item: {"title": …}}`.
    Raises `DataError` for a line without items, a user on two lines, and a gaps file that disagrees
    with the sequences.
    """
    path = Path(path)
    fixes = Repairs.of(repair)
    users, lengths, flat = _sequences(path, _lines(path, fixes))
    again = pc.value_counts(users)
    repeated = again.filter(pc.greater(again.field("counts"), 1))
    if len(repeated):
        user, count = repeated[0]["values"].as_py(), repeated[0]["counts"].as_py()
        raise DataError(f"{path}: user {user!r} has {count} lines, wanted 1")
    raw = flat_events(users.to_pylist(), lengths.tolist(), flat)
    if time_gaps is not None:
        seconds = _gap_times(Path(time_gaps), users, lengths, flat, fixes)
        raw = raw.drop_columns(["order"]).append_column("timestamp", pa.array(seconds))
    table = items if items is None or isinstance(items, pa.Table) else read_item_json(items)
    return build_interactions(
        raw,
        name or path.stem,
        str(path),
        items=table,
        repairs=fixes,
        relative_time=time_gaps is not None,
    )


def _lines(path: Path, fixes: Repairs) -> pa.Array:
    text = read_text(path, "utf-8", fixes).decode()
    return pa.array(text.rstrip().split("\n"), pa.large_string())


def _sequences(path: Path, lines: pa.Array) -> tuple[pa.Array, Int64, pa.Array]:
    trimmed = pc.utf8_trim_whitespace(lines)
    if bool(pc.any(pc.match_substring_regex(trimmed, r"[,;|]")).as_py()):
        bad = pc.index(pc.match_substring_regex(trimmed, r"[,;|]"), True).as_py()
        raise DataError(
            f"{path}: line {bad + 1}: {trimmed[bad].as_py()[:60]!r} has ',', ';' or '|', wanted "
            "user and items separated by spaces"
        )
    fields = pc.utf8_split_whitespace(trimmed)
    counts = pc.list_value_length(fields).to_numpy().astype(np.int64)
    if (counts < 2).any():
        at = int((counts < 2).argmax())
        raise DataError(
            f"{path}: line {at + 1}: {trimmed[at].as_py()!r} has a user and no items, "
            "wanted 'user item item …'"
        )
    tokens = fields.flatten().cast(pa.string())
    starts = np.cumsum(counts) - counts
    is_item = np.ones(len(tokens), dtype=bool)
    is_item[starts] = False
    return tokens.take(pa.array(starts)), counts - 1, tokens.filter(pa.array(is_item))


def _gap_times(
    path: Path,
    users: pa.Array,
    lengths: Int64,
    flat: pa.Array,
    fixes: Repairs,
) -> Int64:
    lines = _lines(path, fixes)
    parts = pc.split_pattern(pc.utf8_trim_whitespace(lines), "\t")
    halves = pc.list_value_length(parts).to_numpy()
    if (halves != 2).any():
        at = int((halves != 2).argmax())
        raise DataError(
            f"{path}: line {at + 1} has {halves[at]} tab separated parts, wanted 2: "
            "'user item …<tab>gap …'"
        )
    gap_users, gap_lengths, gap_items = _sequences(path, pc.list_element(parts, 0))
    if not (gap_users.equals(users) and gap_items.equals(flat)):
        raise DataError(f"{path}: users or items differ from the sequences file, wanted the same")
    gaps = pc.utf8_split_whitespace(pc.list_element(parts, 1))
    counts = pc.list_value_length(gaps).to_numpy()
    if (counts != gap_lengths).any():
        at = int((counts != gap_lengths).argmax())
        raise DataError(
            f"{path}: line {at + 1}: {counts[at]} gaps for {gap_lengths[at]} items, "
            "wanted one per item"
        )
    try:
        steps = gaps.flatten().cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: a gap is not a whole number of seconds: {error}") from error
    if (steps < 0).any():
        line = int(np.searchsorted(np.cumsum(counts), int((steps < 0).argmax()), side="right"))
        raise DataError(f"{path}: line {line + 1}: negative gap {steps.min()}, wanted seconds >= 0")
    starts = np.cumsum(lengths) - lengths
    steps = steps.copy()
    steps[starts] = 0  # a time before the user's first event has no meaning here
    total: Int64 = np.cumsum(steps)
    seconds: Int64 = total - np.repeat(total[starts], lengths)
    return seconds
