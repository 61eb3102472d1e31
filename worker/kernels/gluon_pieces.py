"""What kernels in Gluon share with those in Triton, once more: a kernel calls functions of its own language alone."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_previous() -> None:
    """See dependent_launch.wait_for_previous."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def trigger_next() -> None:
    """See dependent_launch.trigger_next."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ordered_key(value: gl.tensor, index: gl.tensor) -> gl.tensor:
    """See greedy.ordered_key."""
    bits = (value + 0.0).to(gl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = gl.where(value == value, ordered, 0x7FFFFFFF)
    return (ordered.to(gl.int64) << 32) | (0x7FFFFFFF - index).to(gl.int64)
