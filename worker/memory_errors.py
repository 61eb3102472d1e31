"""When there is not enough memory to start: what to change instead of where an allocator was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from worker.errors import ModelLoadError

_SIGNS = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
"""In the messages of torch's RuntimeErrors, which have no type of their own on the CPU."""


@contextlib.contextmanager
def memory_named(model: str) -> Iterator[None]:
    """Turn every allocator's own error into a ModelLoadError that says what takes memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_lack_of_memory(error):
            raise
        raise ModelLoadError(
            f"{model} does not fit the memory: lower max_batch, max_model_len, prefill_chunk or kv_cache_bytes, "
            "or serve a smaller model"
        ) from error


def _is_lack_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(sign in str(error) for sign in _SIGNS)
