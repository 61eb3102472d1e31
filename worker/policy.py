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
