"""The sampling kernels compile for Hopper without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    run = subprocess.run(
        [sys.executable, "-m", "tests.fakes.compile_sampling"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(run.stdout)
    return found


def test_every_launch_of_the_stage_compiles(compiled: list[dict[str, Any]]) -> None:
    assert [kernel["name"] for kernel in compiled] == ["survey", "weigh", "refine", "gather", "cut", "draw"]


def test_every_launch_starts_early_and_waits(compiled: list[dict[str, Any]]) -> None:
    # One that left without waiting would let the next one start before those ahead of it have finished.
    assert all(kernel["waits"] and kernel["launch_pdl"] for kernel in compiled)


def test_no_product_is_fused_with_a_sum(compiled: list[dict[str, Any]]) -> None:
    assert not any(kernel["fuses"] or kernel["may_fuse"] for kernel in compiled)
