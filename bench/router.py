"""What the router costs: added time to first token, tokens a second through one process, processor time a token.

    python -m bench.router

A scripted engine in a replica process of its own, a router process, and this process as the client, over loopback
gRPC. Every stream must be the script, piece by piece. Prints a table and writes `bench/results/router.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import psutil
from rich.console import Console
from rich.table import Table

from bench.options import bench_parser
from bench.results_file import Results, cpu_name
from cluster.config import RouterConfig
from cluster.router.server import RouterServer
from protos import generation_pb2, generation_pb2_grpc
from tests.fakes.replica_process import spawn_replica
from tests.fakes.script_engine import script

PAIRS = 300
SECONDS = 3.0
MESSAGES_PER_S = {1: 1000, 16: 4000}
"""Offered, by number of streams: less than a core can carry, so that messages keep their size."""
GOAL_ADDED_MS = 1.0
GOAL_TOKENS_PER_S = 20_000


@dataclass(slots=True)
class Pool:
    """One replica process behind one router process."""

    replica_address: str
    router_address: str
    router: psutil.Process


@dataclass(slots=True)
class Flow:
    """What went through the router in one run."""

    streams: int
    tokens_per_message: float
    tokens_per_s: float
    cpu_us_per_token: float
    cpu_us_per_message: float
    all_right: bool

    @property
    def tokens_per_s_per_core(self) -> float:
        return 1e6 / self.cpu_us_per_token


@dataclass(slots=True)
class Received:
    """The pieces of one stream."""

    ids: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)


@contextlib.asynccontextmanager
async def pool(*, step_s: float, tokens_per_step: int) -> AsyncIterator[Pool]:
    config = {"flush_interval_ms": 0, "max_flush_interval_ms": 0}
    knobs = {"step_s": step_s, "tokens_per_step": tokens_per_step, "max_model_len": 1_000_000}
    replica = await spawn_replica(config, knobs)
    router = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.router", "--router-for", replica.address, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert router.stdout is not None
        address = (await asyncio.wait_for(router.stdout.readline(), 30)).decode().strip()
        yield Pool(replica.address, address, psutil.Process(router.pid))
    finally:
        router.kill()
        await router.wait()
        await replica.kill()


async def serve_router(replica: str) -> None:
    """The router process."""
    server = RouterServer(RouterConfig(listen="127.0.0.1:0", replicas=(replica,)))
    await server.start()
    await server.wait_ready(timeout_s=20)
    print(server.address, flush=True)
    await asyncio.Event().wait()


def request_of(number: int, num_tokens: int) -> generation_pb2.GenerateRequest:
    sampling = generation_pb2.SamplingParams(max_tokens=num_tokens, seed=number)
    prompt = generation_pb2.TokenIds(ids=[3 + number % 100] * 16)
    return generation_pb2.GenerateRequest(token_ids=prompt, sampling=sampling)


async def first_token_ms(stub: generation_pb2_grpc.GenerationServiceAsyncStub, number: int) -> float:
    started_s = time.perf_counter()
    call = stub.GenerateStream(request_of(number, 1))
    response = await call.read()
    elapsed_ms = 1000 * (time.perf_counter() - started_s)
    expected = script([3 + number % 100] * 16, number, 0, 1)
    assert isinstance(response, generation_pb2.GenerateResponse)
    assert tuple(response.choices[0].token_ids) == expected, "a first token that is not the script's"
    await call.read()
    return elapsed_ms


async def measure_first_tokens() -> tuple[list[float], list[float]]:
    """Milliseconds to the first token, (direct, through the router), in pairs of random order."""
    direct: list[float] = []
    routed: list[float] = []
    async with pool(step_s=0.001, tokens_per_step=1) as both, contextlib.AsyncExitStack() as stack:
        stubs = []
        for address in (both.replica_address, both.router_address):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            stubs.append(generation_pb2_grpc.GenerationServiceStub(channel))
        for number in range(20 + PAIRS):
            order = random.sample((0, 1), 2)
            found = {which: await first_token_ms(stubs[which], number) for which in order}
            if number >= 20:
                direct.append(found[0])
                routed.append(found[1])
    return direct, routed


async def receive(stub: generation_pb2_grpc.GenerationServiceAsyncStub, number: int, num_tokens: int) -> Received:
    received = Received()
    async for response in stub.GenerateStream(request_of(number, num_tokens)):
        received.ids.extend(response.choices[0].token_ids)
        received.sequence.append(response.sequence)
    return received


def is_script(number: int, received: Received, num_tokens: int) -> bool:
    in_order = received.sequence == list(range(len(received.sequence)))
    return in_order and tuple(received.ids) == script([3 + number % 100] * 16, number, 0, num_tokens)


async def measure_flow(streams: int, tokens_per_message: int) -> Flow:
    """Let so many streams of such messages run for a few seconds."""
    step_s = streams / MESSAGES_PER_S[streams]
    num_tokens = int(SECONDS / step_s) * tokens_per_message
    async with (
        pool(step_s=step_s, tokens_per_step=tokens_per_message) as both,
        grpc.aio.insecure_channel(both.router_address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await receive(stub, 0, tokens_per_message)
        cpu_s, started_s = processor_s(both.router), time.perf_counter()
        received = await asyncio.gather(*(receive(stub, number, num_tokens) for number in range(streams)))
        elapsed_s = time.perf_counter() - started_s
        cpu_s = processor_s(both.router) - cpu_s
    tokens = sum(len(one.ids) for one in received)
    messages = sum(len(one.sequence) for one in received)
    return Flow(
        streams=streams,
        tokens_per_message=tokens / messages,
        tokens_per_s=tokens / elapsed_s,
        cpu_us_per_token=1e6 * cpu_s / tokens,
        cpu_us_per_message=1e6 * cpu_s / messages,
        all_right=all(is_script(number, one, num_tokens) for number, one in enumerate(received)),
    )


def processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def report_first_tokens(console: Console, results: Results, direct: list[float], routed: list[float]) -> None:
    added = statistics.median(routed) - statistics.median(direct)
    table = Table(title=f"time to first token, ms, {PAIRS} pairs", title_justify="left")
    for title in ("", "p50", "p90"):
        table.add_column(title, justify="right" if title else "left")
    for name, values in (("direct to the replica", direct), ("through the router", routed)):
        deciles = statistics.quantiles(values, n=10)
        table.add_row(name, f"{deciles[4]:.2f}", f"{deciles[8]:.2f}")
        scope = "replica" if values is direct else "router"
        row = {"system": "graphpool", "model": "script", "unit": "ms", "scope": scope, "batch": 1, "context": 16}
        results.add(metric="ttft_ms", value=round(deciles[4], 4), **row)
        results.add(metric="ttft_p90_ms", value=round(deciles[8], 4), **row)
    table.add_row("added by the router", f"{added:.2f}", "", style="bold")
    console.print(table)
    console.print(f"goal: at most {GOAL_ADDED_MS} ms added", style="dim")
    results.add(
        system="graphpool",
        model="script",
        metric="router_added_ttft_ms",
        unit="ms",
        value=round(added, 4),
        scope="router",
        batch=1,
    )


def report_flows(console: Console, results: Results, flows: list[Flow]) -> None:
    table = Table(title="through one router process", title_justify="left")
    for title in ("streams", "tokens a message", "tokens/s", "CPU us/token", "CPU us/message", "tokens/s a core"):
        table.add_column(title, justify="right")
    for flow in flows:
        table.add_row(
            str(flow.streams),
            f"{flow.tokens_per_message:.1f}",
            f"{flow.tokens_per_s:,.0f}",
            f"{flow.cpu_us_per_token:.1f}",
            f"{flow.cpu_us_per_message:.0f}",
            f"{flow.tokens_per_s_per_core:,.0f}",
        )
        for metric, unit, value in (
            ("tokens_per_s", "1/s", flow.tokens_per_s),
            ("router_cpu_us_per_token", "us", flow.cpu_us_per_token),
            ("router_cpu_us_per_message", "us", flow.cpu_us_per_message),
            ("router_tokens_per_s_per_core", "1/s", flow.tokens_per_s_per_core),
        ):
            results.add(
                system="graphpool",
                model="script",
                metric=metric,
                unit=unit,
                value=round(value, 2),
                scope="router",
                batch=flow.streams,
                note=f"{flow.tokens_per_message:.1f} tokens a message",
            )
    console.print(table)
    console.print(f"goal: at least {GOAL_TOKENS_PER_S:,} tokens/s a core with 8 tokens a message", style="dim")


async def measure() -> None:
    console = Console()
    results = Results(bench="router", hardware=cpu_name())
    direct, routed = await measure_first_tokens()
    flows = [await measure_flow(streams, tokens) for streams in (1, 16) for tokens in (1, 8)]
    results.correctness = {
        "what": "every stream equals the script and its messages are numbered without a gap",
        "streams": sum(flow.streams for flow in flows) + 2 * PAIRS,
        "passed": all(flow.all_right for flow in flows),
    }
    report_first_tokens(console, results, direct, routed)
    report_flows(console, results, flows)
    if not results.correctness["passed"]:
        sys.exit("a stream was not the script: no result is written")
    console.print(f"written to {results.write()}", style="dim")


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--router-for", metavar="HOST:PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asyncio.run(serve_router(arguments.router_for) if arguments.router_for else measure())


if __name__ == "__main__":
    main()
