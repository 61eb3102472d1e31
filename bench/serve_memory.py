"""Memory of each GPU over time, as the driver reports it for everybody on it."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable

import psutil

PERIOD_S = 0.05
SMI = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")

Read = Callable[[], tuple[int, ...]]
"""Bytes in use of each GPU."""


class MemoryWatch:
    """Samples on a thread of its own. On a machine without GPUs it watches main memory as if it were one."""

    def __init__(self, device: str) -> None:
        self.source, self._read = _reader(device)
        """What the figures are from."""
        self._samples: list[tuple[float, tuple[int, ...]]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self._thread.start()

    def now(self) -> tuple[int, ...]:
        """The newest sample; empty before the first."""
        return self._samples[-1][1] if self._samples else ()

    def fell_after(self, since_s: float, gpu: int, below_bytes: float) -> float | None:
        """Seconds from `since_s` (time.monotonic) to the first sample of a GPU under a limit; None = not yet."""
        for when_s, used in tuple(self._samples):
            if when_s >= since_s and used[gpu] <= below_bytes:
                return when_s - since_s
        return None

    def stop(self) -> None:
        """No more samples."""
        self._is_over.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._is_over.wait(PERIOD_S):
            with contextlib.suppress(Exception):
                self._samples.append((time.monotonic(), self._read()))


def _reader(device: str) -> tuple[str, Read]:
    if device == "cpu":
        return "main memory", lambda: (psutil.virtual_memory().used,)
    with contextlib.suppress(Exception):
        return "NVML", _nvml()
    return "nvidia-smi", _smi


def _nvml() -> Read:
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def read() -> tuple[int, ...]:
        return tuple(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)

    read()
    return read


def _smi() -> tuple[int, ...]:
    found = subprocess.run(SMI, capture_output=True, text=True, check=True, timeout=5)
    return tuple(int(line) << 20 for line in found.stdout.split())
