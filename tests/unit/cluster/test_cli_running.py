"""How commands end: one sentence for an error, a clean stop for a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
import typer

from cluster.cli import running
from cluster.cli.running import one_sentence_errors, run_until_stopped, sentence, usage_errors
from cluster.errors import NoReplicaAvailable
from worker.errors import InvalidRequest, UnsupportedModel

ROOT = Path(__file__).resolve().parents[3]

SERVICE = """
import asyncio, sys
from cluster.cli.running import run_until_stopped

async def service():
    print("up", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep({cleanup_s})
        print("clean", flush=True)

run_until_stopped(service)
"""


def started(cleanup_s: float, *prefix: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", SERVICE.format(cleanup_s=cleanup_s)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


class FailedCall(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, details)

    def code(self) -> grpc.StatusCode:
        return self.args[0]  # type: ignore[no-any-return]

    def details(self) -> str:
        return self.args[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_lets_the_service_clean_up_and_ends_it_with_success(number: signal.Signals) -> None:
    process = started(cleanup_s=0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("clean\n", 0)


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    process = started(0.0, "nohup")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("clean\n", 0)


def test_a_second_signal_does_not_wait_for_the_clean_up_and_says_so() -> None:
    process = started(cleanup_s=60)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, said = process.communicate(timeout=30)
    assert (output, process.returncode) == ("", 130)
    assert said.splitlines()[-1] == "ended at once: what was still running is lost"


def test_signals_that_come_together_are_one() -> None:
    process = started(cleanup_s=0.5)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.005)
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("clean\n", 0)


def test_a_command_under_timeout_ends_in_order() -> None:
    process = started(0.3, "timeout", "1")
    output, said = process.communicate(timeout=30)
    assert output == "clean\n", said


def test_an_error_is_one_line_on_stderr_and_exit_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exited, one_sentence_errors():
        raise UnsupportedModel("MambaForCausalLM is not supported\nsecond line")
    assert exited.value.exit_code == running.FAILED
    assert capsys.readouterr().err == "MambaForCausalLM is not supported\n"


def test_an_interrupt_is_exit_code_130_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exited, one_sentence_errors():
        raise KeyboardInterrupt
    assert exited.value.exit_code == running.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_tracebacks_are_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "show_tracebacks", True)
    with pytest.raises(ZeroDivisionError), one_sentence_errors():
        raise ZeroDivisionError


def test_a_refused_option_is_a_usage_error() -> None:
    with pytest.raises(typer.BadParameter, match="max_batch is 0"), usage_errors():
        raise ValueError("max_batch is 0")


def test_a_service_that_fails_ends_with_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    async def service() -> None:
        await asyncio.sleep(0)
        raise NoReplicaAvailable(2.0)

    with pytest.raises(typer.Exit):
        run_until_stopped(service)
    assert "no replica is ready" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequest("temperature", "is nan"), "temperature: is nan"),
        (OSError("port 50050 is taken"), "port 50050 is taken"),
        (FailedCall(grpc.StatusCode.NOT_FOUND, "no such model"), "no such model (NOT_FOUND)"),
        (
            FailedCall(
                grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: x: Connection refused"
            ),
            "nothing answers at that address: is `graphpool serve` running, and on that port?",
        ),
        (
            FailedCall(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: no route to host"),
            "no connection to that address comes about: no route to host",
        ),
        (FailedCall(grpc.StatusCode.UNAVAILABLE, "no replica is ready"), "no replica is ready (UNAVAILABLE)"),
        (
            FailedCall(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"),
            "no whole answer came in time (DEADLINE_EXCEEDED)",
        ),
        (
            ZeroDivisionError("division by zero"),
            "unexpected ZeroDivisionError: division by zero (graphpool --traceback ... shows where)",
        ),
    ],
)
def test_each_kind_of_error_has_a_sentence(error: Exception, expected: str) -> None:
    assert sentence(error) == expected


def test_a_reader_that_went_away_is_no_traceback() -> None:
    script = "from cluster.cli.running import one_sentence_errors\nwith one_sentence_errors():\n    while True: print('x' * 1000)"
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    os.read(read_end, 10)
    os.close(read_end)
    _, errors = process.communicate(timeout=30)
    assert "BrokenPipe" not in errors
