"""Running `graphpool` as a person would: a process of its own, with its streams and exit code."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cluster", *arguments]


def graphpool(*arguments: str, stdin: str = "", timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command(*arguments), cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@contextlib.contextmanager
def running(*arguments: str, **streams: int) -> Iterator[subprocess.Popen[str]]:
    """A command that runs for the length of a block, and is killed if it outlives it."""
    process = subprocess.Popen(command(*arguments), cwd=ROOT, text=True, **streams)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
    """Read the command's stderr up to a line that matches. Fails when the stream ends before."""
    assert process.stderr is not None
    give_up_s, lines = time.monotonic() + timeout_s, []
    while time.monotonic() < give_up_s:
        line = _COLOURS.sub("", process.stderr.readline())
        lines.append(line)
        match = re.search(pattern, line)
        if match is not None:
            return match
        if not line:
            break
    raise AssertionError(f"{pattern!r} did not come; the command said: {''.join(lines)}")


@contextlib.contextmanager
def scripted_replica(**knobs: object) -> Iterator[str]:
    """The address of a replica with a scripted engine."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.fakes.replica_process",
            "--config",
            '{"name": "scripted"}',
            "--knobs",
            json.dumps(knobs),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()
