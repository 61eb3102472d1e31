"""What is to go wrong in a worker on purpose. Exists only in a process that was told to allow it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

POLL_S = 0.005

Kind = Literal["nan", "kill", "crash"]

FlipBit = Callable[[str, int], None]
"""Flips one bit, counted from the first byte, of the model's tensor of that name."""


class InjectedCrash(RuntimeError):
    """A step failed because it was told to: what a driver's error would be."""


@dataclass(slots=True)
class PromptFault:
    """Something that happens to requests whose prompt begins with `prompt`."""

    kind: Kind
    prompt: tuple[int, ...]
    after_tokens: int = 0
    """Tokens the request has when it happens."""
    times_left: int | None = None
    """None = every time."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt is empty: every request would match")
        if self.times_left is not None and self.times_left < 1:
            raise ValueError(f"times_left {self.times_left} is under 1")

    def meets(self, prompt: Sequence[int], num_tokens: int) -> bool:
        """Whether a step may not pass for this request; counts as one of its times."""
        is_met = num_tokens >= self.after_tokens and tuple(prompt[: len(self.prompt)]) == self.prompt
        if not is_met or self.times_left == 0:
            return False
        if self.times_left is not None:
            self.times_left -= 1
        return True


class Faults:
    """Armed from any thread; the engine's thread asks around each step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompts: list[PromptFault] = []
        self._hang_until_s = self._stall_until_s = 0.0
        self._factor = 1.0
        self._extra_s = 0.0
        self.on_flip: FlipBit | None = None
        """Whoever has weights; None = nobody."""

    def flip_weight(self, tensor: str, bit: int) -> None:
        """A bit of a weight changes, for good. Raises ValueError for one that does not exist."""
        if self.on_flip is None:
            raise ValueError("there are no weights")
        self.on_flip(tensor, bit)

    def hang(self, duration_s: float) -> None:
        """The engine's thread stands still before its next step."""
        self._hang_until_s = time.monotonic() + duration_s

    def stall_mailbox(self, duration_s: float) -> None:
        """Steps run, but their tokens cannot be read."""
        self._stall_until_s = time.monotonic() + duration_s

    def slow(self, factor: float, extra_s: float = 0.0) -> None:
        """Steps take `factor` times as long and `extra_s` more. Raises ValueError for less than they take."""
        if not (1.0 <= factor < 1e6 and 0.0 <= extra_s < 1e6):
            raise ValueError(f"factor {factor} and extra_s {extra_s} must be at least 1 and 0")
        self._factor, self._extra_s = factor, extra_s

    def on_prompt(self, fault: PromptFault) -> None:
        """See PromptFault."""
        with self._lock:
            self._prompts.append(fault)

    def clear(self) -> None:
        """Nothing more goes wrong; what stands still goes on."""
        with self._lock:
            self._prompts.clear()
        self._hang_until_s = self._stall_until_s = self._extra_s = 0.0
        self._factor = 1.0

    def before_step(self, rows: Iterable[tuple[Sequence[int], int]]) -> None:
        """`rows` are the prompt and the number of tokens of each request in the step. May not return."""
        _wait(lambda: self._hang_until_s)
        for prompt, num_tokens in rows:
            if self.meets("kill", prompt, num_tokens):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.meets("crash", prompt, num_tokens):
                raise InjectedCrash("a step failed as it was told to")

    def before_read(self) -> None:
        """The tokens of a step are about to be read."""
        _wait(lambda: self._stall_until_s)

    def after_step(self, took_s: float) -> None:
        """A step took so long."""
        extra_s = (self._factor - 1.0) * took_s + self._extra_s
        if extra_s > 0:
            time.sleep(extra_s)

    def meets(self, kind: Kind, prompt: Sequence[int], num_tokens: int) -> bool:
        """Whether such a fault is due for a request."""
        with self._lock:
            return any(fault.kind == kind and fault.meets(prompt, num_tokens) for fault in self._prompts)


def _wait(until_s: Callable[[], float]) -> None:
    while time.monotonic() < until_s():
        time.sleep(POLL_S)
