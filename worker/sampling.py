"""What a client may ask of sampling: names and defaults are vLLM's, and every value is checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from worker.errors import InvalidRequest

MAX_CHOICES = 8
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_LOGIT_BIAS = 300
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises InvalidRequest naming the field that is out of range."""

    max_tokens: int | None = None
    """Tokens to generate at most; None = whatever the context leaves."""
    temperature: float = 1.0
    """0 = greedy; under GREEDY_BELOW counts as 0."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 or -1 = all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest."""
    seed: int = 0
    """Key of the random numbers: the same (seed, choice, position) draws the same number anywhere."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it unless asked for."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, beside the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids."""
    min_tokens: int = 0
    """No stop before this many tokens: end-of-sequence and stop token ids are masked until then."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token was already generated."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the answer so far."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be generated; empty = all."""
    logprobs: int | None = None
    """Log-probabilities to return: of the chosen token and this many of the likeliest; None = none."""
    n: int = 1
    """Independent answers to the same prompt."""
    include_stop_str_in_output: bool = False
    """Leave the stop string at the end of the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, 2**31 - 2)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _within("top_k", self.top_k, -1, 2**31 - 1)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("seed", self.seed, -(2**63), 2**63 - 1)
        _within("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_below=True)
        _within("n", self.n, 1, MAX_CHOICES)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        self._check_stops()
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest("logit_bias", f"has {len(self.logit_bias)} entries, the limit is {MAX_LOGIT_BIAS}")
        for bias in self.logit_bias.values():
            _within("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without random numbers."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids the model does not have."""
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("logit_bias", self.logit_bias, vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"has {len(self.stop)} strings, the limit is {MAX_STOP_STRINGS}")
        for stop in self.stop:
            size = len(stop.encode("utf-8", "surrogatepass"))
            if not 1 <= size <= MAX_STOP_BYTES:
                raise InvalidRequest("stop", f"a string of {size} bytes; each must have 1 to {MAX_STOP_BYTES}")


def check_token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequest for the first id outside [0, vocab_size)."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(name, f"{token_id} is not in the vocabulary of {vocab_size} tokens")


def _within(name: str, value: float, low: float, high: float, *, open_below: bool = False) -> None:
    """Refuse NaN, infinities and anything outside [low, high], or (low, high]."""
    if not math.isfinite(value) or value > high or value < low or (open_below and value == low):
        bracket = "(" if open_below else "["
        raise InvalidRequest(name, f"{value} is outside {bracket}{low}, {high}]")
