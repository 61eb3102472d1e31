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
    """What it found, in a process of its own, without Triton's interpreter and with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", f"tests.fakes.{program}", *arguments],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(run.stdout)
    return found
