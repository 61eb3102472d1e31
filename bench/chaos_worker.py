"""A replica with a real engine, as a process of its own that a campaign may kill.

    python -m bench.chaos_worker --worker '{"model": "smollm2-135m"}' --replica '{"routers": ["127.0.0.1:50050"]}'

Prints its address as the first line of standard output, once it can serve.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping

from bench.options import bench_parser
from cluster.config import ReplicaConfig, from_mapping
from cluster.replica_process import ReplicaProcess as Hosted
from tests.fakes.replica_process import ReplicaProcess
from worker.config import WorkerConfig

START_LIMIT_S = 240.0


async def start_worker(
    worker: Mapping[str, object], replica: Mapping[str, object], *, gpu: str = ""
) -> asyncio.subprocess.Process:
    """Start one, on the GPU that is named; it is not waited for."""
    environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.chaos_worker"),
        *("--worker", json.dumps(dict(worker)), "--replica", json.dumps(dict(replica))),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )


async def wait_listening(process: asyncio.subprocess.Process) -> ReplicaProcess:
    """Its handle, once it serves. Raises RuntimeError if it ends before."""
    assert process.stdout is not None
    async with asyncio.timeout(START_LIMIT_S):
        address = (await process.stdout.readline()).decode().strip()
    if not address:
        raise RuntimeError(f"a worker ended with {await process.wait()} before it served")
    return ReplicaProcess(process, address)


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name, one each; empty without a driver."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return named.split(",")
    return [line.split(",")[0] for line in _ask_driver("index")]


def gpu_memory_mib() -> float:
    """In use on all GPUs; 0 without a driver."""
    return sum(float(line) for line in _ask_driver("memory.used"))


def gpu_name() -> str:
    """Empty without a driver."""
    names = _ask_driver("name")
    return f"{len(names)} x {names[0]}" if len(names) > 1 else "".join(names)


def _ask_driver(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[:-1]
    except (OSError, subprocess.SubprocessError):
        return []


async def serve(worker: WorkerConfig, replica: ReplicaConfig) -> None:
    hosted = await Hosted.open(worker, replica)
    print(hosted.server.address, flush=True)
    await hosted.server.wait_stopped()


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--worker", default="{}", help="WorkerConfig as JSON")
    parser.add_argument("--replica", default="{}", help="ReplicaConfig as JSON")
    arguments = parser.parse_args()
    worker = from_mapping(WorkerConfig, json.loads(arguments.worker))
    asyncio.run(serve(worker, from_mapping(ReplicaConfig, json.loads(arguments.replica))))


if __name__ == "__main__":
    main()
