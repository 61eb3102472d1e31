"""Does a KV pool that is asked for ten times what it holds ever mix two answers up, lose a block, or stand still?

    python -m bench.pool_soak --seconds 600            # eager, on the CPU
    python -m bench.pool_soak --seconds 600 --graphs   # CUDA graphs on a GPU, their stand-in without one

A tiny random model in float32 answers canary requests whose tokens are known from running each alone. More of them are
kept in the queue than the pool holds; some are cancelled, most begin like others do. Writes
`bench/results/pool_soak.json`; exits with 1 at the first foreign token, lost block or standstill.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench.options import bench_parser, parse_for_gpu
from bench.results_file import Results, cpu_name
from tests.fakes.tiny_model import VOCAB, tiny_engine, tiny_model
from worker.engine import Engine
from worker.graph_runner import GraphRunner
from worker.load_causal_lm import ServedModel
from worker.request import ChoiceDelta, EngineEvent, GenerateRequest, RequestPhase
from worker.sampling import SamplingParams

BLOCK_SIZE = 4
LONGEST = 128
NUM_BLOCKS = 64
"""Two of the longest sequences, for eight rows that want ten times as much."""
CANCELLED = 0.1
MAX_SILENT_STEPS = 500
"""Steps without a single token while there is work."""

Tokens = dict[int, list[int]]
"""By choice."""


class Broken(Exception):
    """What the soak looks for."""


@dataclass(slots=True)
class Tally:
    """What happened."""

    finished: int = 0
    cancelled: int = 0
    tokens: int = 0
    steps: int = 0
    occupancy: float = 0.0
    """Mean fraction of the blocks that sequences hold."""
    full_steps: int = 0
    """After which fewer blocks were free than rows running: nobody could be admitted."""


@dataclass(slots=True)
class Visit:
    """One canary in the engine."""

    canary: int
    got: Tokens = field(default_factory=lambda: defaultdict(list))
    num_open: int = 1


def canaries(count: int, seed: int) -> list[GenerateRequest]:
    """Prompts around block ends, most of them with a beginning in common; greedy and sampled, salted and private."""
    dice = random.Random(seed)
    stems = [[dice.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
    made = []
    for number in range(count):
        prompt = dice.choice(stems)[: dice.randint(1, 60)] + [dice.randrange(VOCAB) for _ in range(dice.randint(0, 9))]
        sampling = SamplingParams(
            max_tokens=dice.randint(8, LONGEST - len(prompt)),
            temperature=dice.choice([0.0, 0.0, 0.0, 1.0]),
            seed=number,
            n=dice.choice([1, 1, 1, 3]),
            ignore_eos=True,
        )
        made.append(
            GenerateRequest(
                request_id=str(number),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                cache_salt=dice.choice(["", "", "", "a"]),
                use_prefix_cache=dice.random() < 0.9,
            )
        )
    return made


def alone(model: ServedModel, request: GenerateRequest) -> Tokens:
    """The answer of an engine that has nothing else to do and remembers nothing."""
    engine = tiny_engine(model, prefix_cache=False, graphs="off", kernels="torch")
    engine.add(request)
    got: Tokens = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            got[event.index] += event.token_ids
    return got


def crowded_engine(model: ServedModel, *, graphs: bool) -> Engine:
    """An engine whose pool holds a fraction of what its rows want, and NaN wherever nothing was written."""
    layers, heads, head_dim = model.model.shape.num_layers, model.model.shape.num_kv_heads, model.model.shape.head_dim
    on_gpu = next(model.model.module.parameters()).device.type == "cuda"
    engine = tiny_engine(
        model,
        block_size=BLOCK_SIZE,
        max_batch=8,
        prefill_chunk=16,
        prefill_chunk_when_busy=8,
        kv_cache_bytes=(NUM_BLOCKS + 1) * 2 * layers * BLOCK_SIZE * heads * head_dim * 4,
        graphs="off" if not graphs else "auto" if on_gpu else "fake",
        capture="startup",
        kernels="torch",
    )
    engine.kv_cache.storage.fill_(torch.nan)
    engine.kv_cache.scrub([0])
    if isinstance(engine.runner, GraphRunner):
        engine.runner.prepare_all()
    return engine


class PoolSoak:
    """Keeps `engine` crowded with canaries and compares every token it brings."""

    def __init__(self, engine: Engine, canaries: list[GenerateRequest], expected: list[Tokens], seed: int) -> None:
        self.engine = engine
        self.canaries = canaries
        self.expected = expected
        self.tally = Tally()
        self._dice = random.Random(seed)
        self._visits: dict[str, Visit] = {}
        self._number = 0
        self._silent = 0

    def run(self, is_over: Callable[[], bool]) -> Tally:
        """Until `is_over`, and then until everything has ended. Raises Broken."""
        while not is_over():
            while len(self.engine.scheduler.waiting) < 8:
                self._admit()
            if self._dice.random() < CANCELLED / 20:
                self._cancel()
            self._step()
        while self.engine.has_work:
            self._step()
        self._check_pool_is_free()
        return self.tally

    def _admit(self) -> None:
        canary = self._dice.randrange(len(self.canaries))
        self._number += 1
        request = replace(self.canaries[canary], request_id=f"{canary}/{self._number}")
        self.engine.add(request)
        self._visits[request.request_id] = Visit(canary, num_open=request.sampling.n)

    def _cancel(self) -> None:
        victim = self._dice.choice(list(self._visits))
        self.engine.cancel(victim)
        del self._visits[victim]
        self.tally.cancelled += 1

    def _step(self) -> None:
        events = self.engine.step()
        self._silent = 0 if events else self._silent + 1
        if self._silent > MAX_SILENT_STEPS:
            raise Broken(f"no token in {self._silent} steps, with {len(self.engine.scheduler.running)} rows running")
        for event in events:
            self._take(event)
        self._count()

    def _take(self, event: EngineEvent) -> None:
        visit = self._visits[event.request_id]
        if isinstance(event, RequestPhase):
            return
        if not isinstance(event, ChoiceDelta):
            raise Broken(f"canary {visit.canary} failed: {event.error}")
        got = visit.got[event.index]
        got += event.token_ids
        expected = self.expected[visit.canary][event.index]
        if got != expected[: len(got)]:
            raise Broken(f"canary {visit.canary}, choice {event.index}: token {len(got) - 1} is foreign")
        self.tally.tokens += len(event.token_ids)
        if event.finish_reason is None:
            return
        if got != expected:
            raise Broken(f"canary {visit.canary}, choice {event.index}: {len(got)} tokens of {len(expected)}")
        visit.num_open -= 1
        if not visit.num_open:
            del self._visits[event.request_id]
            self.tally.finished += 1

    def _count(self) -> None:
        tally, pool = self.tally, self.engine.scheduler.pool
        tally.steps += 1
        tally.occupancy += (1 - pool.num_free / pool.num_usable - tally.occupancy) / tally.steps
        tally.full_steps += pool.num_free <= len(self.engine.scheduler.running)

    def _check_pool_is_free(self) -> None:
        pool = self.engine.scheduler.pool
        if pool.num_free != pool.num_usable:
            raise Broken(f"{pool.num_usable - pool.num_free} blocks are lost")


def soak(
    is_over: Callable[[], bool], *, device: str, graphs: bool, num_canaries: int = 48, seed: int = 0
) -> tuple[Tally, Engine]:
    """Run one soak. Raises Broken."""
    model = tiny_model(device=device)
    requests = canaries(num_canaries, seed)
    expected = [alone(model, request) for request in requests]
    engine = crowded_engine(model, graphs=graphs)
    return PoolSoak(engine, requests, expected, seed).run(is_over), engine


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parse_for_gpu(parser)
    started = time.monotonic()
    tally, engine = soak(
        lambda: time.monotonic() - started > options.seconds,
        device=options.device,
        graphs=options.graphs,
        seed=options.seed,
    )
    _report(options, tally, engine, time.monotonic() - started)


def _report(options: argparse.Namespace, tally: Tally, engine: Engine, took_s: float) -> None:
    load = engine.load()
    hardware = torch.cuda.get_device_name() if options.device == "cuda" else cpu_name()
    found: dict[str, Any] = {
        "seconds": took_s,
        "requests_compared": tally.finished,
        "tokens_compared": tally.tokens,
        "foreign_tokens": 0,
        "lost_blocks": 0,
        "cancelled": tally.cancelled,
        "preemptions": engine.scheduler.num_preemptions,
        "mean_occupancy": tally.occupancy,
        "steps_at_capacity": tally.full_steps / tally.steps,
        "prefix_cache_hit_rate": load.prefix_cache_hits / load.prefix_cache_queries,
        "graph_replays": load.graph_replays,
        "eager_steps": load.eager_steps,
    }
    results = Results(bench="pool_soak", hardware=hardware, correctness=found)
    results.add(
        system="graphpool",
        model="tiny random, float32",
        metric="foreign_tokens",
        unit="tokens",
        value=0,
        scope="replica",
        note="graphs" if options.graphs else "eager",
    )
    print(*(f"{name}: {value:.4g}" for name, value in found.items()), sep="\n")
    print(results.write())


if __name__ == "__main__":
    main()
