"""The engine by itself, at the mailbox: what a step costs the GPU, what it costs the host, and what waits for whom.

    python -m bench.engine_speed [--model NAME] [--batches 1 8 32 256]

Random weights of a public shape, 128 prompt tokens, greedy, all graphs captured, no network. For each batch: time of a
step, host time of a step (the engine's thread, without its waiting for tokens), tokens/s of a burst from its first
prompt to its last token, the tokens of many rows held back and handed out together as a replica has it; without that,
time to first token of an idle engine, and of 32 prompts that come together while 8 rows decode, with chunks that widen
with the crowd and without; the time between two tokens of 8 running rows while 1024-token prompts come faster than
they can be computed, and one after another; and by the profiler the part of the time in which no kernel runs. The same
prompts through eager steps must give the same tokens. Writes `bench/results/engine_speed.json`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean, median, quantiles
from typing import Any

import torch
from torch._C._autograd import DeviceType

from bench.clocks import settle
from bench.engine_runs import (
    Tokens,
    Worker,
    agreement,
    answers,
    build,
    cancel_all,
    decode_step_ms,
    decoding_rows,
    first_agreement,
    hardware,
    parser,
    prompt,
    step,
    submit,
)
from bench.options import parse_for_gpu
from bench.results_file import Results
from bench.shapes import SHAPES
from cluster.config import ReplicaConfig
from cluster.replica.flush import FlushPolicy
from worker import policy
from worker.engine import Engine
from worker.pending import PendingStep

PROMPT, ANSWER = 128, 128
ROUNDS = 3


class Hold:
    """Holds tokens back as a replica does, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self._policy = FlushPolicy.of(ReplicaConfig())

    def __call__(self, num_live: int) -> float:
        return self._policy.interval(num_live) if self.is_on else 0.0


