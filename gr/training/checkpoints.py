"""Checkpoint folders of a run: which are whole, which is the latest, which may go.

A checkpoint counts from the moment its marker file exists, which is written last: a run killed
while it was saving resumes from the checkpoint before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging

from gr.data.whole_file import whole_file

MARKER = "complete.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_folder(run: str | os.PathLike[str], step: int) -> Path:
    """Where the checkpoint of optimiser step ``step`` lies."""
    return Path(run) / f"checkpoint-{step}"


def mark_complete(checkpoint: Path, step: int) -> None:
    """Declare a checkpoint whole."""
    with whole_file(checkpoint / MARKER) as temporary:
        temporary.write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")


def complete_checkpoints(run: str | os.PathLike[str]) -> dict[int, Path]:
    """Whole checkpoints of a run by optimiser step, ascending."""
    if not Path(run).is_dir():
        return {}
    found = {}
    for folder in Path(run).iterdir():
        match = _NAME.fullmatch(folder.name)
        if match and (folder / MARKER).is_file():
            found[int(match[1])] = folder
    return dict(sorted(found.items()))


def latest_checkpoint(run: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint, or None."""
    found = complete_checkpoints(run)
    return found[max(found)] if found else None


def remove_checkpoints(run: str | os.PathLike[str], keep: set[int]) -> None:
    """Delete the checkpoints of all steps but those in ``keep``, whole or not."""
    for folder in list(Path(run).iterdir()):
        match = _NAME.fullmatch(folder.name)
        if match and int(match[1]) not in keep:
            # The marker goes first: what is half deleted must not look whole.
            (folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def quiet_files() -> Iterator[None]:
    """No progress bar for each file that is saved or loaded inside."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
