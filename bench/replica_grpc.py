"""End to end through a replica's gRPC: milliseconds a token, tokens/s, time to first token, starts.

    python -m bench.replica_grpc [--model NAME] [--batches 1 8 32 256] [--device cuda]

Random weights of a public shape, 128 prompt and 128 new tokens, greedy. The replica is a process of its own, the client
another; both hosts' time is in the numbers. The same once more through a router, a third process, whose single stream to
the replica carries all requests. Each answer must be whole and equal to the same prompt alone as far as bf16 near-ties
allow. The replica is started twice: with an empty cache of kernels, and with the one that this left. Before that, a
process imports what a replica imports, so that the byte code of all packages is there, as pip leaves it. Writes
`bench/results/replica_grpc.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.options import bench_parser, require_gpu
from bench.results_file import Results, cpu_name
from bench.shapes import SHAPES, write_config

PROMPT, ANSWER = 128, 128
ROUNDS = 3
CAPTURE_LIMIT_S = 60.0


async def serve(options: argparse.Namespace) -> None:
    """The replica process; it prints what became of graphs that could not be captured."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7d %(message)s")
    logging.getLogger().handlers[0].addFilter(
        lambda record: not record.getMessage().endswith((" captured ", "warmed up "))
    )
    from cluster.config import ReplicaConfig
    from cluster.replica_process import ReplicaProcess
    from worker.config import WorkerConfig

    worker = WorkerConfig(
        model=options.serve,
        load_format="dummy",
        device=options.device,
        max_model_len=options.max_model_len,
        max_batch=max(options.batches),
        kv_cache_bytes=options.kv_gib << 30,
        capture=options.capture,
        prefix_cache=False,  # the same prompts are asked for again
    )
    listen = f"127.0.0.1:{options.port}"
    process = await ReplicaProcess.open(worker, ReplicaConfig(listen=listen, flush_interval_ms=options.flush_ms))
    print("ready", flush=True)
    await process.server.wait_stopped()


async def route(options: argparse.Namespace) -> None:
    """The router process."""
    from cluster.config import RouterConfig
    from cluster.router.server import RouterServer

    server = RouterServer(RouterConfig(listen=f"127.0.0.1:{options.route}", replicas=(f"127.0.0.1:{options.port}",)))
    await server.start()
    await asyncio.Event().wait()


@contextlib.contextmanager
def replica(options: argparse.Namespace, config: Path, cache: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start one and end it. `cache` is where built kernels are kept."""
    command = [sys.executable, "-m", "bench.replica_grpc", "--serve", str(config), "--port", str(options.port)]
    command += ["--device", options.device, "--capture", options.capture, "--max-model-len", str(options.max_model_len)]
    command += ["--kv-gib", str(options.kv_gib), "--flush-ms", str(options.flush_ms)]
    environment = with_byte_code(cache.parent) | {"TRITON_CACHE_DIR": str(cache)}
    process = subprocess.Popen([*command, "--batches", *map(str, options.batches)], env=environment)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


def with_byte_code(folder: Path) -> dict[str, str]:
    """An environment in which byte code is read and written, also of packages installed without any."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def import_once(options: argparse.Namespace, folder: Path) -> None:
    """What a replica and its server of kernels import."""
    modules = ["bench.replica_grpc", "cluster.replica_process", "worker.build"]
    code = f"import {', '.join(modules)}"
    if options.device == "cuda":
        code += "; from worker.kernels.build_main import import_kernels; import_kernels()"
    subprocess.run([sys.executable, "-c", code], env=with_byte_code(folder), check=True)


@contextlib.contextmanager
def router(options: argparse.Namespace) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start one in front of the replica; its port and process."""
    port = free_port()
    command = [sys.executable, "-m", "bench.replica_grpc", "--route", str(port), "--port", str(options.port)]
    process = subprocess.Popen(command)
    try:
        yield port, process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Clock:
    """When each message of one answer came, and what it held."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: list[float] = []
        self.token_ids: list[int] = []

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.seconds[0] - self.started)

    @property
    def token_ms(self) -> float:
        """Mean milliseconds between tokens after the first."""
        return 1e3 * (self.seconds[-1] - self.seconds[0]) / (len(self.token_ids) - 1)


async def ask(client: Any, prompt: list[int], max_tokens: int = ANSWER) -> Clock:
    clock = Clock()
    async for piece in client.stream(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True):
        if piece.token_ids:
            clock.seconds.append(time.perf_counter())
            clock.token_ids += piece.token_ids
    assert len(clock.token_ids) == max_tokens, len(clock.token_ids)
    return clock


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, vocab) for _ in range(length)] for _ in range(count)]


async def first_answer(port: int, started: float, process: subprocess.Popen[bytes]) -> float:
    """Seconds from the start of a process to the first token a client sees; a process that has ended is an error."""
    from cluster.client import AsyncGraphpoolClient

    while True:
        with contextlib.suppress(Exception):
            async with AsyncGraphpoolClient(f"127.0.0.1:{port}") as client:
                await ask(client, [5, 6, 7], max_tokens=1)
                return time.perf_counter() - started
        await asyncio.sleep(0.05)
        if process.poll() is not None:
            raise RuntimeError(f"the process ended with {process.returncode} before it answered")
        if time.perf_counter() - started > 300:
            raise TimeoutError("no answer within 300 s")


