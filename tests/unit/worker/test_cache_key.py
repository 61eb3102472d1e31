"""A kernel has one key in Triton's cache, in whatever order kernels are compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys
from worker.kernels import sampling_cut, sampling_draw, sampling_survey
from worker.kernels.cache_key import settle_key
kernels = [sampling_cut.cut, sampling_draw.draw, sampling_survey.survey]
order = sys.argv[1]
for place in order:
    settle_key(kernels[int(place)])
print(*(kernel.cache_key for kernel in kernels))
"""


def test_the_order_of_compilation_does_not_matter() -> None:
    keys = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, order],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for order in ("012", "210")
    }
    assert len(keys) == 1
    assert len(set(keys.pop().split())) == 3
