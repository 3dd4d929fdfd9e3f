"""A file is there whole or as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from gr.data.whole_file import whole_file


def test_a_file_appears_when_the_block_ends_well(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    with whole_file(target) as temporary:
        temporary.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failure_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(RuntimeError), whole_file(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
