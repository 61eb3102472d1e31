"""Log lines of a command that serves."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cluster.cli.logs import FLUSH_S, MAX_LINES, DetachedHandler, line_format
from cluster.cli.options import LogLevel

ROOT = Path(__file__).resolve().parents[3]
SPEAKING = """
import logging, sys
from cluster.cli.logs import log_to_stderr

log_to_stderr(int(sys.argv[1]))
for name in ("cluster.router.link", "worker.build", "somebody.else"):
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger(name).log(level, "a line")
logging.shutdown()
"""


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("cluster", logging.WARNING, "here.py", 1, text, None, None)


def test_lines_are_written_in_order() -> None:
    written = io.StringIO()
    handler = DetachedHandler(written)
    for number in range(100):
        handler.emit(record(f"line {number}"))
    handler.flush()
    assert written.getvalue().splitlines() == [f"line {number}" for number in range(100)]


def test_a_reader_that_stands_still_holds_up_nobody() -> None:
    reading, writing = os.pipe()
    # Lines may still wait in the stream when nobody reads any more: that it cannot be closed cleanly then is no failure.
    with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "w") as stream:
        handler = DetachedHandler(stream)
        started_s = time.monotonic()
        for _ in range(3 * MAX_LINES):
            handler.emit(record("x" * 200))
        assert time.monotonic() - started_s < 5
        handler.flush()
        assert FLUSH_S <= time.monotonic() - started_s < 10
        # The pipe is read again: what was kept is written, the rest was dropped.
        received: list[bytes] = []

        def read() -> None:
            while len(received) < MAX_LINES * 201 // 4096:
                received.append(os.read(reading, 4096))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(5)
        assert not reader.is_alive()
        os.close(reading)


def test_a_stream_that_is_gone_is_no_error() -> None:
    written = io.StringIO()
    handler = DetachedHandler(written)
    written.close()
    handler.emit(record("nobody reads this"))
    handler.flush()


def test_a_line_tells_when_in_utc_how_grave_and_where() -> None:
    made = record("replica-1 makes no progress")
    made.created, made.msecs = 0.007, 7.0
    assert line_format().format(made) == "1970-01-01T00:00:00.007Z WARNING cluster: replica-1 makes no progress"


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        (LogLevel.WARNING, [("WARNING", "cluster.router.link"), ("WARNING", "worker.build")]),
        (LogLevel.INFO, [(level, name) for name in ("cluster.router.link", "worker.build") for level in ("INFO", "WARNING")]),
    ],
)  # fmt: skip
def test_the_level_is_that_of_our_own_lines(level: LogLevel, lines: list[tuple[str, str]]) -> None:
    command = [sys.executable, "-c", SPEAKING, str(level.number)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stderr
    assert re.findall(r"^\S+Z (\w+) (\S+): a line$", shown, re.M) == [*lines, ("WARNING", "somebody.else")]