class Waits:
    """Seconds the engine's thread has waited for tokens."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        launch = engine.runner.launch
        engine.runner.launch = lambda batch: _Waited(launch(batch), self)  # type: ignore[method-assign]


class _Waited:
    def __init__(self, pending: PendingStep, waits: Waits) -> None:
        self.pending = pending
        self.waits = waits

    def result(self) -> Any:
        began = time.perf_counter()
        try:
            return self.pending.result()
        finally:
            self.waits.seconds += time.perf_counter() - began


def context(engine: Engine) -> int:
    """Prompt tokens, fewer where a tiny model allows no more."""
    return min(PROMPT, engine.info.max_model_len // 4)


def drain(engine: Engine, tokens: Tokens) -> None:
    while engine.has_work:
        step(engine, tokens)


def host_step_ms(engine: Engine, batch: int, steps: int) -> float:
    """Host time of a step: all the thread does but wait."""
    tokens = decoding_rows(engine, batch, context(engine), steps)
    launch = engine.runner.launch
    waits = Waits(engine)
    for _ in range(4):
        step(engine, tokens)
    waits.seconds, began = 0.0, time.perf_counter()
    for _ in range(steps):
        step(engine, tokens)
    took = time.perf_counter() - began - waits.seconds
    engine.runner.launch = launch  # type: ignore[method-assign]
    cancel_all(engine)
    return 1e3 * took / steps


def burst_tokens_per_s(engine: Engine, batch: int) -> float:
    """From the first prompt to the last token of `batch` requests that come together."""
    began = time.perf_counter()
    found = answers(engine, [prompt(PROMPT, row, engine.info.vocab_size) for row in range(batch)], ANSWER)
    return sum(map(len, found.values())) / (time.perf_counter() - began)


def ttft_ms(engine: Engine, length: int) -> float:
    """Of one request to an idle engine."""
    times = []
    for number in range(12):
        tokens: Tokens = {}
        ids = prompt(length, number, engine.info.vocab_size)
        began = time.perf_counter()
        submit(engine, "one", ids, 1)
        drain(engine, tokens)
        times.append(1e3 * (time.perf_counter() - began))
    return median(times[2:])


def crowd_ttft_ms(engine: Engine, rows: int, num_prompts: int) -> float:
    """Mean time to first token of prompts that come together while `rows` decode; the median of some rounds."""
    times = []
    for _ in range(ROUNDS):
        tokens = decoding_rows(engine, rows, PROMPT, 500)
        prompts = [prompt(PROMPT, row, engine.info.vocab_size) for row in range(num_prompts)]
        came: dict[str, float] = {}
        began = time.perf_counter()
        for number, ids in enumerate(prompts):
            submit(engine, f"crowd{number}", ids, 2)
        while len(came) < num_prompts:
            step(engine, tokens)
            now = time.perf_counter()
            for name in tokens.keys() - came.keys():
                if name.startswith("crowd"):
                    came[name] = now
        times.append(1e3 * mean(at - began for at in came.values()))
        cancel_all(engine)
    return median(times)


@contextmanager
def narrow_chunks() -> Iterator[None]:
    """Chunks of one width while rows decode, however many prompts wait."""
    widest, policy.MAX_WIDENING = policy.MAX_WIDENING, 1
    try:
        yield
    finally:
        policy.MAX_WIDENING = widest


def gaps_under_prompts_ms(
    engine: Engine, rows: int, length: int, seconds: float, *, one_by_one: bool = False
) -> list[float]:
    """Times between two tokens of each of `rows` running answers, while a prompt of `length` is always waiting.

    More come than can be computed, unless they come `one_by_one`.
    """
    tokens, number = decoding_rows(engine, rows, PROMPT, engine.info.max_model_len), 0
    came: dict[str, float] = {}
    gaps: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        num_unfinished = len(engine.live_request_ids) - rows
        if not num_unfinished if one_by_one else not engine.scheduler.waiting:
            submit(engine, f"prompt{number}", prompt(length, number, engine.info.vocab_size), 2)
            number += 1
        before = {name: len(ids) for name, ids in tokens.items()}
        step(engine, tokens)
        now = time.perf_counter()
        for name, ids in tokens.items():
            if name.startswith("row") and len(ids) > before.get(name, 0):
                if name in came:
                    gaps.append(1e3 * (now - came[name]))
                came[name] = now
    assert sum(row.request.request_id.startswith("row") for row in engine.scheduler.running) == rows
    cancel_all(engine)
    return gaps


def idle_share(engine: Engine, batch: int, steps: int) -> float:
    """Part of the time between the first and the last kernel of a run of steps in which none ran."""
    tokens = decoding_rows(engine, batch, PROMPT, steps)
    for _ in range(8):
        step(engine, tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step(engine, tokens)
        settle("cuda")
    cancel_all(engine)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    covered, reached = 0.0, float(spans[0][0])
    for start, end in spans:
        covered += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return float(1 - covered / (reached - spans[0][0]))


def measure(worker: Worker, hold: Hold, results: Results, model: str, batches: list[int], device: str) -> None:
    """Everything; `results` gets the rows."""
    engine, fast = worker.engine, device == "cuda"

    def add(metric: str, unit: str, value: float, **more: Any) -> None:
        results.add(system="graphpool", model=model, scope="replica", metric=metric, unit=unit, value=value, **more)
        print(f"{metric} {more}: {value:.4g} {unit}", flush=True)

    prompts = [prompt(PROMPT if fast else 8, row, engine.info.vocab_size) for row in range(4)]
    ours = answers(engine, prompts, 16)
    with worker.eager():
        theirs = answers(engine, prompts, 16)
    results.correctness["first_tokens_equal_to_eager"] = first_agreement(ours, theirs)
    results.correctness["tokens_equal_to_eager"] = agreement(ours, theirs)
    hold.is_on = True
    for batch in batches:
        steps = [decode_step_ms(engine, batch, context(engine), 100 if fast else 4, device) for _ in range(ROUNDS)]
        add("decode_step_ms", "ms", median(steps), batch=batch)
        add("host_step_ms", "ms", host_step_ms(engine, batch, 100 if fast else 4), batch=batch)
        add("tokens_per_s", "1/s", burst_tokens_per_s(engine, batch), batch=batch)
    with narrow_chunks():
        add("tokens_per_s_narrow", "1/s", burst_tokens_per_s(engine, max(batches)), batch=max(batches))
    hold.is_on = False
    for length in (128, 1024) if fast else (16,):
        add("ttft_ms", "ms", ttft_ms(engine, length), batch=1, context=length)
    if fast:
        beside = "that come together beside 8 rows"
        add("ttft_ms", "ms", crowd_ttft_ms(engine, 8, 32), batch=32, context=PROMPT, note=beside)
        with narrow_chunks():
            narrow = crowd_ttft_ms(engine, 8, 32)
        add("ttft_ms", "ms", narrow, batch=32, context=PROMPT, note=f"{beside}, in chunks of one width")
        for is_flood in (True, False):
            gaps = gaps_under_prompts_ms(engine, 8, 1024, 2.5, one_by_one=not is_flood)
            note = "under a stream of 1024-token prompts" if is_flood else "while one 1024-token prompt follows another"
            add("token_gap_median_ms", "ms", median(gaps), batch=8, note=note)
            add("token_gap_p99_ms", "ms", quantiles(gaps, n=100)[98], batch=8, note=note)
        for batch in (1, 32):
            add("idle_share", "1", idle_share(engine, batch, 60), batch=batch)
    results.extra["wasted_rows"] = engine.num_wasted_rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="llama-3.2-1b", choices=list(SHAPES))
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 256])
    chosen = parse_for_gpu(options)
    batches = chosen.batches if chosen.device == "cuda" else [1, 4]
    hold = Hold()
    worker = build(
        chosen.model,
        chosen.device,
        hold_s=hold,
        max_batch=max(batches),
        max_model_len=8192,
        kv_cache_bytes=24 << 30,
        prefix_cache=False,
    )
    results = Results(bench="engine_speed", hardware=hardware(chosen.device))
    measure(worker, hold, results, chosen.model, batches, chosen.device)
    print(results.correctness, results.write(chosen.out))


if __name__ == "__main__":
    main()
