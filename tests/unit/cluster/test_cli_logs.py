"""Log lines of a command that serves."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
import time

from cluster.cli.logs import FLUSH_S, MAX_LINES, DetachedHandler


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
        assert time.monotonic() - started_s < 1
        handler.flush()
        assert FLUSH_S <= time.monotonic() - started_s < 3
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
