"""Threads build what no other process has built: as few as leave the interpreter to requests, and only for who still asks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from worker.kernels import build_threads
from worker.kernels.build_threads import MAX_HERE, BuildThreads

ROOT = Path(__file__).resolve().parents[3]


class Processes:
    """Build nothing, or all."""

    def __init__(self, num: int, *, are_dead: bool) -> None:
        self.num = num
        self.are_dead = are_dead

    def build(self, _: Any) -> bool:
        return not self.are_dead


class Compiling:
    """How many compile at once, at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def __call__(self) -> int:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.05)
        with self._lock:
            self._now -= 1
        return 7


@pytest.mark.parametrize(
    ("cores", "processes", "most"),
    [
        (2, None, 2),
        (16, None, MAX_HERE),
        (16, Processes(16, are_dead=True), MAX_HERE),
        (16, Processes(16, are_dead=False), 16),
    ],
)
def test_few_compile_here_however_many_cores_there_are_or_processes_there_were(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: Any, most: int
) -> None:
    monkeypatch.setattr(build_threads, "usable_cores", lambda: cores)
    threads, compiling = BuildThreads(processes), Compiling()
    assert {built.result(10) for built in [threads.submit(compiling) for _ in range(32)]} == {7}
    assert compiling.most <= most
    assert compiling.most > most // 2


def test_without_another_thread_a_kernel_is_left_to_its_first_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        threads = BuildThreads(None)
        failed = [threads.submit(lambda: 7) for _ in range(2)]
    assert all(isinstance(built.exception(0), RuntimeError) for built in failed)
    assert [record.message for record in caplog.records] == [
        "kernels are built when they are first launched: can't start new thread"
    ]


def test_what_was_asked_for_by_a_thread_that_has_ended_is_not_begun() -> None:
    threads = BuildThreads(None)
    asker = threading.Thread(target=int)
    asker.start()
    asker.join()
    threads.asker = asker
    with pytest.raises(CancelledError):
        threads.submit(lambda: 7).result(10)


def test_an_interrupted_start_begins_nothing_more_and_ends_at_once() -> None:
    pytest.importorskip("triton.runtime._async_compile")
    script = """
import _thread, threading, time
from worker.kernels.build_ahead import KernelsAhead
begun = []
def compile_kernel():
    begun.append(0)
    time.sleep(0.3)
ahead = KernelsAhead()
with ahead._building([]):
    for key in range(1000):
        ahead._mode.submit(key, compile_kernel, lambda kernel: None)
threading.Timer(0.5, _thread.interrupt_main).start()
try:
    ahead.settle()
except KeyboardInterrupt:
    time.sleep(0.5)
    before = len(begun)
    time.sleep(0.7)
    assert 0 < len(begun) == before < 50, (before, len(begun))
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "interrupted\n"
