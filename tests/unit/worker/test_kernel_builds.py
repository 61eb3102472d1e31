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


@pytest.fixture
def gone_through(monkeypatch: pytest.MonkeyPatch) -> list[GraphKey]:
    seen: list[GraphKey] = []

    def build_ahead(steps: Iterable[Callable[[], object]], *, max_threads: int) -> int:
        assert max_threads > 0
        before = len(seen)
        for step in steps:
            step()
        return len(seen) - before

    monkeypatch.setattr(kernel_builds, "build_ahead", build_ahead)
    monkeypatch.setattr(kernel_builds, "shortened", lambda model: model)
    return seen


def builds(seen: list[GraphKey], keys: list[GraphKey]) -> KernelBuilds:
    regions: Any = SimpleNamespace(model=None, go_through=seen.append)
    return KernelBuilds(regions, keys)


def test_the_smallest_decode_step_and_the_shortest_prompt_come_first(gone_through: list[GraphKey]) -> None:
    made = builds(gone_through, [*OTHERS, *reversed(FIRST)])
    assert made.build_first() == 2
    assert gone_through == FIRST


def test_all_others_are_built_once_in_their_order_and_in_pieces(gone_through: list[GraphKey]) -> None:
    made = builds(gone_through, [OTHERS[0], *FIRST, *OTHERS[1:]])
    made.build_first()
    pieces = -(-len(OTHERS) // GROUP)
    for left in range(pieces, 1, -1):
        assert made.num_left == left
        assert made.build_next() == GROUP
    assert made.build_next() == len(OTHERS) - GROUP * (pieces - 1)
    assert made.build_next() is None
    assert made.num_left == 0
    assert gone_through == [*FIRST, *OTHERS]


def test_a_worker_without_prompts_or_steps_builds_what_there_is(gone_through: list[GraphKey]) -> None:
    assert builds(gone_through, [OTHERS[-1]]).build_first() == 0
    assert builds(gone_through, FIRST[:1]).build_first() == 1
