"""Remembers the logits of every token that engines compute, and objects to two that differ in a bit."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from worker.batch import Batch, Segment
from worker.engine import Engine
from worker.pending import Letter, PendingStep
from worker.request import ChoiceDelta, GenerateRequest, Logprob

Answers = dict[tuple[str, int], list[int]]


class LogitRecord:
    """Logits by the tokens they follow, over any number of engines with the same model."""

    def __init__(self) -> None:
        self.bits: dict[tuple[int, ...], bytes] = {}
        self.num_compared = 0
        self.logprobs: dict[tuple[str, int], list[Logprob]] = {}
        """Of the answers of the last run."""
        self.runners: set[str] = set()
        self.phases: set[str] = set()
        self._seen: list[tuple[Segment, torch.Tensor]] = []

    def watch(self, engine: Engine) -> None:
        """Look at every step of `engine` from now on."""
        runner: Any = engine.runner
        eager: Any = getattr(runner, "eager", runner)
        choose, open_letter = eager.choose, eager.open_letter
        eager_logits: list[torch.Tensor] = []

        def choosing(batch: Batch, logits: torch.Tensor, packed: torch.Tensor, name: str) -> PendingStep:
            eager_logits.append(logits)
            chosen: PendingStep = choose(batch, logits, packed, name)
            eager_logits.clear()
            return chosen

        def opening(batch: Batch, packed: torch.Tensor) -> Letter | None:
            # A step that no eager call announced was replayed, and a graph has left its logits.
            logits = eager_logits[0] if eager_logits else runner.regions.logits
            self.runners.add("eager" if eager_logits else "graph")
            self.phases.add(batch.phase)
            self._seen += list(zip(batch.sampling, logits.detach().cpu().clone(), strict=False))
            letter: Letter | None = open_letter(batch, packed)
            return letter

        eager.choose, eager.open_letter = choosing, opening

    def run(self, engine: Engine, requests: list[GenerateRequest], *, limit: int = 5000) -> Answers:
        """The answers of `engine`, which takes all requests at once, after comparing what it computed."""
        self.watch(engine)
        self.logprobs = {}
        for request in requests:
            engine.add(request)
        answers: Answers = defaultdict(list)
        for _ in range(limit):
            if not engine.has_work:
                break
            for event in engine.step():
                assert isinstance(event, ChoiceDelta), event
                answers[event.request_id, event.index] += event.token_ids
                self.logprobs.setdefault((event.request_id, event.index), []).extend(event.logprobs)
        assert not engine.has_work
        self.compare()
        return dict(answers)

    def compare(self) -> None:
        """Every sequence seen so far is known to its end: compare its logits with those of equal beginnings."""
        for segment, row in self._seen:
            tokens = tuple(segment.sequence.token_ids[: segment.end])
            if len(tokens) < segment.end:
                continue  # computed for a sequence that had ended
            bits = row.numpy().tobytes()
            before = self.bits.setdefault(tokens, bits)
            self.num_compared += before is not bits
            assert before == bits, f"other bits after {len(tokens)} tokens"
        self._seen.clear()
