"""What a campaign asks of a real model: greedy and seeded, with penalties, logprobs, stops and several choices."""

from __future__ import annotations

import random
from typing import Any

from tests.chaos.real_answers import RealQuestion

PLACES = ("a harbour", "a mountain village", "a laboratory", "an old library", "a railway station", "a desert town")
PEOPLE = ("a baker", "an engineer", "two sisters", "a retired pilot", "a young doctor", "the last lighthouse keeper")
OPENINGS = (
    "Write a short story about {who} in {where}.",
    "{who} walked through {where} and said:",
    "Here is a list of five things that {who} would need in {where}:\n1.",
    "Question: why would {who} move to {where}?\nAnswer:",
    "def plan_trip(person={who!r}, place={where!r}):\n    ",
    "The history of {where} begins with {who}, who",
)
SHARED = "You are a careful assistant. Answer in plain words and give reasons for what you say. "
"""Before every other prompt: prefixes are found in the cache."""
MIN_TOKENS, MAX_TOKENS = 16, 96

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "greedy, logprobs": {"temperature": 0.0, "logprobs": 3},
    "seeded": {"temperature": 0.8, "top_p": 0.95},
    "seeded, four choices": {"temperature": 1.1, "n": 4, "logprobs": 2},
    "penalties": {"temperature": 0.7, "top_k": 50, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "stops": {"temperature": 0.0, "stop": (" the", "\n\n", "."), "min_tokens": 8, "n": 2},
}


def questions(count: int, *, seed: int, vocab_size: int, has_text: bool, shows_gaps: bool) -> list[RealQuestion]:
    """`shows_gaps`: every answer says how likely its tokens and the second-likeliest ones were."""
    draw = random.Random(seed)
    names = list(KINDS)
    return [
        _question(names[number % len(names)], draw, vocab_size=vocab_size, has_text=has_text, shows_gaps=shows_gaps)
        for number in range(count)
    ]


def _question(kind: str, draw: random.Random, *, vocab_size: int, has_text: bool, shows_gaps: bool) -> RealQuestion:
    sampling = KINDS[kind] | {"max_tokens": draw.randint(MIN_TOKENS, MAX_TOKENS), "seed": draw.randrange(2**31)}
    if shows_gaps:
        sampling["logprobs"] = max(sampling.get("logprobs", 0), 2)
    if not has_text and "stop" in sampling:
        del sampling["stop"]
        sampling["stop_token_ids"] = tuple(draw.randrange(vocab_size) for _ in range(300))
    prompt = _text(draw) if has_text else tuple(draw.randrange(3, vocab_size) for _ in range(draw.randint(4, 80)))
    return RealQuestion(kind=kind.split(",")[0], prompt=prompt, sampling=sampling)


def _text(draw: random.Random) -> str:
    text = draw.choice(OPENINGS).format(who=draw.choice(PEOPLE), where=draw.choice(PLACES))
    return f"{SHARED if draw.random() < 0.5 else ''}{text} {draw.randrange(100)}"
