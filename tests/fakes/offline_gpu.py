"""A CUDA device that compiles and does not run: every launch compiles its kernel for Hopper and stops there."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from worker.kernels import device

HOPPER = GPUTarget("cuda", 90, 32)


class _Driver:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for_hopper() -> Iterator[list[Any]]:
    """Kernels launched inside, on CPU tensors, are compiled as a Hopper GPU would get them; yields what was compiled.

    Needs a process without Triton's interpreter, in which no kernel's module has been imported yet.
    """
    assert not triton.knobs.runtime.interpret
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, **(kwargs | {"warmup": True})))
        return compiled[-1]

    driver.set_active(_Driver())
    JITFunction.run = functools.wraps(run)(compile_only)
    device.launches_programmatically = lambda _: True  # type: ignore[assignment]
    device.num_sms = lambda _: 132  # type: ignore[assignment]
    yield compiled
    JITFunction.run = run


def resources(kernel: Any) -> dict[str, Any]:
    """What matters of a compiled kernel: its name, size of shared memory in bytes, and instructions of note."""
    ptx = kernel.asm["ptx"]
    return {
        "name": kernel.metadata.name,
        "shared_bytes": kernel.metadata.shared,
        "waits": "griddepcontrol.wait" in ptx,
        "launch_pdl": kernel.metadata.launch_pdl,
        "uses_tensor_cores": "mma.sync" in ptx or "wgmma.mma_async" in ptx,
        "copies_asynchronously": "cp.async" in ptx,
    }


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def machine_code(kernel: Any) -> dict[str, Any]:
    """What the assembler made of it: registers a thread, bytes spilled, and the large loads on either side of its wait."""
    return _machine_code(kernel.asm["cubin"])


@functools.cache
def _machine_code(cubin: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        used = _tool("cuobjdump", "-res-usage", file.name)
        # Where jumps lead is not asked for, and takes half of the time.
        lines = _tool("nvdisasm", "-c", "-ndf", file.name).splitlines()
    waits = [number for number, line in enumerate(lines) if "ACQBULK" in line]
    loads = [number for number, line in enumerate(lines) if re.search(r"LDG\.E\.\S*128", line)]
    streamed = [number for number in loads if ".EF" in lines[number]]
    return {
        "registers": int(re.search(r"REG:(\d+)", used)[1]),  # type: ignore[index]
        "stack_bytes": int(re.search(r"STACK:(\d+)", used)[1]),  # type: ignore[index]
        "num_waits": len(waits),
        "streamed_before_wait": sum(number < waits[0] for number in streamed),
        "streamed_after_wait": sum(number > waits[0] for number in streamed),
        "loads_after_wait": sum(number > waits[0] for number in loads),
        "barriers": sum("BAR.SYNC" in line for line in lines),
        "shuffles": sum("SHFL" in line for line in lines),
        "instructions": sum("/*" in line and ";" in line for line in lines),
    }


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
