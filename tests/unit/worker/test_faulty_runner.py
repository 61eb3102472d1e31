"""A real engine whose runner fails on purpose."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.fakes.one_thread import one_thread  # noqa: F401
from tests.fakes.tiny_model import tiny_engine, tiny_model
from worker.engine import Engine
from worker.errors import NumericalError
from worker.faults import Faults, InjectedCrash, PromptFault
from worker.faulty_runner import FaultyRunner
from worker.request import ChoiceDelta, GenerateRequest, RequestFailed
from worker.sampling import SamplingParams

PROMPT, OTHER = (5, 6, 7, 8, 9), (20, 21, 22)


def faulty_engine(**changes: Any) -> tuple[Engine, Faults]:
    engine, faults = tiny_engine(tiny_model(), **changes), Faults()
    engine.runner = FaultyRunner(engine.runner, engine.kv_cache, faults)
    return engine, faults


def request(prompt: tuple[int, ...], **params: Any) -> GenerateRequest:
    sampling = SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **params})
    return GenerateRequest(request_id=str(prompt), prompt_token_ids=prompt, sampling=sampling)


def run(engine: Engine, *requests: GenerateRequest) -> tuple[dict[str, list[int]], dict[str, Exception]]:
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    failures: dict[str, Exception] = {}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, ChoiceDelta):
                tokens[event.request_id] += event.token_ids
            elif isinstance(event, RequestFailed):
                failures[event.request_id] = event.error
    return tokens, failures


@pytest.mark.parametrize("graphs", ["off", "fake"])
def test_without_a_fault_it_is_the_runner_it_wraps(graphs: str) -> None:
    plain = tiny_engine(tiny_model(), graphs=graphs, max_batch=2)
    faulty, _ = faulty_engine(graphs=graphs, max_batch=2)
    for engine in (plain, faulty):
        while engine.prepare_next():
            pass
    assert faulty.runner.readiness is plain.runner.readiness
    assert run(faulty, request(PROMPT), request(OTHER)) == run(plain, request(PROMPT), request(OTHER))
    assert faulty.graph_snapshot().uses == plain.graph_snapshot().uses


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3, "logprobs": 2}], ids=["greedy", "sampled"])
def test_a_row_that_becomes_nan_ends_its_request_and_leaves_nothing_in_the_pool(params: dict[str, Any]) -> None:
    engine, faults = faulty_engine()
    expected, _ = run(engine, request(PROMPT, **params), request(OTHER, **params))
    faults.on_prompt(PromptFault("nan", PROMPT, after_tokens=9, times_left=1))
    tokens, failures = run(engine, request(PROMPT, **params), request(OTHER, **params))
    assert list(failures) == [str(PROMPT)]
    assert isinstance(failures[str(PROMPT)], NumericalError)
    assert tokens[str(OTHER)] == expected[str(OTHER)]
    assert 9 <= len(tokens[str(PROMPT)]) <= 11
    assert tokens[str(PROMPT)] == expected[str(PROMPT)][: len(tokens[str(PROMPT)])]
    assert engine.kv_cache.storage.isfinite().all()
    # Whoever gets those blocks next computes what it always does.
    assert run(engine, request(PROMPT, **params), request(OTHER, **params)) == (expected, {})


def test_a_crash_ends_the_step_of_its_request() -> None:
    engine, faults = faulty_engine()
    faults.on_prompt(PromptFault("crash", PROMPT, after_tokens=4))
    run(engine, request(OTHER))
    with pytest.raises(InjectedCrash):
        run(engine, request(PROMPT))


def test_slow_steps_and_a_stalled_mailbox_take_their_time() -> None:
    engine, faults = faulty_engine()
    faults.slow(1.0, 0.01)
    started_s = time.perf_counter()
    run(engine, request(PROMPT))
    assert time.perf_counter() - started_s > 24 * 0.01
    faults.clear()
    for arm in (faults.stall_mailbox, faults.hang):
        arm(0.3)
        started_s = time.perf_counter()
        run(engine, request(PROMPT))
        assert time.perf_counter() - started_s > 0.25


@pytest.mark.parametrize(
    "arm",
    [
        lambda: Faults().slow(0.5),
        lambda: Faults().slow(float("nan")),
        lambda: PromptFault("kill", ()),
        lambda: PromptFault("kill", (1,), times_left=0),
    ],
)
def test_faults_that_make_no_sense_are_refused(arm: Any) -> None:
    with pytest.raises(ValueError, match=r"at least 1|empty|under 1"):
        arm()
