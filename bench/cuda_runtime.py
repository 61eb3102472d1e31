"""The few calls of CUDA's runtime that torch does not offer: executables made, updated and launched by hand."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

UPDATE_RESULTS = (
    *("success", "error", "topology changed", "node type changed", "function changed", "parameters changed"),
    *("not supported", "unsupported function change", "attributes changed"),
)
"""Of cudaGraphExecUpdateResult, in order."""


class _UpdateInfo(ctypes.Structure):
    _fields_ = [("result", ctypes.c_int), ("node", ctypes.c_void_p), ("from_node", ctypes.c_void_p)]


class CudaRuntime:
    """The runtime library that torch has loaded. Calls raise RuntimeError with CUDA's name of the error."""

    def __init__(self) -> None:
        assert torch.version.cuda is not None, "torch has no CUDA"
        major = torch.version.cuda.split(".")[0]
        torch.cuda.init()
        self._library = ctypes.CDLL(_loaded(f"libcudart.so.{major}"))
        self._library.cudaGetErrorName.restype = ctypes.c_char_p

    def num_nodes(self, graph: int) -> int:
        """Nodes of a graph's description."""
        count = ctypes.c_size_t()
        self._check(self._library.cudaGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
        return count.value

    def instantiate(self, graph: int) -> int:
        """A new executable."""
        executable = ctypes.c_void_p()
        self._check(
            self._library.cudaGraphInstantiate(ctypes.byref(executable), ctypes.c_void_p(graph), ctypes.c_ulonglong(0))
        )
        assert executable.value is not None
        return executable.value

    def update(self, executable: int, graph: int) -> str:
        """Make the executable that of another graph; what kept it from that, one of UPDATE_RESULTS."""
        info = _UpdateInfo()
        status = self._library.cudaGraphExecUpdate(
            ctypes.c_void_p(executable), ctypes.c_void_p(graph), ctypes.byref(info)
        )
        if status != 0:
            self._library.cudaGetLastError()
        return UPDATE_RESULTS[info.result] if info.result or status == 0 else self._name(status)

    def launch(self, executable: int) -> None:
        """On the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        self._check(self._library.cudaGraphLaunch(ctypes.c_void_p(executable), ctypes.c_void_p(stream)))

    def destroy(self, executable: int) -> None:
        """Give its memory back."""
        self._check(self._library.cudaGraphExecDestroy(ctypes.c_void_p(executable)))

    def _check(self, status: int) -> None:
        if status != 0:
            self._library.cudaGetLastError()
            raise RuntimeError(self._name(status))

    def _name(self, status: int) -> str:
        name: Any = self._library.cudaGetErrorName(ctypes.c_int(status))
        return bytes(name).decode()


def _loaded(name: str) -> str:
    """Path of a library that this process has mapped already, so that it is not loaded a second time."""
    with open("/proc/self/maps") as maps:  # noqa: PTH123 - a file of the kernel
        for line in maps:
            path = line.rstrip().rpartition(" ")[2]
            if path.rpartition("/")[2].startswith(name):
                return path
    return name
