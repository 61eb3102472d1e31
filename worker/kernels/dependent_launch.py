"""Programmatic dependent launch: a kernel starts early and waits inside.

Triton's own wrappers do not tell the compiler that memory changes at the wait; loads could move above it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous() -> None:
    """Returns when all earlier kernels have finished and their writes are visible. Nothing mutable is read before."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def trigger_next() -> None:
    """The next kernel may start from here on; it still waits for all of this one before it touches what changes."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
    )
