"""Compiles one kernel for Hopper, damages what Triton's cache holds of it in every way, and prints what comes of it.

Run in a process of its own: `python -m tests.fakes.compile_damaged`; with `together`, two servers build it at once, and a
process of one is killed on the way.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fakes.build_jobs import children, wait_until
from worker.kernels.build_job import BuildJob
from worker.kernels.build_processes import BuildProcesses
from worker.kernels.cache_entry import is_whole, whole_kernel
from worker.kernels.cache_key import settle_key


def a_kernel() -> Callable[[], Any]:
    """As Triton hands one over."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from worker.kernels.silu_mul import _silu_mul

    sizes: dict[str, Any] = {"SIZE": 1024, "BLOCK": 1024, "PDL": True}
    signature = {"gate_up": "*bf16", "out": "*bf16"} | dict.fromkeys(sizes, "constexpr")
    src: Any = ASTSource(_silu_mul, signature, sizes)
    target, options, env_vars = GPUTarget("cuda", 90, 32), SimpleNamespace(num_warps=4), dict[str, str]()
    settle_key(_silu_mul)

    def compile_kernel() -> Any:
        return triton.compile(src, target=target, options=vars(options), _env_vars=env_vars)

    return compile_kernel


def files_of(kernel: Any) -> dict[str, Path]:
    """Of its entry, by what they hold."""
    paths = {path.suffix[1:]: path for path in map(Path, kernel.metadata_group.values())}
    return paths | {"list": next(paths["cubin"].parent.glob("__grp__*"))}


DAMAGES: dict[str, Callable[[dict[str, Path]], object]] = {
    "an empty list": lambda files: files["list"].write_bytes(b""),
    "a list cut short": lambda files: files["list"].write_bytes(files["list"].read_bytes()[:40]),
    "no metadata but in the list": lambda files: files["json"].write_bytes(b""),
    "metadata of zeros": lambda files: files["json"].write_bytes(bytes(500)),
    "other metadata": lambda files: files["json"].write_text("{}"),
    "no code": lambda files: files["cubin"].unlink(),
    "empty code": lambda files: files["cubin"].write_bytes(b""),
    "code of zeros": lambda files: files["cubin"].write_bytes(bytes(files["cubin"].stat().st_size)),
    "code cut short": lambda files: files["cubin"].write_bytes(files["cubin"].read_bytes()[:2000]),
    "nothing": lambda files: None,
}


def damage() -> dict[str, int]:
    """How often it is compiled after each damage, until it is whole."""
    import triton

    compile_kernel = a_kernel()
    whole = whole_kernel(compile_kernel, BuildJob.of(compile_kernel))
    times: list[str] = []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else times.append(src.name)
    found = {}
    for name, harm in DAMAGES.items():
        harm(files_of(whole))
        again = whole_kernel(compile_kernel, BuildJob.of(compile_kernel))
        assert is_whole(again.kernel)
        assert len(again.kernel) == len(whole.kernel)
        found[name] = len(times)
        times.clear()
    return found


def together() -> dict[str, Any]:
    """Two servers over one cache: one loses the process that compiles."""
    servers = [BuildProcesses(1) for _ in range(2)]
    compile_kernel = a_kernel()
    with ThreadPoolExecutor(2) as threads:
        built = [threads.submit(server.build, compile_kernel) for server in servers]
        wait_until(lambda: bool(children(servers[0]._process.pid)), 60)
        os.kill(children(servers[0]._process.pid)[0], signal.SIGKILL)
        first = [result.result() for result in built]
    return {"built": [*first, servers[0].build(compile_kernel)], "is_whole": is_whole(compile_kernel().kernel)}


if __name__ == "__main__":
    print(json.dumps(together() if "together" in sys.argv else damage()))
