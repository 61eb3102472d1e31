"""How long a replica's start took, phase by phase."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

_START_TICKS = 19
"""Where /proc says when a process started: of the fields after its name."""


class StartTimes:
    """Seconds from the start of this process to the end of each phase of its start, in their order.

    Clocks are the machine's, so that another process can set them beside its own. A phase ends once.
    """

    def __init__(self, *, began_s: float | None = None, clock: Callable[[], float] = time.time) -> None:
        self.began_s = _process_began_s() if began_s is None else began_s
        """Unix time."""
        self._clock = clock
        self._phases: dict[str, float] = {}

    def over(self, phase: str) -> None:
        """This phase has ended now."""
        self._phases.setdefault(phase, self._clock() - self.began_s)

    @property
    def phases(self) -> Mapping[str, float]:
        """A view of those that have ended."""
        return MappingProxyType(self._phases)


def _process_began_s() -> float:
    """To a hundredth of a second where the kernel says it so; psutil adds whole seconds."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_START_TICKS])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return psutil.Process().create_time()
    return time.time() - age_s
