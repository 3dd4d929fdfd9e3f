"""Seconds of every epoch and memory of a training run: the same code in our process and a peer's.

It needs the standard library alone, since the peers' environment has nothing of ours. Seconds are
wall clock; memory is in MB of 10^6 bytes.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Watch:
    """``begin``, ``epoch`` at the end of each epoch, ``end``.

    Attributes:
        seconds: of each epoch, from the end of the one before. The first also holds what comes
            before it, such as building the model.
        cpu_seconds: of each epoch, of all threads together: they say more on a busy machine.
        held_mb: resident before the training: interpreter, libraries and data.
        peak_mb: most that the process ever had resident, the training included.
        training_peak_mb: most that it had resident from ``begin`` to ``end``.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    held_mb: float = 0.0
    peak_mb: float = 0.0
    training_peak_mb: float = 0.0
    _began: float = 0.0
    _last: float = 0.0
    _last_cpu: float = 0.0

    def begin(self) -> None:
        gc.collect()
        trim()
        self.peak_mb = peak() / 1e6
        self.held_mb = reset_peak() / 1e6
        self._last, self._last_cpu = time.perf_counter(), time.process_time()
        self._began = self._last

    def epoch(self) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        self.seconds.append(now - self._last)
        self.cpu_seconds.append(cpu - self._last_cpu)
        self._last, self._last_cpu = now, cpu

    def is_over(self, minutes: float | None) -> bool:
        """Whether that much time has passed since the beginning; None never passes."""
        return minutes is not None and time.perf_counter() - self._began >= 60 * minutes

    def end(self) -> None:
        self.training_peak_mb = peak() / 1e6
        self.peak_mb = max(self.peak_mb, self.training_peak_mb)

    def report(self) -> dict[str, Any]:
        """Plain numbers; ``growth_mb`` is what training added to what was held before."""
        return {
            "epoch_seconds_all": self.seconds,
            "cpu_seconds_all": self.cpu_seconds,
            "peak_mb": self.peak_mb,
            "held_mb": self.held_mb,
            "growth_mb": max(0.0, self.training_peak_mb - self.held_mb),
        }


def trim() -> None:
    """Hand freed memory back, so that training cannot use it unseen (glibc only)."""
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(name)


def reset_peak() -> int:
    """Bytes resident now; where the kernel allows it, the peak starts again from here."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _status("VmRSS")
    except OSError:
        return peak()


def peak() -> int:
    """Most bytes resident since the last reset."""
    # Not ru_maxrss where there is a choice: it begins with the size of the process that started us.
    try:
        return _status("VmHWM")
    except OSError:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return used if sys.platform == "darwin" else 1024 * used
