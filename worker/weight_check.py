"""Finds weights that have changed in memory: looks at all of them again and again, a little at a time, between steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from worker.constants import Constant, constants_of
from worker.errors import WeightsCorrupted
from worker.fingerprint import Fingerprint, Fingerprints, piece_words
from worker.load import WeightCheckSnapshot

log = logging.getLogger(__name__)

SLICE_S = 0.005
"""What is done at once when nothing waits: a request that comes meanwhile is held up by no more."""
MAX_PIECES = 64
"""Of one slice."""
IDLE_SHARE = 0.2
"""Of the time goes to a pass while there is no work,"""
BUSY_SHARE = 0.001
"""and while there is: then a slice is one piece."""
POLL_S = 0.001
"""To look again for a slice that is under way on a GPU, while there is nothing else to do."""
LEAST_WORDS = 1 << 14
"""A smaller piece takes as long as one of so many."""


class WeightCheck:
    """The first pass notes the fingerprint of each piece of memory, later passes compare it with what they find.

    A pass begins `interval_s` after the one before it began, or when that has ended. Used by the engine's thread
    alone, between steps: slices are launched on the steps' stream, behind the step under way, and their results are
    read when they are there; nothing waits for them.
    """

    def __init__(
        self, constants: Sequence[Constant], *, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ValueError if there is nothing to check."""
        if not constants:
            raise ValueError("there is nothing to check")
        self._interval_s = interval_s
        self._clock = clock
        device = constants[0].words.device
        self._prints = Fingerprints(device, max_pieces=MAX_PIECES)
        self._pieces = [(one, words) for one in constants for words in one.pieces(piece_words(device))]
        self._watched_bytes = sum(constant.nbytes for constant in constants)
        self._known: list[Fingerprint] = []
        """Of each piece; as many as there are once the first pass is over."""
        self._next = self._first = 0
        self._pass_began_s: float | None = None
        self._pass_due_s = self._sound_s = clock()
        self._slice_s, self._slice_ended_s = 0.0, self._pass_due_s
        self._word_s: float | None = None
        self._num_passes = self._num_bytes = 0

    def advance(self, *, has_work: bool) -> None:
        """Do what is due, if anything. Raises WeightsCorrupted, and is of no use after that."""
        if self._pass_began_s is None and self._clock() < self._pass_due_s:
            return
        if self._prints.is_under_way and not self._take():
            return
        if self.due_in_s(has_work=has_work) > 0:
            return
        if self._pass_began_s is None:
            self._pass_began_s = self._clock()
        self._launch(1 if has_work else MAX_PIECES)
        self._take()

    def due_in_s(self, *, has_work: bool) -> float:
        """When to call `advance`, from now on; 0 = there is something to do."""
        now_s = self._clock()
        if self._prints.is_under_way:
            return POLL_S
        if not self._pieces:
            return math.inf
        share = BUSY_SHARE if has_work else IDLE_SHARE
        slice_due_s = self._slice_ended_s + self._slice_s * (1 / share - 1)
        begins_s = self._pass_due_s if self._pass_began_s is None else now_s
        return max(0.0, begins_s - now_s, slice_due_s - now_s)

    def snapshot(self) -> WeightCheckSnapshot:
        """What was checked so far."""
        return WeightCheckSnapshot(
            passes=self._num_passes,
            checked_bytes=self._num_bytes,
            watched_bytes=self._watched_bytes,
            age_s=self._clock() - self._sound_s,
        )

    def _launch(self, max_pieces: int) -> None:
        """As many of the next pieces as fit in a slice; the first that is ever launched tells how long they take."""
        words_left = SLICE_S / self._word_s if self._word_s else 0.0
        pieces: list[torch.Tensor] = []
        for _, words in self._pieces[self._next : self._next + max_pieces]:
            words_left -= max(len(words), LEAST_WORDS)
            if pieces and words_left < 0:
                break
            pieces.append(words)
        self._prints.launch(pieces)
        self._first, self._next = self._next, self._next + len(pieces)

    def _take(self) -> bool:
        """Compare what the slice under way has found, if it is there."""
        taken = self._prints.take()
        if taken is None:
            return False
        found, took_s = taken
        self._slice_s, self._slice_ended_s = took_s, self._clock()
        covered = self._pieces[self._first : self._next]
        word_s = took_s / sum(max(len(words), LEAST_WORDS) for _, words in covered)
        self._word_s = word_s if self._word_s is None else (self._word_s + word_s) / 2
        is_first_pass = len(self._known) < len(self._pieces)
        if is_first_pass:
            self._known += found
        else:
            self._compare(found)
        if self._next == len(self._pieces):
            self._end_pass(is_first=is_first_pass)
        return True

    def _compare(self, found: Sequence[Fingerprint]) -> None:
        for place, fingerprint in enumerate(found, self._first):
            constant, words = self._pieces[place]
            self._num_bytes += words.nbytes
            if fingerprint != self._known[place] and not constant.is_changed_on_purpose:
                raise WeightsCorrupted(constant.name)

    def _end_pass(self, *, is_first: bool) -> None:
        assert self._pass_began_s is not None, "a pass ends that has begun"
        self._sound_s = self._clock()
        self._pass_due_s = self._pass_began_s + self._interval_s
        self._pass_began_s, self._next = None, 0
        self._num_passes += not is_first
        if changed := {one.name: one for one, _ in self._pieces if one.is_changed_on_purpose}:
            self._let_go(changed)

    def _let_go(self, changed: dict[str, Constant]) -> None:
        log.warning("no longer watched for changes, since torch writes them: %s", ", ".join(changed))
        kept = [place for place, (constant, _) in enumerate(self._pieces) if constant.name not in changed]
        self._pieces = [self._pieces[place] for place in kept]
        self._known = [self._known[place] for place in kept]
        self._watched_bytes -= sum(constant.nbytes for constant in changed.values())


def weight_check_of(module: nn.Module, *, interval_s: float) -> WeightCheck | None:
    """The check of a loaded model, before its first step; None for an interval of 0."""
    return WeightCheck(constants_of(module), interval_s=interval_s) if interval_s else None
