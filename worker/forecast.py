"""When a newcomer would get its first token: a pure function over what an engine knows of itself."""

from __future__ import annotations


def predict_ttft_s(
    *,
    num_ahead: int,
    num_free_rows: int,
    max_rows: int,
    prefill_tokens: int,
    prefill_token_s: float,
    decode_step_s: float,
    answer_tokens: float,
) -> float:
    """Seconds to the first token of a short prompt that came now, behind `num_ahead` sequences that wait.

    Three parts, each from recent means: the wait for a row, the prompts that are computed before its own
    (`prefill_tokens` of them), and one decode step that may be under way. While all `max_rows` rows are held, one of
    them ends every `answer_tokens * decode_step_s / max_rows` seconds. Failure mode: answers that are much longer or
    shorter than recent ones make it as wrong as they are.
    """
    num_missing_rows = max(0, num_ahead + 1 - num_free_rows)
    row_s = num_missing_rows * answer_tokens * decode_step_s / max(max_rows, 1)
    return row_s + prefill_tokens * prefill_token_s + decode_step_s
