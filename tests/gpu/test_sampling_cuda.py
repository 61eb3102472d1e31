"""The fused sampler on a real GPU: equal to the plain one on any device, true to the distribution, never waiting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.sampled_rows import Rows, sequence
from tests.fakes.tiny_model import VOCAB, tiny_engine, tiny_model
from worker import sampler
from worker.engine import Engine
from worker.graph_runner import GraphRunner
from worker.graphs.sync_counter import SyncCounter, SyncKind
from worker.request import ChoiceDelta, GenerateRequest
from worker.sampling import SamplingParams
from worker.sampling_needs import ALL_NEEDS
from worker.sampling_views import SamplingViews

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STATE = ("whole", "counts", "last_tokens")
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_k": 400, "top_p": 0.8, "temperature": 0.6},
    {"top_k": 20_000, "top_p": 0.97, "temperature": 1.5},
    {"top_p": 0.9999, "min_p": 0.001},
    {"min_p": 0.02},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "top_p": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 20},
    {"temperature": 0.0, "logprobs": 5},
    {"logit_bias": {number * 37: 3.0 for number in range(300)}, "logprobs": 1, "top_p": 0.5},
    {"logit_bias": dict.fromkeys(range(4096, 4396), 5.0)},
    {"allowed_token_ids": tuple(range(5, 3000, 7)), "top_k": 50},
    {"min_tokens": 1000, "stop_token_ids": tuple(range(40)), "top_k": 3},
    {"temperature": 50.0, "top_p": 0.5},
)


def random_rows(count: int, vocab: int, spread: float) -> Rows:
    """All kinds in turn."""
    generator = torch.Generator("cuda").manual_seed(count)
    logits = torch.randn(count, vocab, generator=generator, device="cuda") * spread
    history = torch.randint(vocab, (count, 64), generator=torch.Generator().manual_seed(1)).tolist()
    made = [
        sequence(SamplingParams(seed=row * 77 - 5, **KINDS[row % len(KINDS)]), history[row][:30], history[row][30:])
        for row in range(count)
    ]
    return Rows(made, logits)


def fused(logits: torch.Tensor, views: SamplingViews) -> sampler.Sampled:
    from worker.kernels.sample import sample

    return sample(logits, views, ALL_NEEDS)


def on_cpu(views: SamplingViews) -> SamplingViews:
    return SamplingViews(**{name: getattr(views, name).cpu() for name in SamplingViews.__slots__})


def assert_equal(rows: Rows, left: Any, right: Any) -> None:
    (expected, expected_details, first), (found, details, second) = left, right
    assert expected.tolist() == found.tolist()
    for name in STATE:
        assert torch.equal(getattr(first, name).cpu(), getattr(second, name).cpu()), name
    for row, one in enumerate(rows.sequences):
        if one.request.sampling.logprobs is not None:
            end = 3 + one.request.sampling.logprobs
            assert expected_details[row, :end].tolist() == details[row, :end].tolist()


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0])
@pytest.mark.parametrize("vocab", [128_256, 151_936])
@pytest.mark.parametrize("count", [1, 15, 64, 256])
def test_the_fused_sampler_equals_the_plain_one_on_large_vocabularies(count: int, vocab: int, spread: float) -> None:
    rows = random_rows(count, vocab, spread)
    plain, kernel = rows.copy(), rows.copy()
    expected, found = sampler.sample(rows.logits, plain), fused(rows.logits, kernel)
    assert_equal(rows, (*expected, plain), (*found, kernel))


@pytest.mark.parametrize("vocab", [49_152, 128_256])
def test_a_gpu_and_a_cpu_choose_the_same_tokens(vocab: int) -> None:
    rows = random_rows(len(KINDS), vocab, 2.0)
    kernel, host = rows.copy(), on_cpu(rows.copy())
    expected, found = sampler.sample(rows.logits.cpu(), host), fused(rows.logits, kernel)
    assert_equal(rows, (*expected, host), (*found, kernel))


def test_a_row_alone_has_the_token_it_has_in_a_batch() -> None:
    rows = random_rows(64, 128_256, 1.5)
    together, _ = fused(rows.logits, rows.copy())
    for row in range(0, 64, 7):
        views = rows.copy()
        one = SamplingViews(
            **{name: getattr(views, name) for name in SamplingViews.__slots__ if name != "places"},
            places=views.places[row : row + 1],
        )
        assert fused(rows.logits, one)[0].tolist() == [together[row].tolist()]


@pytest.mark.parametrize("params", [{}, {"top_k": 30}, {"top_k": 30, "top_p": 0.8, "temperature": 2.0}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    count, vocab = 30_000, 60
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2))
    made = [sequence(SamplingParams(seed=seed, **params)) for seed in range(count)]
    rows = Rows(made, logits.cuda().expand(count, -1))
    packed, _ = fused(rows.logits, rows.views)
    probabilities = torch.softmax(logits.double() / params.get("temperature", 1.0), -1).numpy()
    expected = reference_cut(probabilities, params) * count
    counts = np.bincount(packed[:, 0].cpu().numpy(), minlength=vocab)
    kept = expected > 0
    assert not counts[~kept].any()
    freedom = int(kept.sum()) - 1
    statistic = float((((counts - expected) ** 2)[kept] / expected[kept]).sum())
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def reference_cut(probabilities: Any, params: dict[str, Any]) -> Any:
    """The distribution that is left, by sorting."""
    order = np.argsort(-probabilities, kind="stable")[: params.get("top_k", len(probabilities))]
    running = np.cumsum(probabilities[order]) / probabilities[order].sum()
    order = order[: int((running < params.get("top_p", 2.0)).sum()) + 1]
    order = order[probabilities[order] >= params.get("min_p", 0.0) * probabilities.max()]
    left = np.zeros_like(probabilities)
    left[order] = probabilities[order]
    return left / left.sum()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(device="cuda", hidden_size=64, intermediate_size=96, head_dim=16)


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[Engine]:
    made = tiny_engine(model, max_batch=8, prefix_cache=False)
    assert isinstance(made.runner, GraphRunner)
    made.runner.prepare_all()
    assert not made.runner.dispatcher.quarantined, made.runner.dispatcher.quarantined
    yield made
    made.runner.session.close()


def requests(count: int, max_tokens: int = 30) -> list[GenerateRequest]:
    mixed = [
        kind for kind in KINDS if max(kind.get("logit_bias", kind.get("allowed_token_ids", ())), default=0) < VOCAB
    ]
    return [
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=tuple((7 * i + number) % VOCAB for i in range(5 + number)),
            sampling=SamplingParams(
                **({"temperature": 1.0} | mixed[number % len(mixed)] | {"seed": number, "ignore_eos": True}),
                max_tokens=max_tokens,
            )
            if "min_tokens" not in mixed[number % len(mixed)]
            else SamplingParams(seed=number, temperature=0.9, top_k=9, max_tokens=max_tokens, ignore_eos=True),
        )
        for number in range(count)
    ]


def answers(engine: Engine, asked: list[GenerateRequest]) -> dict[str, list[Any]]:
    for one in asked:
        engine.add(one)
    found: dict[str, list[Any]] = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            found[event.request_id] += [
                (token, event.logprobs[-1].token_id if event.logprobs else None) for token in event.token_ids
            ]
    return found


def test_sampled_requests_alone_and_in_batches_give_equal_tokens(engine: Engine) -> None:
    asked = requests(12)
    together = answers(engine, asked)
    alone = {one.request_id: answers(engine, [one])[one.request_id] for one in asked}
    assert together == alone


def test_graphs_and_eager_give_equal_tokens(engine: Engine, model: Any) -> None:
    asked = requests(12)
    assert answers(engine, asked) == answers(tiny_engine(model, max_batch=8, graphs="off"), asked)


def test_sampled_steps_run_ahead_and_wait_for_events_alone(engine: Engine) -> None:
    assert isinstance(engine.runner, GraphRunner)
    answers(engine, requests(8))
    with SyncCounter() as syncs:
        answers(engine, requests(8, max_tokens=60))
    assert {call.kind for call in syncs.calls} == {SyncKind.EVENT}, syncs.calls
    uploads = engine.runner.eager.sampling.table.num_uploads
    for one in requests(8, max_tokens=60):
        engine.add(one)
    for _ in range(30):
        engine.step()
    settled = engine.runner.eager.sampling.table.num_uploads
    for _ in range(20):
        engine.step()
        assert len(engine._under_way) == 1
    assert engine.runner.eager.sampling.table.num_uploads == settled > uploads
    while engine.has_work:
        engine.step()
