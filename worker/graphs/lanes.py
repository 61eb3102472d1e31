"""How inputs reach the static buffers: on the replay's own stream, or on a copy stream joined to it by events."""

from __future__ import annotations

from typing import Literal

import torch

CopyMode = Literal["same_stream", "copy_stream"]


class InputLane:
    """Copies host or device tensors into static buffers. After `copy`, the current stream sees the new values.

    The copy comes after everything that is on the current stream: the last replay, which still reads the buffers, and
    the work that makes the sources. The host never waits.
    """

    def __init__(self, device: torch.device, mode: CopyMode = "same_stream") -> None:
        if mode not in ("same_stream", "copy_stream"):
            raise ValueError(f"copy mode must be same_stream or copy_stream, got {mode!r}")
        self._stream = torch.cuda.Stream(device) if mode == "copy_stream" and device.type == "cuda" else None
        self._device = device

    def copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each (static, source)."""
        if self._stream is None:
            copy_each(pairs)
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            copy_each(pairs)
        current.wait_stream(self._stream)


def copy_each(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each (static, source) on the current stream, unless the source is the static buffer itself."""
    for static, source in pairs:
        if source.data_ptr() != static.data_ptr() or source.stride() != static.stride():
            static.copy_(source, non_blocking=True)
