"""The embedded model, interrupted after every token: what is resumed must be what had been, to the last bit.

python -m tests.chaos.real_resume --tokens 64
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from worker.build import create_engine
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.load_causal_lm import load_causal_lm
from worker.model.source import resolve_model
from worker.request import ChoiceDelta, FinishReason, GenerateRequest, Logprob, RequestFailed
from worker.sampling import SamplingParams
from worker.text.processor import TextProcessor

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
)

CASES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "greedy, four choices, logprobs": SamplingParams(temperature=0.0, n=4, logprobs=2, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, seed=7, top_p=0.95),
    "seeded, four choices, logprobs": SamplingParams(temperature=1.2, seed=11, n=4, logprobs=3),
    "penalties": SamplingParams(
        temperature=0.8, seed=3, top_k=50, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
    ),
    "bias and least tokens": SamplingParams(temperature=0.7, seed=5, min_p=0.02, min_tokens=20, logit_bias={28: -5.0}),
    "stops": SamplingParams(temperature=0.0, stop=(" the", "\n\n"), min_tokens=2, n=2),
    "stops in the text": SamplingParams(temperature=1.0, seed=2, stop=(".", "and a"), include_stop_str_in_output=True),
}


@dataclass(slots=True)
class Answer:
    """One choice, as its client has it after the last token."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """What came with each token."""
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None

    def take(self, delta: ChoiceDelta) -> None:
        assert self.finish_reason is None, "it goes on after its end"
        self.tokens += delta.token_ids
        self.texts += ["" for _ in delta.token_ids]
        if delta.token_ids:
            self.texts[-1] = delta.text
        else:
            self.texts.append(delta.text)
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stopped_by = delta.stop_string or delta.stop_token_id


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of interrupting one request after every token."""

    resumed: int = 0
    exact: int = 0
    differences: list[str] = field(default_factory=list)


class RealResume:
    """Engines over one copy of the weights."""

    def __init__(self, *, max_batch: int = 16) -> None:
        torch.set_num_threads(1)
        self._config = WorkerConfig(
            device="cpu", dtype="float32", deterministic=True, max_model_len=512, max_batch=max_batch
        )
        self._files = resolve_model(self._config.model)
        self._served = load_causal_lm(self._config, self._files, device=torch.device("cpu"), dtype=torch.float32)
        self.text = TextProcessor.from_files(self._files)

    def engine(self) -> Engine:
        """A fresh one, as of another process."""
        return create_engine(self._config, self._files, self._served, self.text)

    def request(self, name: str, prompt: str, sampling: SamplingParams) -> GenerateRequest:
        ids = tuple(self.text.encode(prompt, add_special_tokens=False))
        return GenerateRequest(request_id=name, prompt_token_ids=ids, sampling=sampling)

    def case(self, name: str, *, max_tokens: int) -> GenerateRequest:
        """One of CASES."""
        number = list(CASES).index(name)
        return self.request(name, PROMPTS[number % len(PROMPTS)], replace(CASES[name], max_tokens=max_tokens))

    def interrupt(self, request: GenerateRequest, indexes: Sequence[int]) -> Outcome:
        """Compare the uninterrupted answer with those that went on elsewhere after so many tokens of each choice."""
        whole = run(self.engine(), [request])[request.request_id]
        longest = max(len(answer.tokens) for answer in whole)
        resumed = [_after(request, whole, index) for index in indexes if index < longest]
        answers = run(self.engine(), resumed)
        outcome = Outcome(resumed=len(resumed))
        for one in resumed:
            difference = _difference(whole, answers[one.request_id], one)
            outcome.exact += not difference
            outcome.differences += [difference] if difference else []
        return outcome


def run(engine: Engine, requests: Sequence[GenerateRequest]) -> dict[str, list[Answer]]:
    """The answers of all choices, by request."""
    answers = {one.request_id: [Answer() for _ in range(one.sampling.n)] for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, RequestFailed), event
            if isinstance(event, ChoiceDelta):
                answers[event.request_id][event.index].take(event)
    return answers


def _after(request: GenerateRequest, whole: Sequence[Answer], index: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{request.request_id}-after-{index}",
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        delivered=tuple(tuple(answer.tokens[:index]) for answer in whole),
        finished=frozenset(number for number, answer in enumerate(whole) if len(answer.tokens) <= index),
    )


def _difference(whole: Sequence[Answer], resumed: Sequence[Answer], request: GenerateRequest) -> str:
    """Empty if there is none."""
    for number, (expected, got) in enumerate(zip(whole, resumed, strict=True)):
        if number in request.finished:
            if got.tokens:
                return f"{request.request_id}: choice {number} had ended"
            continue
        start = len(request.delivered_of(number))
        rest = Answer(
            expected.tokens[start:],
            ["".join(expected.texts[start:])],
            expected.logprobs[start:],
            expected.finish_reason,
            expected.stopped_by,
        )
        got.texts = ["".join(got.texts)]
        for name in ("tokens", "texts", "logprobs", "finish_reason", "stopped_by"):
            if getattr(rest, name) != getattr(got, name):
                return f"{request.request_id}: {name} of choice {number}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    tokens = parser.parse_args().tokens
    real, all_exact = RealResume(), True
    for name in CASES:
        started_s = time.perf_counter()
        outcome = real.interrupt(real.case(name, max_tokens=tokens), range(1, tokens))
        all_exact &= outcome.exact == outcome.resumed
        took_s = time.perf_counter() - started_s
        print(
            f"{name}: {outcome.exact} of {outcome.resumed} exact, {took_s:.0f} s {outcome.differences[:3]}", flush=True
        )
    return int(not all_exact)


if __name__ == "__main__":
    sys.exit(main())
