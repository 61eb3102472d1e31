"""Weights of a GPU are looked at between steps: a flipped bit is found, nothing waits, and graphs give what they gave."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes.tiny_model import VOCAB, tiny_engine, tiny_model
from worker import weight_check
from worker.bit_flips import BitFlips, flip_bit
from worker.constants import constants_of
from worker.engine import Engine
from worker.engine_thread import EngineThread
from worker.errors import WeightsCorrupted
from worker.fingerprint import Fingerprints, piece_words
from worker.graph_runner import GraphRunner
from worker.graphs.sync_counter import SyncCounter
from worker.request import ChoiceDelta, EngineEvent, GenerateRequest
from worker.sampling import SamplingParams
from worker.weight_check import BUSY_SHARE, SLICE_S, WeightCheck

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
ALWAYS = 1e-9
MODEL_BYTES = 2_500_000_000


class Weights(nn.Module):
    """As many as a model of a billion parameters has, in matrices and norms like its."""

    def __init__(self) -> None:
        super().__init__()
        left, number = MODEL_BYTES, 0
        while left > 0:
            for kind, shape in (("matrix", (8192, 2048)), ("norm", (2048,))):
                values = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device=CUDA)
                self.register_parameter(
                    f"{kind}{number}", nn.Parameter(values.view(torch.bfloat16), requires_grad=False)
                )
                left -= values.nbytes
            number += 1


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(device="cuda", hidden_size=64, intermediate_size=96, head_dim=16)


def request(name: str, length: int, **params: Any) -> GenerateRequest:
    prompt = tuple((7 * i + length) % VOCAB for i in range(length))
    values = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | params
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**values))


def some_requests() -> list[GenerateRequest]:
    return [
        request("greedy", 9),
        request("long", 60),
        request("sampled", 12, temperature=1.0, seed=3, top_p=0.9, logprobs=2),
        request("choices", 7, temperature=0.8, n=3, seed=4, repetition_penalty=1.3),
    ]


def answers(engine: Engine, *, look: bool) -> dict[tuple[str, int], list[int]]:
    for one in some_requests():
        engine.add(one)
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            found[event.request_id, event.index] += event.token_ids
        check = engine._weight_check
        if look and check is not None:
            check.advance(has_work=False)  # without the pace of a busy worker: slices behind every step
    return found


def finish(check: WeightCheck, num_passes: int = 1) -> None:
    goal = check.snapshot().passes + num_passes
    while check.snapshot().passes < goal:
        check.advance(has_work=False)


def test_the_sums_are_those_of_the_cpu() -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (piece_words(torch.device("cpu")),), dtype=torch.int64).to(torch.int32)
    found = []
    for device in ("cpu", "cuda", "cuda"):
        prints = Fingerprints(torch.device(device), max_pieces=1)
        prints.launch([words.to(device)])
        torch.cuda.synchronize()
        taken = prints.take()
        assert taken is not None
        found.append(taken[0])
    assert found[0] == found[1] == found[2]


def test_a_model_of_two_gigabytes_is_read_in_short_slices_without_waiting(weights: Weights) -> None:
    check = WeightCheck(constants_of(weights), interval_s=ALWAYS)
    finish(check)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    held_up: list[float] = []
    taken: list[float] = []
    original = check._prints.take

    def take() -> Any:
        found = original()
        if found is not None:
            taken.append(found[1])
        return found

    check._prints.take = take  # type: ignore[method-assign]
    goal, started_s = check.snapshot().passes + 1, time.perf_counter()
    while check.snapshot().passes < goal:
        before_s = time.perf_counter()
        check.advance(has_work=False)
        held_up.append(time.perf_counter() - before_s)
    pass_s = time.perf_counter() - started_s
    print(
        f"{check.snapshot().watched_bytes / 1e9:.2f} GB: {sum(taken) * 1e3:.1f} ms of work in {len(taken)} slices, longest "
        f"{max(taken) * 1e3:.2f} ms, host {max(held_up) * 1e3:.2f} ms; an idle pass takes {pass_s * 1e3:.0f} ms, "
        f"a busy one {sum(taken) / BUSY_SHARE:.1f} s"
    )
    assert max(held_up) < 4 * SLICE_S  # the host has other threads
    assert max(taken) < 2 * SLICE_S
    with SyncCounter() as syncs:
        finish(check)
    assert not syncs.calls
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("bit", [0, 8 * 2 * 2048 * 8192 - 1])
def test_a_bit_of_two_gigabytes_is_found(weights: Weights, bit: int) -> None:
    check = WeightCheck(constants_of(weights), interval_s=ALWAYS)
    finish(check)
    constant = next(one for one in constants_of(weights) if one.name == "matrix40")
    flip_bit(constant, bit)
    try:
        with pytest.raises(WeightsCorrupted, match="matrix40"):
            finish(check)
    finally:
        flip_bit(constant, bit)


def test_graphs_give_what_they_gave_with_slices_between_all_steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_check, "IDLE_SHARE", 1.0)
    plain = tiny_engine(model, weight_check_interval_s=0, max_batch=8)
    looking = tiny_engine(model, weight_check_interval_s=ALWAYS, max_batch=8)
    answers(looking, look=True)
    for engine in (plain, looking):
        while engine.prepare_next():
            engine.check_weights()  # between warm-ups and captures, too
    assert answers(looking, look=True) == answers(plain, look=False)
    assert looking.load().weights.passes >= 5
    for engine in (plain, looking):
        assert isinstance(engine.runner, GraphRunner)
        assert not engine.runner.dispatcher.quarantined
        engine.runner.session.close()


class Sink:
    def __init__(self) -> None:
        self.events: list[EngineEvent] = []

    def __call__(self, events: Sequence[EngineEvent]) -> None:
        self.events += events


@pytest.fixture
def living() -> Iterator[tuple[EngineThread, Any, list[BaseException]]]:
    own = tiny_model(device="cuda", hidden_size=64, intermediate_size=96, head_dim=16)
    deaths: list[BaseException] = []
    thread = EngineThread(tiny_engine(own, weight_check_interval_s=0.2), Sink(), on_death=deaths.append)
    yield thread, own, deaths
    thread.stop()


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_live_engine_ends_when_a_bit_flips(living: Any, is_busy: bool) -> None:
    thread, own, deaths = living
    over = threading.Event()

    def keep_busy() -> None:
        number = 0
        while not over.is_set() and not deaths:
            if thread.load().running + thread.load().waiting < 6:
                thread.submit(request(str(number), 9, max_tokens=100))
                number += 1
            time.sleep(0.001)

    thread.submit(request("first", 9))
    busy = threading.Thread(target=keep_busy)
    if is_busy:
        busy.start()
    try:
        wait_until(lambda: thread.load().weights.passes >= 1)
        BitFlips(own.model.module, thread.between_steps)("layers.1.down_weight", 12345)
        started_s = time.monotonic()
        wait_until(lambda: bool(deaths))
        print(f"found after {time.monotonic() - started_s:.2f} s")
    finally:
        over.set()
    assert isinstance(deaths[0], WeightsCorrupted)
    assert deaths[0].tensor == "layers.1.down_weight"


def wait_until(condition: Any, timeout_s: float = 60) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
