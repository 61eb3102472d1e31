"""Makes a GPU's context while the interpreter is still importing: neither needs the other, and each takes a second."""

from __future__ import annotations

import ctypes
import threading

DRIVER = "libcuda.so.1"


def has_driver() -> bool:
    """Whether there is a driver of GPUs here; it may be without one."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def make_context_ahead() -> threading.Thread:
    """Retain the first visible device's primary context, on a thread of its own. It is the one that torch uses then.

    Whatever fails is left for torch to find out, which says it better.
    """
    thread = threading.Thread(target=_retain, name="cuda-context", daemon=True)
    thread.start()
    return thread


def _retain() -> int:
    """What the driver answered; nonzero = no context."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return -1
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return int(
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    )
