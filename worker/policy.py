"""Scheduling decisions as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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


CROWD = 8
"""Prompts that wait together from which on chunks widen."""
MAX_WIDENING = 4


def prefill_budget(
    *, num_decode: int, num_prompts: int, num_waiting_tokens: int, chunk: int, chunk_when_busy: int
) -> int:
    """Prompt tokens that the next prefill step may compute, `num_waiting_tokens` of `num_prompts` prompts being there.

    `chunk` while no row waits to decode. Else, with `choose_phase`, a running stream waits for one such step between
    two of its tokens: `chunk_when_busy` bounds that wait while few prompts are there. Every step also has a cost that
    does not depend on its tokens, its share of the weights' reading and the decode step behind it, so that a crowd is
    computed sooner in wider chunks, and those that decode lose less in all, though more at a time. Twice as wide from
    CROWD prompts on, MAX_WIDENING times from twice as many on, never over `chunk`. Counted are prompts, not tokens: one long
    prompt waits alone, a crowd is many people without a first token. Failure mode: a tenant who sends crowds without
    end holds everybody's tokens up by the widest chunk; equal `chunk` and `chunk_when_busy` forbid that.
    """
    if num_decode == 0:
        return min(num_waiting_tokens, chunk)
    widening = min(1 << (num_prompts // CROWD).bit_length(), MAX_WIDENING)
    return min(num_waiting_tokens, chunk, widening * chunk_when_busy)


def cut_chunk(*, start: int, remaining: int, budget: int, block_size: int, is_first: bool) -> int:
    """Tokens of a prompt to compute from position `start`, of `remaining` ones, with room for `budget`.

    The rest of the prompt if it fits, else up to a multiple of `block_size`, so that later chunks start on whole
    blocks. 0 when not even one block fits, except for the first of a step: a step always gets somewhere.
    """
    if remaining <= budget:
        return remaining
    aligned = (start + budget) // block_size * block_size - start
    return budget if is_first and aligned <= 0 else max(aligned, 0)


def may_admit(*, num_free: int, num_new: int, num_revived: int, num_running: int) -> bool:
    """Whether a sequence may start that needs `num_new` blocks of its own and `num_revived` cached ones of nobody.

    Both come out of `num_free`, which counts cached blocks. One spare block for each running sequence keeps a newcomer
    from being preempted at once. Failure mode: sequences that outgrow their spare block still preempt each other.
    """
    return num_new + num_revived + num_running <= num_free


TierGroups = tuple[tuple[int, ...], ...]
"""Tiers that decode together; each group ascends, and so do the groups."""


def group_tiers(rows: Mapping[int, int], step_cost: Callable[[int, int], float], *, margin: float = 0.05) -> TierGroups:
    """Whether rows of different tiers decode in one batch or in two that take turns. `rows` counts them by tier.

    Cost model: `step_cost(tier, num_rows)` is the time of one decode step, measured or modelled, in any unit. A round
    gives every row one token. Together it is one step of all rows in the longest tier. Split at a tier it is two steps
    after one another: the rows up to that tier in it, and the others in the longest one. A step reads all weights
    whatever its rows, so a split pays only where the width of the longest tier costs the short rows more than a second
    pass over the weights. They stay together unless the cheapest split saves more than `margin` of the round, which is
    also what it costs to upload the rows of another batch in each step. Failure mode: the cost of the one long row is
    paid by all short ones as long as a split is not cheaper for everybody.
    """
    tiers = tuple(sorted(tier for tier, count in rows.items() if count))
    if len(tiers) < 2:
        return (tiers,) if tiers else ()
    total = sum(rows[tier] for tier in tiers)
    together_cost = step_cost(tiers[-1], total)

    def split_cost(place: int) -> float:
        num_short = sum(rows[tier] for tier in tiers[:place])
        return step_cost(tiers[place - 1], num_short) + step_cost(tiers[-1], total - num_short)

    place = min(range(1, len(tiers)), key=split_cost)
    if split_cost(place) < (1 - margin) * together_cost:
        return tiers[:place], tiers[place:]
    return (tiers,)


CAPTURE_SHARE = 0.2
"""Of the time goes to capturing while requests run."""


def may_prepare(*, has_work: bool, since_last_s: float, last_took_s: float) -> bool:
    """Whether to do a piece of preparation now: always when idle, else at most CAPTURE_SHARE of the time.

    Failure mode: a single long piece delays the running rows by its whole length.
    """
    return not has_work or since_last_s * CAPTURE_SHARE >= last_took_s * (1 - CAPTURE_SHARE)
