"""What each kernel adds to a step whose kernels overlap: the time from the end of the one before it to its own end."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from bench.kernels import DecodeBench

ROUNDS = 20
_LAYER = ("qkv", "attention", "o", "gate_up", "down")
_BLOCK_LAYER = ("qkv", "attention", "o", "norm", "gate_up", "down", "norm")


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel on the device's clock, in nanoseconds."""

    name: str
    start: int
    end: int


def kernel_shares(bench: DecodeBench, step_us: float) -> list[dict[str, Any]]:
    """One line a kind of kernel: launches in a step, and microseconds, which add up to `step_us`."""
    launches = traced(bench)
    per_step, rest = divmod(len(launches), ROUNDS)
    assert not rest, f"{len(launches)} kernels in {ROUNDS} replays"
    names = labels([launch.name for launch in launches[:per_step]], bench.model.shape.num_layers)
    added: dict[str, int] = defaultdict(int)
    for first in range(per_step, len(launches), per_step):
        before = launches[first].start
        for name, launch in zip(names, launches[first : first + per_step], strict=False):
            added[name] += max(launch.end - before, 0)
            before = max(before, launch.end)
    total = sum(added.values())
    return [
        {
            "kernel": name,
            "launches": names.count(name),
            "us": step_us * added[name] / total,
            "traced_us": added[name] / 1e3 / (ROUNDS - 1),
        }
        for name in dict.fromkeys(names)
    ]


def traced(bench: DecodeBench) -> list[Launch]:
    """Every kernel of ROUNDS replays, in order of their ends."""
    profiler = bench.profiled(ROUNDS)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    found = [
        Launch(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if "CUDA" in str(event.device_type()) and event.duration_ns() > 0 and not event.name().startswith("Mem")
    ]
    return sorted(found, key=lambda launch: launch.end)


def labels(names: list[str], num_layers: int) -> list[str]:
    """What the kernels of a step are for: known by their order in whole steps, else by their names."""
    for layer in (_LAYER, _BLOCK_LAYER):
        known = ["embed", *layer * num_layers, "head", "choice"]
        if len(names) == len(known) and names[0].startswith("_embed"):
            return known
    return [name[:60] for name in names]
