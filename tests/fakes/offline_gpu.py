"""A CUDA device that compiles and does not run: every launch compiles its kernel for Hopper and stops there."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from worker.kernels import device


class _Driver:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling_only() -> Iterator[dict[str, Any]]:
    """Kernels launched inside on CPU tensors are compiled as for a GPU; yields them by name."""
    assert not triton.knobs.runtime.interpret
    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **(kwargs | {"warmup": True}))
        compiled[self.__name__] = kernel
        return kernel

    driver.set_active(_Driver())
    JITFunction.run = functools.wraps(run)(compile_only)
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = None
