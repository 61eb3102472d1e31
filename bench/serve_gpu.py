"""A pool under Ray Serve on one or two GPUs: how it starts, what clients notice of a kill, of a drain and of scaling.

    python -m bench.serve_gpu                                        # one GPU, random weights of Llama-3.2-1B
    python -m bench.serve_gpu --gpus 2
    python -m bench.serve_gpu --device cpu --model embedded          # the same code, with GPUs in name only

Starts are those of one replica in the fast mode: cold (an empty cache of kernels), then warm. Everything else is in
deterministic mode, so that each answer is compared token by token with what the pool answered while nothing else ran. Every
wait has a limit, and results are saved after each part: `bench/results/serve_gpu.json`, of two GPUs `serve_two_gpus.json`.
Exit code 1 if an answer was lost or changed, or a part was not done.
"""

from __future__ import annotations

from bench.serve_pool import bench_pool  # first: it sets what gRPC reads when it is imported

import asyncio  # isort: skip
import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from bench.options import bench_parser, folder_path, parse_for_gpu
from bench.replica_grpc import hardware
from bench.results_file import RESULTS, Results
from bench.serve_memory import MemoryWatch
from bench.serve_parts import Run
from bench.serve_plan import Plan, plan_of

STOP_S = 40.0
"""What stopping may take past the limit, before the process ends itself."""
LOG_BYTES = 200_000


class Parts:
    """Runs each part within what is left of the time, and keeps what is known when one fails."""

    def __init__(self, plan: Plan, results: Results, out: Path) -> None:
        self._results = results
        self._out = out
        self._began_s = time.monotonic()
        self._give_up_s = self._began_s + plan.limit_s
        self._states: dict[str, str] = results.correctness.setdefault("parts", {})

    @property
    def all_done(self) -> bool:
        """Whether no part failed or was left out."""
        return all(state == "done" for state in self._states.values())

    async def run(self, name: str, part: Callable[[], Awaitable[None]], limit_s: float) -> bool:
        """One part; whether it was done."""
        left_s = self._give_up_s - time.monotonic()
        self._say(f"{name} ...")
        if left_s < 5:
            self._states[name] = "left out: no time"
        else:
            try:
                await asyncio.wait_for(part(), min(limit_s, left_s))
                self._states[name] = "done"
            except TimeoutError as error:
                self._states[name] = f"failed: {str(error) or f'not done within {min(limit_s, left_s):.0f} s'}"[:300]
            except Exception as error:  # noqa: BLE001  # the other parts may still tell something
                self._states[name] = f"failed: {type(error).__name__}: {error}"[:300]
        self._say(f"{name}: {self._states[name]}")
        self._results.write(self._out)
        return self._states[name] == "done"

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began_s:6.1f} s] {text}", flush=True)


async def measure(plan: Plan, results: Results, out: Path) -> bool:
    """All parts; whether everything was as it should be."""
    folder = Path(tempfile.mkdtemp(prefix="gp-", dir="/tmp"))
    watch = MemoryWatch(plan.device)
    results.extra["memory_source"] = watch.source
    parts = Parts(plan, results, out)
    try:
        async with bench_pool(num_cpus=8, num_gpus=plan.gpus, temp_dir=folder / "r") as pool:
            await _parts(parts, Run(plan, pool, watch, results))
            _keep_logs(folder / "r", out / "serve_gpu_logs", is_needed=not parts.all_done)
    finally:
        watch.stop()
        shutil.rmtree(folder, ignore_errors=True)
    results.correctness["all_right"] = parts.all_done and not results.correctness.get("wrong")
    results.write(out)
    return bool(results.correctness["all_right"])


async def _parts(parts: Parts, run: Run) -> None:
    plan = run.plan
    if not plan.skips_starts:
        await parts.run("a cold start", lambda: run.start("cold"), plan.start_limit_s)
        await parts.run("a warm start", lambda: run.start("warm"), plan.start_limit_s)
    shares = [plan.share, *([1.0] if plan.gpus > 1 else [])]
    for share in shares:
        name = f"2 replicas of {share:g} GPU"
        if not await parts.run(name, lambda share=share: run.start_two(share), plan.two_limit_s):  # type: ignore[misc]
            continue
        await parts.run(f"{name}: steady load", run.nothing, 30 * plan.slowness)
        await parts.run(f"{name}: a kill", run.kill, 70 * plan.slowness)
        await parts.run(f"{name}: a drain", run.drain, 70 * plan.slowness)
        await parts.run(f"{name}: scaling", run.scale, 100 * plan.slowness)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(run.close(), 10)


def _keep_logs(folder: Path, out: Path, *, is_needed: bool) -> None:
    """The ends of what the replicas and Serve have logged, where something failed."""
    if not is_needed:
        return
    out.mkdir(parents=True, exist_ok=True)
    logs = folder / "session_latest" / "logs"
    text = []
    for path in sorted([*logs.glob("serve/*.log"), *logs.glob("worker-*.err"), *logs.glob("raylet.err")]):
        with contextlib.suppress(OSError):
            end = path.read_bytes()[-8000:].decode(errors="replace")
            if end.strip():
                text.append(f"==== {path.name}\n{end}")
    (out / "logs.txt").write_text("\n".join(text)[-10 * LOG_BYTES :])


def _end_in_any_case(after_s: float) -> None:
    """What hangs for all its limits must not hold the machine."""

    def end() -> None:
        print(f"not stopped after {after_s:.0f} s: this process ends itself", flush=True)
        os._exit(3)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="llama-3.2-1b", help="a shape, tiny, embedded, or a directory")
    parser.add_argument("--limit-s", type=float, help="for everything; default 225 s for one GPU, 385 s for two")
    parser.add_argument("--skip-starts", action="store_true", help="leave the starts in the fast mode out")
    parser.add_argument("--out", type=folder_path, default=RESULTS)
    options = parse_for_gpu(parser, arguments)
    with tempfile.TemporaryDirectory(prefix="gp-model-") as folder:
        plan = plan_of(options, Path(folder))
        # Of this run alone, so that its first start is a cold one.
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "triton")
        # Some machines show little memory before it is used; Ray would take that for a lack of it.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        _end_in_any_case(plan.limit_s + STOP_S)
        results = Results(bench=plan.bench, hardware=f"{plan.gpus} x {hardware(plan.device)}")
        is_right = asyncio.run(measure(plan, results, options.out))
    print(results.correctness, flush=True)
    print(options.out / f"{plan.bench}.json", flush=True)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
