"""A worker used as a library starts what compiles its kernels by itself, and ends it when it does not start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from worker import build
from worker.build import build_engine, start_compilers
from worker.config import WorkerConfig
from worker.errors import WorkerError

STARTED = object()
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Compilers:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("kernels", "device", "are_started"),
    [("auto", CUDA, True), ("triton", CUDA, True), ("torch", CUDA, False), ("auto", CPU, False)],
)
def test_processes_are_started_where_there_are_kernels_to_build(
    monkeypatch: pytest.MonkeyPatch, kernels: Any, device: torch.device, are_started: bool
) -> None:
    monkeypatch.setattr(build, "start_build_processes", lambda: STARTED)
    monkeypatch.setattr(build, "hash_compiler_ahead", lambda: None)
    found: Any = start_compilers(WorkerConfig(model="any", kernels=kernels), device)
    assert found is (STARTED if are_started else None)


def test_a_start_that_fails_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    own, given = Compilers(), Compilers()
    monkeypatch.setattr(build, "start_compilers", lambda *_: own)

    def fail(*_: Any, **__: Any) -> None:
        raise WorkerError("no weights")

    monkeypatch.setattr(build, "load_causal_lm", fail)
    for compilers in (given, None):
        with pytest.raises(WorkerError, match="no weights"):
            build_engine(WorkerConfig(model="smollm2-135m", device="cpu"), lambda _: None, compilers=compilers)  # type: ignore[arg-type]
    assert own.is_closed
    assert given.is_closed
