"""Kernels of a first request are built first, those of all other keys in pieces, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from worker import kernel_builds
from worker.graphs.key import GraphKey
from worker.kernel_builds import GROUP, KernelBuilds

FIRST = [GraphKey("decode", 256, 1), GraphKey("prefill", 0, 16, "fresh")]
OTHERS = [
    GraphKey("decode", 4096, 256),
    GraphKey("prefill", 0, 1024, "fresh"),
    *(GraphKey("decode", 256, bucket) for bucket in (2, 4, 8, 16, 32, 64)),
    GraphKey("decode", 1024, 1),
    GraphKey("prefill", 256, 8, "chunk"),
    GraphKey("sample", 0, 1, "draw"),
]


class Ahead:
    """One kernel a step, built when it is waited for without a limit or `are_fast`."""

    def __init__(self, processes: Any = None) -> None:
        self.processes = processes
        self.num_asked = 0
        self.pending: list[int] = []
        self.settled: list[list[int]] = []
        self.are_fast = False

    def go_through(self, step: Callable[[], object]) -> list[int]:
        step()
        self.num_asked += 1
        self.pending.append(self.num_asked)
        return [self.num_asked]

    @property
    def num_pending(self) -> int:
        return len(self.pending)

    def settle(self, kernels: Iterable[int] | None = None, *, wait_s: float | None = None) -> bool:
        if wait_s is not None and not self.are_fast:
            return False
        chosen = list(self.pending if kernels is None else kernels)
        self.settled.append(chosen)
        self.pending = [kernel for kernel in self.pending if kernel not in chosen]
        return True


class Processes:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_builds, "KernelsAhead", Ahead)
    monkeypatch.setattr(kernel_builds, "shortened", lambda model: model)


def builds(keys: list[GraphKey], processes: Processes | None = None) -> tuple[KernelBuilds, list[GraphKey], Any]:
    """With the keys gone through, and what stands for the building."""
    seen: list[GraphKey] = []
    regions: Any = SimpleNamespace(model=None, go_through=seen.append)
    made = KernelBuilds(regions, keys, processes)  # type: ignore[arg-type]
    return made, seen, made._ahead


def test_the_smallest_decode_step_and_the_shortest_prompt_come_first() -> None:
    made, seen, ahead = builds([*OTHERS, *reversed(FIRST)])
    assert made.build_first() == 2
    assert seen == FIRST
    assert ahead.settled == [[1, 2]]


def test_all_others_are_built_once_in_their_order_and_in_pieces() -> None:
    made, seen, ahead = builds([OTHERS[0], *FIRST, *OTHERS[1:]])
    made.build_first()
    pieces = -(-len(OTHERS) // GROUP)
    for left in range(pieces, 1, -1):
        assert made.num_left == left
        assert made.build_next() == GROUP
        assert not ahead.pending
    assert made.build_next() == len(OTHERS) - GROUP * (pieces - 1)
    assert made.build_next() is None
    assert made.num_left == 0
    assert seen == [*FIRST, *OTHERS]


def test_a_worker_without_prompts_or_steps_builds_what_there_is() -> None:
    assert builds([OTHERS[-1]])[0].build_first() == 0
    assert builds(FIRST[:1])[0].build_first() == 1


def test_with_processes_no_piece_waits_and_each_key_waits_for_its_own_kernels() -> None:
    processes = Processes()
    made, seen, ahead = builds([*FIRST, *OTHERS], processes)
    made.build_first()
    while made.build_next() is not None:
        pass
    assert seen == [*FIRST, *OTHERS]
    assert ahead.num_pending == len(OTHERS)
    assert not made.are_built(OTHERS[0])
    ahead.are_fast = True
    for number, key in enumerate(OTHERS, 3):
        assert not processes.is_closed
        assert made.are_built(key)
        assert ahead.settled[-1] == [number]
    assert processes.is_closed
    assert made.are_built(FIRST[0])
