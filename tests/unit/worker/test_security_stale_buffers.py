"""S14: nothing of one tenant's request is left in a buffer for another tenant's to meet."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from tests.fakes.tiny_model import VOCAB, tiny_engine, tiny_model
from worker.engine import Engine
from worker.request import ChoiceDelta, GenerateRequest
from worker.sampling import SamplingParams

MODEL = tiny_model()
BATCHES = range(1, 9)
"""Every size of a batch, so every bucket full and every bucket with padding rows."""
CANARY = 77
CANARY_VALUE = 1e4
"""In every key and value that nobody holds: finite, so that unlike NaN it can go unnoticed."""

Answer = tuple[list[int], list[float]]


def requests(
    tenant: str, count: int, *, prompt: list[int] | None = None, max_tokens: int = 12
) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"{tenant}{number}",
            prompt_token_ids=tuple(prompt or [(31 * number + 7 * place) % VOCAB for place in range(5 + 3 * number)]),
            sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=3),
            cache_salt=tenant,
        )
        for number in range(count)
    ]


def answered(engine: Engine, asked: list[GenerateRequest]) -> dict[str, Answer]:
    answers: dict[str, Answer] = defaultdict(lambda: ([], []))
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            answers[event.request_id][0].extend(event.token_ids)
            answers[event.request_id][1].extend(one.logprob for one in event.logprobs)
    return dict(answers)


def captured(graphs: str, **changes: bool) -> Engine:
    """An engine whose graphs are all there before its first request."""
    engine = tiny_engine(MODEL, graphs=graphs, **changes)
    while engine.prepare_next():
        pass
    return engine


def occupy(engine: Engine) -> None:
    """Tenant A: as many rows as there are, of canary tokens, long enough to write most of the KV pool."""
    answered(engine, requests("a", 8, prompt=[CANARY] * 100, max_tokens=8))


def fill_free_blocks(engine: Engine) -> None:
    """What A might have left, in every block that nobody holds, the padding block too."""
    engine.kv_cache.storage.fill_(CANARY_VALUE)


@pytest.mark.parametrize("graphs", ["off", "fake"])
@pytest.mark.parametrize("leave", [occupy, fill_free_blocks])
def test_s14_a_batch_of_every_size_is_answered_as_if_nobody_had_been_there(graphs: str, leave: object) -> None:
    engine, alone = (captured(graphs, prefix_cache=False) for _ in range(2))
    for count in BATCHES:
        fresh = answered(alone, requests("b", count))
        leave(engine)  # type: ignore[operator]
        found = answered(engine, requests("b", count))
        assert {name: ids for name, (ids, _) in found.items()} == {name: ids for name, (ids, _) in fresh.items()}
        for name, (_, logprobs) in fresh.items():
            torch.testing.assert_close(torch.tensor(found[name][1]), torch.tensor(logprobs), rtol=1e-4, atol=1e-5)
    assert (engine.load().graph_replays > 0) == (graphs == "fake")


@pytest.mark.parametrize("graphs", ["off", "fake"])
def test_s14_a_cancelled_tenants_rows_and_blocks_are_met_by_nobody(graphs: str) -> None:
    engine, alone = (captured(graphs) for _ in range(2))
    for count in BATCHES:
        for request in requests("a", 8, prompt=[CANARY] * 60, max_tokens=50):
            engine.add(request)
        for _ in range(6):
            engine.step()
        for number in range(8):
            engine.cancel(f"a{number}")
        fresh = answered(alone, requests(f"b{count}-", count))
        found = answered(engine, requests(f"b{count}-", count))
        assert {name: ids for name, (ids, _) in found.items()} == {name: ids for name, (ids, _) in fresh.items()}


def test_s14_and_s15_another_tenants_blocks_are_reused_without_their_content() -> None:
    """The same prompt under another salt: its blocks are computed again, whatever lies in those it is given."""
    engine = tiny_engine(MODEL)
    prompt = [CANARY] * 40
    first = answered(engine, requests("a", 1, prompt=prompt))
    hits = engine.load().prefix_cache_hits
    second = answered(engine, requests("b", 1, prompt=prompt))
    assert engine.load().prefix_cache_hits == hits
    assert [ids for ids, _ in first.values()] == [ids for ids, _ in second.values()]