async def all_captured(client: Any, started: float) -> float:
    """Seconds until every graph is captured."""
    from protos import control_pb2

    while time.perf_counter() - started < CAPTURE_LIMIT_S:
        (load,) = await client.loads()
        if load.load.readiness == control_pb2.GRAPH_READINESS_FULL:
            return time.perf_counter() - started
        await asyncio.sleep(0.1)
    return float("nan")


async def measure_start(
    options: argparse.Namespace, results: Results, started: float, process: subprocess.Popen[bytes], note: str
) -> None:
    """Of one replica's process, up to its last graph."""
    from cluster.client import AsyncGraphpoolClient

    first = await first_answer(options.port, started, process)
    add(results, options, metric="start_to_first_token_s", unit="s", value=first, note=note)
    if options.device != "cuda":
        return
    async with AsyncGraphpoolClient(f"127.0.0.1:{options.port}") as client:
        full = await all_captured(client, started)
    if full == full:
        add(results, options, metric="start_to_all_graphs_s", unit="s", value=full, note=note)


async def measure(options: argparse.Namespace, results: Results, port: int, way: str) -> None:
    from cluster.client import AsyncGraphpoolClient

    vocab = SHAPES[options.model]["vocab_size"]
    async with AsyncGraphpoolClient(f"127.0.0.1:{port}") as client:
        alone = [(await ask(client, prompt)).token_ids for prompt in prompts(4, PROMPT, vocab, 0)]
        for batch in options.batches:
            await measure_batch(client, batch, vocab, alone, options, results, way)
        for length in (128, 1024) if options.device == "cuda" else (128,):
            clocks = [await ask(client, prompt, 1) for prompt in prompts(12, length, vocab, 7)]
            value = median(clock.ttft_ms for clock in clocks[2:])
            add(results, options, metric="ttft_ms", unit="ms", value=value, batch=1, context=length, note=way)


async def measure_batch(
    client: Any,
    batch: int,
    vocab: int,
    alone: list[list[int]],
    options: argparse.Namespace,
    results: Results,
    way: str,
) -> None:
    rounds = []
    for round_number in range(ROUNDS):
        started = time.perf_counter()
        clocks = await asyncio.gather(*(ask(client, prompt) for prompt in prompts(batch, PROMPT, vocab, round_number)))
        rounds.append((time.perf_counter() - started, clocks))
        if round_number == 0:
            compare(batch, clocks, alone, results)
    per_token = median(clock.token_ms for _, clocks in rounds[1:] for clock in clocks)
    wall = min(seconds for seconds, _ in rounds[1:])
    where = {"batch": batch, "context": PROMPT, "note": way}
    add(results, options, metric="decode_step_ms", unit="ms", value=per_token, **where)
    add(results, options, metric="tokens_per_s", unit="1/s", value=batch * ANSWER / wall, **where)
    first = median(clock.ttft_ms for _, clocks in rounds[1:] for clock in clocks)
    add(results, options, metric="burst_ttft_ms", unit="ms", value=first, **where)


def compare(batch: int, clocks: list[Clock], alone: list[list[int]], results: Results) -> None:
    """Share of leading tokens equal to the same prompts alone; other batch shapes may part at near-ties."""
    same = total = 0
    for clock, expected in zip(clocks, alone, strict=False):
        same += next((i for i, (a, b) in enumerate(zip(clock.token_ids, expected, strict=True)) if a != b), ANSWER)
        total += ANSWER
    results.correctness[f"equal_leading_tokens_batch_{batch}"] = same / total


def add(results: Results, options: argparse.Namespace, **values: Any) -> None:
    results.add(system="graphpool", model=options.model, scope="router", **values)
    print({name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}, flush=True)


def parse() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="llama-3.2-1b", choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--capture", default="background")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--kv-gib", type=int, default=24)
    parser.add_argument("--flush-ms", type=float, default=8.0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--starts-only", action="store_true", help="two starts; writes bench/results/replica_start.json"
    )
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--route", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.serve:  # a replica's process says for itself what it lacks
        require_gpu(parser, options.device)
    return options


async def run(options: argparse.Namespace) -> None:
    options.port = free_port()
    bench = "replica_start" if options.starts_only else "replica_grpc"
    results = Results(bench=bench, hardware=hardware(options.device))
    with tempfile.TemporaryDirectory() as folder:
        config, cache = write_config(options.model, Path(folder)), Path(folder) / "kernels"
        import_once(options, Path(folder))
        for note in ("kernels to be built", "kernels built before"):
            started = time.perf_counter()
            with replica(options, config, cache) as process:
                await measure_start(options, results, started, process, note)
                if note == "kernels built before" and not options.starts_only:
                    await measure(options, results, options.port, "direct")
                    with router(options) as (port, front):
                        await first_answer(port, time.perf_counter(), front)
                        await measure(options, results, port, "through a router")
    print(results.correctness)
    print(results.write())


def hardware(device: str) -> str:
    if device == "cpu":
        return cpu_name()
    out = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    return f"{out.stdout.splitlines()[0]}, {cpu_name()}"


def main() -> None:
    options = parse()
    asyncio.run(serve(options) if options.serve else route(options) if options.route else run(options))


if __name__ == "__main__":
    main()
