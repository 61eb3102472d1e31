"""Log lines of a command that serves."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from typing import TextIO

MAX_LINES = 1000
FLUSH_S = 0.5
OUR_PACKAGES = ("cluster", "worker")


class DetachedHandler(logging.Handler):
    """Writes on a thread of its own, so that a reader who stands still, or a full disk, holds up no request.

    Lines that wait for too long are dropped: MAX_LINES are kept.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        threading.Thread(target=self._write_on, name="graphpool-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(self.format(record))

    def flush(self) -> None:
        """Wait until all is written, but not for long: a process that ends must not be held up either."""
        give_up_s = time.monotonic() + FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < give_up_s:
            time.sleep(0.005)

    def _write_on(self) -> None:
        while True:
            line = self._lines.get()
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(line + "\n")
                self._stream.flush()
            self._lines.task_done()


def log_to_stderr(level: int = logging.WARNING) -> None:
    """Our own lines from `level` on, others' from WARNING on; unless the process has set up its logging already."""
    root = logging.getLogger()
    if not root.handlers:
        handler = DetachedHandler(sys.stderr)
        handler.setFormatter(line_format())
        root.addHandler(handler)
        root.setLevel(logging.WARNING)
        for package in OUR_PACKAGES:
            logging.getLogger(package).setLevel(level)


def line_format() -> logging.Formatter:
    """`2026-11-30T08:15:00.123Z WARNING cluster.router.link: replica-1 makes no progress`, in UTC."""
    made = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    made.converter = time.gmtime
    return made
