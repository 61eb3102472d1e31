"""What Triton's cache holds of one kernel: whole, unless a machine failed or a sweeper came by while it was kept."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.kernels.build_job import BuildJob

log = logging.getLogger(__name__)

DAMAGED = (AttributeError, KeyError, ValueError, FileNotFoundError)
"""What reading an entry raises that is empty, cut short, or lacks a file."""
ELF = b"\x7fELF"
ELF_HEADER_BYTES = 64


def whole_kernel(compile_kernel: Callable[[], Any], job: BuildJob) -> Any:
    """What `compile_kernel` gives, which does `job`; compiled once more if what the cache has of it is damaged.

    Triton would find the same damage at every start. Raises what compiling raises.
    """
    try:
        kernel = compile_kernel()
    except DAMAGED as error:
        if not _forget(job):
            raise
        reason = f"{type(error).__name__}: {error}"
    else:
        if is_whole(kernel.kernel) or not _forget(job):
            return kernel
        reason = "its code is cut short"
    log.warning("a kernel is compiled again, Triton's cache holds it damaged: %.200s", reason)
    return compile_kernel()


def is_whole(code: bytes) -> bool:
    """Whether nothing is missing behind the header of machine code; what is in another format is taken for whole."""
    if not code or not any(code[:ELF_HEADER_BYTES]):
        return False
    if not code.startswith(ELF):
        return not ELF.startswith(code)
    if len(code) < ELF_HEADER_BYTES:
        return False
    return len(code) >= max(_table_end(code, 32, 54), _table_end(code, 40, 58))  # of segments, and of sections


def _table_end(code: bytes, offset_at: int, sizes_at: int) -> int:
    """Where a table ends that the header of an ELF file describes by its offset, the size of an entry and their number."""
    offset, size, num = (
        int.from_bytes(code[at : at + width], "little")
        for at, width in ((offset_at, 8), (sizes_at, 2), (sizes_at + 2, 2))
    )
    return offset + size * num


def _forget(job: BuildJob) -> bool:
    """Take the list of files out of the entry, so that all of them are written anew; whether there was one."""
    try:
        lists = list(_entry(job).glob("__grp__*"))
        for path in lists:
            path.unlink(missing_ok=True)
    except Exception as error:  # noqa: BLE001  # what was wrong at first says more
        log.debug("a damaged kernel stays in the cache: %s: %s", type(error).__name__, error)
        return False
    return bool(lists)


def _entry(job: BuildJob) -> Path:
    """The folder, found as Triton finds it."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend = make_backend(job.target)
    options = backend.parse_options(job.options | job.source.parse_options())
    key = get_cache_key(job.source, backend, options, env_vars=job.env_vars)
    return Path(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).cache_dir)
