"""A file whose content is read again when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
Stamp = tuple[tuple[int, int, int], ...]

log = logging.getLogger(__name__)


class WatchedFiles(Generic[T]):
    """What `read` makes of some files, made again once any of them is another one.

    A change that cannot be read keeps what there was, and is logged once. Looks at most every `period_s`.
    """

    def __init__(
        self,
        paths: Sequence[str],
        read: Callable[[], T],
        *,
        period_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = [Path(path) for path in paths]
        self._read = read
        self._period_s = period_s
        self._clock = clock
        self._stamp = self._look()
        self._value = read()
        """Of the first reading, whose errors are the caller's."""
        self._looked_s = clock()
        self._num_changes = 0

    @property
    def num_changes(self) -> int:
        """How often it was read again; looks first."""
        self.get()
        return self._num_changes

    def get(self) -> T:
        """The present value."""
        now_s = self._clock()
        if now_s - self._looked_s >= self._period_s:
            self._looked_s = now_s
            self._look_again()
        return self._value

    def _look_again(self) -> None:
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._value = self._read()
        except (OSError, ValueError) as error:
            log.warning("%s cannot be used, what was read before stays: %s", self._names(), _sentence(error))
            return
        self._num_changes += 1
        log.info("%s was read again", self._names())

    def _look(self) -> Stamp:
        stats = [path.stat() for path in self._paths]
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in stats)

    def _names(self) -> str:
        return ", ".join(map(str, self._paths))


def _sentence(error: Exception) -> str:
    """Without what a parser quotes of the file."""
    return (str(error).splitlines() or [""])[0][:200]
