"""Fingerprints of memory: two exact sums, computed where the memory is, that no one or two flipped bits leave as they were.

The first is the sum of a piece's words, the second that of each word times its place, both modulo 2**64: no order of
additions changes them, so the same bytes give the same numbers whenever they are asked for. A word that changes alone
changes the first; two that make up for each other there, such as two that change places, change the second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

Fingerprint = tuple[int, int]

_PIECE_WORDS = {"cuda": 1 << 20, "cpu": 1 << 17}
"""On a GPU a launch takes as long as reading some megabytes; on a CPU a piece and its sums should stay in the cache."""


def piece_words(device: torch.device) -> int:
    """Words of one piece at most."""
    return _PIECE_WORDS.get(device.type, _PIECE_WORDS["cpu"])


class Fingerprints:
    """Computes those of some pieces at a time, on the current stream, in memory of its own that never moves."""

    def __init__(self, device: torch.device, *, max_pieces: int) -> None:
        self.max_pieces = max_pieces
        is_cuda = device.type == "cuda"
        self._wide = torch.empty(piece_words(device), dtype=torch.int64, device=device)
        self._places = torch.arange(1, piece_words(device) + 1, device=device)
        self._sums = torch.zeros((max_pieces, 2), dtype=torch.int64, device=device)
        self._host = torch.zeros((max_pieces, 2), dtype=torch.int64, pin_memory=is_cuda)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else None
        self._count = 0
        self._host_s = 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether something was launched that has not been `take`n."""
        return self._count > 0

    @torch.inference_mode()
    def launch(self, pieces: Sequence[torch.Tensor]) -> None:
        """Begin with `pieces`, each one-dimensional and of integers; nothing else may be under way. Waits for nothing."""
        assert not self._count, "take what is under way first"
        started_s = time.perf_counter()
        if self._events is not None:
            self._events[0].record()
        for number, words in enumerate(pieces):
            wide, places = self._wide[: len(words)], self._places[: len(words)]
            wide.copy_(words)
            torch.sum(wide, dim=0, out=self._sums[number, 0])
            torch.sum(wide.mul_(places), dim=0, out=self._sums[number, 1])
        self._host[: len(pieces)].copy_(self._sums[: len(pieces)], non_blocking=True)
        if self._events is not None:
            self._events[1].record()
        self._count = len(pieces)
        self._host_s = time.perf_counter() - started_s

    def take(self) -> tuple[list[Fingerprint], float] | None:
        """The fingerprints and the seconds they took, of the host or of the device; None while they are not known."""
        if not self._count or (self._events is not None and not self._events[1].query()):
            return None
        device_s = 0.0 if self._events is None else self._events[0].elapsed_time(self._events[1]) / 1e3
        count, self._count = self._count, 0
        return [(first, second) for first, second in self._host[:count].tolist()], max(self._host_s, device_s)
