"""How long a call takes: for the host, in a queue of calls, on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


def settle(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def host_ms(work: Callable[[], object], device: str = "cuda", *, rounds: int = 20, warm: int = 3) -> float:
    """Median milliseconds of one call with its device work, the device idle before."""
    rounds, warm = (rounds, warm) if device == "cuda" else (3, 1)
    for _ in range(warm):
        work()
    seconds = []
    for _ in range(rounds):
        settle(device)
        began = time.perf_counter()
        work()
        settle(device)
        seconds.append(time.perf_counter() - began)
    return 1e3 * median(seconds)


def queued_ms(work: Callable[[], object], device: str, *, rounds: int = 50, blocks: int = 5) -> float:
    """Median over blocks of milliseconds a call when calls follow each other without a wait."""
    rounds, blocks = (rounds, blocks) if device == "cuda" else (3, 1)
    work()
    found = []
    for _ in range(blocks):
        settle(device)
        began = time.perf_counter()
        for _ in range(rounds):
            work()
        settle(device)
        found.append((time.perf_counter() - began) / rounds)
    return 1e3 * median(found)


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` as a graph; it is compiled and warm before."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def device_ms(work: Callable[[], object], rounds: int = 50, blocks: int = 5) -> float:
    """Median over blocks of milliseconds a call takes on the device when calls follow each other."""
    work()
    times = []
    for _ in range(blocks):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(rounds):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / rounds)
    return float(median(times))
