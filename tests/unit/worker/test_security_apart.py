"""S16: where tenants are kept apart, nobody's tokens are computed beside another's, and answers stay what they were."""

from __future__ import annotations

from collections import defaultdict

from tests.fakes.tiny_model import VOCAB, tiny_engine, tiny_model
from worker.batch import Batch
from worker.engine import Engine
from worker.pending import PendingStep
from worker.request import ChoiceDelta, GenerateRequest
from worker.sampling import SamplingParams

MODEL = tiny_model()


def requests() -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"{tenant}{number}",
            prompt_token_ids=tuple((31 * number + 7 * place) % VOCAB for place in range(5 + 3 * number)),
            sampling=SamplingParams(temperature=0, max_tokens=6 + number, ignore_eos=True),
            cache_salt=tenant,
        )
        for number, tenant in enumerate("aabbacb")
    ]


def answers(engine: Engine) -> tuple[dict[str, list[int]], list[set[str]]]:
    """Tokens of each request, and the tenants of each step."""
    found: dict[str, list[int]] = defaultdict(list)
    tenants: list[set[str]] = []
    launch = engine.runner.launch

    def watched(batch: Batch) -> PendingStep:
        tenants.append({segment.sequence.request.cache_salt for segment in batch.segments})
        return launch(batch)

    engine.runner.launch = watched  # type: ignore[method-assign]
    for request in requests():
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            found[event.request_id] += event.token_ids
    return dict(found), tenants


def test_no_step_computes_two_tenants_and_every_answer_is_the_same() -> None:
    together, mixed = answers(tiny_engine(MODEL))
    apart, alone = answers(tiny_engine(MODEL, mix_tenants=False))
    assert apart == together
    assert any(len(tenants) > 1 for tenants in mixed)
    assert all(len(tenants) == 1 for tenants in alone)
