"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to, renamed to it when the block ends well.

    A reader never sees half a file; where the block raises, what stood at ``path`` stays and the
    temporary file goes.
    """
    target = Path(path)
    # The process id: two processes that write the same file do not write into each other's.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
