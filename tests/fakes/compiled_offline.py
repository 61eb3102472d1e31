"""Runs one of the `tests.fakes.compile_...` programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fakes.command_line import ROOT


def compiled_offline(program: str, cache: Path, *arguments: str, timeout_s: float = 240) -> list[dict[str, Any]]:
    """What it found."""
    run = run_compiler("-m", f"tests.fakes.{program}", *arguments, cache=cache, timeout_s=timeout_s)
    assert run.returncode == 0, run.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(run.stdout)
    return found


def run_compiler(*arguments: str, cache: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in a process of its own, without Triton's interpreter and with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
