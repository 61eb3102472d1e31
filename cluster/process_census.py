"""Which processes belong to something we started, and the end of those that outlive it."""

from __future__ import annotations

from collections.abc import Callable

import psutil


class ProcessCensus:
    """Remembers the descendants of this process that `is_root` picks, and theirs, while they can still be found.

    A daemon that dies leaves its children to another parent, where nobody would look for them: `observe` writes them
    down before that. Processes are told apart by id and start time, so a reused id is never taken for one of ours.
    """

    def __init__(self, is_root: Callable[[psutil.Process], bool]) -> None:
        self._is_root = is_root
        self._seen: set[psutil.Process] = set()

    def observe(self) -> None:
        """Take down everything that is there now."""
        for child in _children(psutil.Process(), recursive=False):
            if self._picked(child):
                self._seen.update((child, *_children(child, recursive=True)))

    def alive(self) -> list[psutil.Process]:
        """Those seen so far that still run; a zombie does not."""
        return sorted((process for process in self._seen if runs(process)), key=lambda process: process.pid)

    def end(self, grace_s: float) -> list[str]:
        """Wait `grace_s` for all to end, then kill the rest; returns the names of those that had to be killed."""
        self.observe()
        _, rest = psutil.wait_procs(self.alive(), timeout=grace_s)
        killed = [described(process) for process in rest if runs(process)]
        for process in rest:
            _kill(process)
        psutil.wait_procs(rest, timeout=grace_s)
        return killed

    def _picked(self, process: psutil.Process) -> bool:
        try:
            return process in self._seen or self._is_root(process)
        except psutil.Error:
            return False


def end_all_descendants() -> None:
    """Kill every descendant of this process at once: the answer to a second Ctrl-C."""
    for process in _children(psutil.Process(), recursive=True):
        _kill(process)


def described(process: psutil.Process) -> str:
    """A short name for messages."""
    try:
        return f"{process.name()} ({process.pid})"
    except psutil.Error:
        return str(process.pid)


def _children(process: psutil.Process, *, recursive: bool) -> list[psutil.Process]:
    try:
        return process.children(recursive=recursive)
    except psutil.Error:
        return []


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; a zombie has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        return
