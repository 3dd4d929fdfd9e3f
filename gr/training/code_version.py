"""Which code made a result."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path


def commit() -> str:
    """The commit of the code that runs, with a ``+`` where files differ from it; the version of the
    package where it does not run from its own repository."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=here.parent, capture_output=True, text=True
            )
        except OSError:  # no git
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    # An installed package may lie inside a repository that is not ours.
    if not git("ls-files", "--error-unmatch", here.name):
        return f"version {version('gr-recsys')}"
    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short=9", "HEAD") + ("+" if changed else "")
