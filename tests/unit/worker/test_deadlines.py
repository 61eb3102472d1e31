"""What has no time left is not computed."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.script_runner import script_engine
from worker.errors import DeadlineExceeded
from worker.request import ChoiceDelta, Criticality, EngineEvent, GenerateRequest, RequestFailed
from worker.sampling import SamplingParams


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


arrivals = st.lists(
    st.tuples(
        st.integers(1, 20),
        st.integers(1, 6),
        st.one_of(st.none(), st.floats(0.1, 12)),
        st.sampled_from(sorted(Criticality)),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(arrivals, st.integers(1, 4))
def test_no_step_computes_a_request_whose_deadline_has_passed(
    asked: Sequence[tuple[int, int, float | None, Criticality]], max_batch: int
) -> None:
    clock = Clock()
    engine, _ = script_engine(lambda _: ord("x"), clock=clock, max_batch=max_batch, max_waiting=1000)
    deadlines: dict[str, float | None] = {}
    ends: dict[str, EngineEvent] = {}
    pending = list(enumerate(asked))
    while pending or engine.has_work:
        for number, (prompt, max_tokens, time_s, criticality) in pending[:2]:
            deadline_s = None if time_s is None else clock.now_s + time_s
            name = f"r{number}"
            deadlines[name] = deadline_s
            engine.add(
                GenerateRequest(
                    request_id=name,
                    prompt_token_ids=tuple(range(1, prompt + 1)),
                    sampling=SamplingParams(max_tokens=max_tokens),
                    deadline_s=deadline_s,
                    criticality=criticality,
                )
            )
        pending = pending[2:]
        events, batch = engine.plan()
        for segment in batch.segments if batch is not None else ():
            deadline_s = deadlines[segment.sequence.request.request_id]
            assert deadline_s is None or clock.now_s < deadline_s
        if batch is not None:
            engine.launch(batch)
        clock.now_s += 1.0
        for event in [*events, *engine.flush()]:
            if isinstance(event, RequestFailed) or (isinstance(event, ChoiceDelta) and event.finish_reason is not None):
                assert event.request_id not in ends
                ends[event.request_id] = event
    assert ends.keys() == deadlines.keys()
    for name, event in ends.items():
        if isinstance(event, RequestFailed):
            assert isinstance(event.error, DeadlineExceeded)
            assert deadlines[name] is not None
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_usable
