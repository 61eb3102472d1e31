"""The calls that the CUDA backend makes, in order, against a scripted torch.cuda: what happens on a GPU is tests/gpu's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from worker.graphs import cuda_backend
from worker.graphs.cuda_backend import CudaCapture
from worker.graphs.errors import DriverTooOld

POOL = (0, 7)


class Script:
    """Stands for torch.cuda: logs every call; `fails` names calls that raise."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails: dict[str, list[Exception]] = {}
        self.current: Any = ScriptedStream(self, "main")
        self.pools = 7

    def call(self, name: str) -> None:
        self.log.append(name)
        if self.fails.get(name):
            raise self.fails[name].pop(0)


class ScriptedStream:
    device_index = 0

    def __init__(self, script: Script, name: str) -> None:
        self.script = script
        self.name = name

    def wait_stream(self, other: ScriptedStream) -> None:
        self.script.call(f"{self.name} waits for {other.name}")


class ScriptedGraph:
    def __init__(self, script: Script) -> None:
        self.script = script

    def register_generator_state(self, _: torch.Generator) -> None:
        self.script.call("register generator")

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.script.call(f"begin {pool} {capture_error_mode} on {self.script.current.name}")

    def capture_end(self) -> None:
        self.script.call("end")

    def pool(self) -> Any:
        return POOL

    def replay(self) -> None:
        self.script.call("replay")

    def reset(self) -> None:
        self.script.call("reset")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script()

    @contextlib.contextmanager
    def stream(entered: ScriptedStream) -> Iterator[None]:
        before, made.current = made.current, entered
        try:
            yield
        finally:
            made.current = before

    def new_pool() -> tuple[int, int]:
        made.pools += 1
        return (0, made.pools)

    fakes: dict[str, Any] = {
        "Stream": lambda *_: ScriptedStream(made, "capture"),
        "stream": stream,
        "device": lambda *_: contextlib.nullcontext(),
        "current_stream": lambda *_: made.current,
        "CUDAGraph": lambda **_: ScriptedGraph(made),
        "graph_pool_handle": new_pool,
        "mem_get_info": lambda *_: (1000, 2000),
        "memory_reserved": lambda *_: 500,
        "empty_cache": lambda: made.call("empty cache"),
        "synchronize": lambda *_: made.call("synchronize"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_backend, "driver_version", lambda: 13000)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: made.call("drop workspaces"), raising=False)
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool", raising=False)
    return made


BEGIN = f"begin {POOL} thread_local on capture"
FORK, JOIN = "capture waits for main", "main waits for capture"


def test_warm_up_is_ordered_on_both_sides(script: Script) -> None:
    CudaCapture().warm_up(lambda: script.call(f"run on {script.current.name}"), 2)
    assert script.log == [FORK, "run on capture", "run on capture", JOIN]


def test_a_capture_begins_and_ends_on_its_stream_without_waiting_for_the_device(script: Script) -> None:
    backend = CudaCapture()
    graph = backend.capture(lambda: script.call("run"), pool=POOL, generators=(torch.Generator(),))
    assert script.log == ["register generator", "drop workspaces", FORK, BEGIN, "run", "end", JOIN]
    graph.replay()
    graph.reset()
    assert script.log[-2:] == ["replay", "reset"]
    assert graph.outputs is None


def test_a_region_that_raises_ends_its_capture_and_leaves_nothing(script: Script) -> None:
    script.fails["run"] = [ValueError("model")]
    with pytest.raises(ValueError, match="model"):
        CudaCapture().capture(lambda: script.call("run"), pool=POOL)
    assert script.log == ["drop workspaces", FORK, BEGIN, "run", "end", "reset", JOIN]
    assert script.current.name == "main"


def test_streams_and_memory_are_reported_as_torch_does(script: Script) -> None:
    backend = CudaCapture(error_mode="global")
    assert (backend.memory().free_bytes, backend.memory().reserved_bytes) == (1000, 500)
    assert backend.current_stream() is script.current
    backend.trim()
    backend.capture(lambda: None, pool=POOL)
    assert script.log[:2] == ["drop workspaces", "empty cache"]
    assert f"begin {POOL} global on capture" in script.log


def test_a_driver_that_is_too_old_is_refused_at_once(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "driver_version", lambda: 12040)
    with pytest.raises(DriverTooOld, match=r"12\.4"):
        CudaCapture()
    assert script.log == []
