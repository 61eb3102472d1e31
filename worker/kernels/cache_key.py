"""Keys of kernels in Triton's cache that do not depend on what was compiled before."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any


@functools.cache
def hash_compiler_ahead() -> None:
    """Begin to read the whole compiler, which is a part of every key, on a thread of its own. Once, however often called."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        return
    with contextlib.suppress(RuntimeError):  # without a thread, the first key does it
        threading.Thread(target=triton_key, name="triton-key", daemon=True).start()


def settle_key(kernel: Any) -> None:
    """Make the key of a kernel, after those of the functions that it calls.

    Triton takes the constants of a called function into the caller's key only if the called one has its key already: a
    process that compiles in another order would not find what is there.
    """
    _settle(kernel, set())


def _settle(function: Any, seen: set[int]) -> None:
    from triton.runtime.jit import JITCallable

    if not isinstance(function, JITCallable) or function.hash is not None or id(function) in seen:
        return
    seen.add(id(function))
    for name in function.fn.__code__.co_names:
        _settle(function.__globals__.get(name), seen)
    _ = function.cache_key
