"""How a command runs to its end: errors become one sentence, signals a clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

import typer

from cluster.cli.logs import log_to_stderr
from cluster.cli.unreachable import why_unreachable

FAILED, USAGE, INTERRUPTED = 1, 2, 130
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

TOGETHER_S = 0.2
"""Signals within this of the first are the same wish."""

show_tracebacks = False
"""Set by `--traceback`."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn the ValueError of a refused option into a usage error."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextlib.contextmanager
def one_sentence_errors() -> Iterator[None]:
    """Turn an exception into one line on stderr and exit code 1, Ctrl-C into exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain once more while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None
    except Exception as error:
        if show_tracebacks or isinstance(error, (typer.Exit, typer.BadParameter, typer.Abort)):
            raise
        fail(sentence(error))


def fail(message: str) -> NoReturn:
    """Say what went wrong and end with exit code 1."""
    typer.secho(message, err=True, fg=typer.colors.RED)
    raise typer.Exit(FAILED)


def run_until_stopped(service: Callable[[], Coroutine[Any, Any, None]], *, log_level: int = logging.WARNING) -> None:
    """Run a service until it ends or a signal asks it to: the first one cancels it, a second one kills what is left.

    Signals that come together are one: `timeout` sends its signal twice, and whoever wraps a command passes on a Ctrl-C
    that the terminal has sent to both.
    """
    from cluster.security.core_dumps import refuse_core_dumps

    refuse_core_dumps()
    log_to_stderr(log_level)
    with one_sentence_errors():
        from cluster.tracing import configure_tracing

        flush_traces = configure_tracing("graphpool")
        try:
            asyncio.run(_guarded(service()))
        finally:
            flush_traces()


async def _guarded(service: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(service)
    asked_s: float | None = None

    def on_signal(number: int) -> None:
        nonlocal asked_s
        # A signal that meets Ray's own handler, while Ray starts, leaves an alarm that would abort the clean stop.
        signal.alarm(0)
        if asked_s is None:
            asked_s = time.monotonic()
            task.cancel()
        elif time.monotonic() - asked_s > TOGETHER_S:
            _end_at_once(number)

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        # Under nohup a service outlives its terminal.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal, number)
    try:
        await task
    except asyncio.CancelledError:
        if asked_s is None:
            raise


def _end_at_once(number: int) -> NoReturn:
    from cluster.process_census import end_all_descendants

    end_all_descendants()
    os.write(sys.stderr.fileno(), b"ended at once: what was still running is lost\n")
    os._exit(128 + number)


def sentence(error: BaseException) -> str:
    """What a person needs to read of an error."""
    from cluster.errors import ClusterError
    from worker.errors import WorkerError

    status = _status(error)
    if status is not None:
        return _of_status(*status)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, (ClusterError, WorkerError, OSError, ValueError)) and str(error):
        return _first_line(str(error))
    return f"unexpected {type(error).__name__}: {_first_line(str(error))} (graphpool --traceback ... shows where)"


def _status(error: BaseException) -> tuple[str, str] | None:
    """Code and details of a failed call: a CallError's attributes, or a grpc.RpcError's methods."""
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if callable(code) and callable(details):
        code, details = code(), details()
    name = getattr(code, "name", None)
    return None if name is None else (name, details or "")


def _of_status(code: str, details: str) -> str:
    if code == "UNAVAILABLE" and (reason := why_unreachable(details)):
        return reason
    if code == "DEADLINE_EXCEEDED" and details in ("", "Deadline Exceeded"):
        return "no whole answer came in time (DEADLINE_EXCEEDED)"
    return f"{_first_line(details) or 'the call failed'} ({code})"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
