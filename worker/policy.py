"""Scheduling decisions as pure functions."""

from __future__ import annotations

from worker.batch import Phase


def choose_phase(*, num_prefill: int, num_decode: int, last: Phase) -> Phase:
    """Prefill before decode, but never two prefill steps in a row while rows wait to decode.

    New requests get their first token soon, and a running stream is held up by at most one chunk between two of its
    tokens. Failure mode: under a flood of long prompts decode gets half of the steps, however short they are.
    """
    if num_prefill == 0:
        return "decode"
    if num_decode > 0 and last == "prefill":
        return "decode"
    return "prefill"


CAPTURE_SHARE = 0.2
"""Of the time goes to capturing while requests run."""


def may_prepare(*, has_work: bool, since_last_s: float, last_took_s: float) -> bool:
    """Whether to do a piece of preparation now: always when idle, else at most CAPTURE_SHARE of the time.

    Failure mode: a single long piece delays the running rows by its whole length.
    """
    return not has_work or since_last_s * CAPTURE_SHARE >= last_took_s * (1 - CAPTURE_SHARE)
