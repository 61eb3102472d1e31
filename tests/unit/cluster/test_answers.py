from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.answers import AnswerFold, chat_response, extend_choice, load_to_proto, model_to_proto, timings_to_proto
from protos import control_pb2
from protos import generation_pb2 as pb
from worker.load import EngineInfo, GraphReadiness, LoadSnapshot, TierLoad
from worker.request import ChoiceDelta, FinishReason, Logprob, Timings


def test_a_delta_carries_every_field_to_the_wire() -> None:
    choice = pb.Choice(index=1)
    logprob = Logprob(7, -0.5, ((7, -0.5), (8, -2.0)))
    extend_choice(choice, ChoiceDelta(request_id="r", index=1, token_ids=(7,), text="a", logprobs=(logprob,)))
    end = ChoiceDelta(
        request_id="r", index=1, token_ids=(9,), text="b", finish_reason=FinishReason.STOP, stop_token_id=9
    )
    extend_choice(choice, end)
    top = [pb.TopLogprob(token_id=7, logprob=-0.5), pb.TopLogprob(token_id=8, logprob=-2.0)]
    assert choice == pb.Choice(
        index=1,
        text="ab",
        token_ids=[7, 9],
        logprobs=[pb.TokenLogprob(token_id=7, logprob=-0.5, top=top)],
        finish_reason=pb.FINISH_REASON_STOP,
        stop_token_id=9,
    )


@pytest.mark.parametrize(("reason", "wire"), [(FinishReason.STOP, 1), (FinishReason.LENGTH, 2)])
def test_finish_reasons_keep_their_meaning(reason: FinishReason, wire: int) -> None:
    choice = pb.Choice()
    extend_choice(choice, ChoiceDelta(request_id="r", index=0, finish_reason=reason, stop_string="x"))
    assert (choice.finish_reason, choice.stop_string) == (wire, "x")


def test_every_finish_reason_and_readiness_has_a_wire_form() -> None:
    for readiness in GraphReadiness:
        wire = load_to_proto(LoadSnapshot(readiness=readiness)).readiness
        assert control_pb2.GraphReadiness.Name(wire) == f"GRAPH_READINESS_{readiness.name}"
    for reason in FinishReason:
        choice = pb.Choice()
        extend_choice(choice, ChoiceDelta(request_id="r", index=0, finish_reason=reason))
        assert pb.FinishReason.Name(choice.finish_reason) == f"FINISH_REASON_{reason.name}"


METRICS_ALONE = ("preemptions", "wasted_rows", "graphs", "weights")
"""What routers have no use for."""


def test_a_load_snapshot_loses_nothing_on_the_wire() -> None:
    load = LoadSnapshot(
        running=1,
        waiting=2,
        outstanding_tokens=2**40,
        tiers=(TierLoad(256, 1, 3),),
        free_blocks=4,
        total_blocks=5,
        queue_age_s=0.5,
        steps=2**41,
        step_ms=1.5,
        tokens_per_s=99.5,
        readiness=GraphReadiness.PARTIAL,
        graph_replays=7,
        eager_steps=8,
        prefix_cache_queries=10,
        prefix_cache_hits=9,
    )
    proto = load_to_proto(load)
    plain = {
        name: getattr(proto, name)
        for name in LoadSnapshot.__dataclass_fields__
        if name not in ("tiers", "readiness", *METRICS_ALONE)
    }
    assert plain == {name: value for name, value in dataclasses.asdict(load).items() if name in plain}
    assert proto.tiers == [control_pb2.TierLoad(tier=256, running=1, free_slots=3)]


def test_an_engines_description_loses_nothing_on_the_wire() -> None:
    info = EngineInfo(
        model="m",
        architecture="a",
        max_model_len=64,
        vocab_size=10,
        eos_token_ids=(1, 2),
        tiers=(8, 16, 32, 64),
        buckets=(1, 4),
        dtype="bfloat16",
        device="cuda",
        has_tokenizer=True,
        has_chat_template=True,
    )
    proto = model_to_proto(info)
    assert proto.name == "m"
    for name in EngineInfo.__dataclass_fields__.keys() - {"model"}:
        value = getattr(proto, name)
        assert (tuple(value) if isinstance(getattr(info, name), tuple) else value) == getattr(info, name)


def test_times_become_milliseconds() -> None:
    proto = timings_to_proto(Timings(queue_s=0.5, prefill_s=0.25, decode_s=2.0))
    assert (proto.queue_ms, proto.prefill_ms, proto.decode_ms) == (500, 250, 2000)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 500), max_size=4), st.text(max_size=3)), max_size=20)
)
def test_a_folded_answer_is_the_concatenation_of_its_pieces(parts: list[tuple[int, list[int], str]]) -> None:
    fold = AnswerFold()
    for index, ids, text in parts:
        fold.add(pb.GenerateResponse(request_id="r", choices=[pb.Choice(index=index, token_ids=ids, text=text)]))
    whole = fold.result()
    assert [choice.index for choice in whole.choices] == sorted({index for index, _, _ in parts})
    for choice in whole.choices:
        mine = [(ids, text) for index, ids, text in parts if index == choice.index]
        assert list(choice.token_ids) == [token_id for ids, _ in mine for token_id in ids]
        assert choice.text == "".join(text for _, text in mine)


def test_a_folded_answer_keeps_reasons_sums_and_times() -> None:
    fold = AnswerFold()
    fold.add(pb.GenerateResponse(choices=[pb.Choice(text="a")], usage=pb.Usage(prompt_tokens=3)))
    end = pb.Choice(text="b", finish_reason=pb.FINISH_REASON_STOP, stop_string="END")
    fold.add(
        pb.GenerateResponse(
            choices=[end],
            usage=pb.Usage(prompt_tokens=3, completion_tokens=2),
            timings=pb.Timings(total_ms=4),
            execution=pb.Execution(replica="x", attempts=2),
            sequence=1,
        )
    )
    whole = fold.result()
    assert whole.choices[0] == pb.Choice(text="ab", finish_reason=pb.FINISH_REASON_STOP, stop_string="END")
    assert whole.usage == pb.Usage(prompt_tokens=3, completion_tokens=2)
    assert (whole.timings.total_ms, whole.execution.replica, whole.execution.attempts) == (4, "x", 2)


def test_chat_carries_the_same_answer_as_a_message_of_the_assistant() -> None:
    choice = pb.Choice(
        index=1,
        text="hi",
        token_ids=[4],
        logprobs=[pb.TokenLogprob(token_id=4)],
        finish_reason=pb.FINISH_REASON_STOP,
        stop_token_id=4,
    )
    piece = pb.GenerateResponse(
        request_id="r",
        choices=[choice],
        usage=pb.Usage(prompt_tokens=1),
        timings=pb.Timings(total_ms=1),
        execution=pb.Execution(tier=8),
        sequence=3,
    )
    chat = chat_response(piece)
    assert chat.choices[0].message == pb.ChatMessage(role="assistant", content="hi")
    assert (chat.request_id, chat.sequence) == ("r", 3)
    assert (chat.usage, chat.timings, chat.execution) == (piece.usage, piece.timings, piece.execution)
    for name in ("index", "token_ids", "logprobs", "finish_reason", "stop_token_id"):
        assert getattr(chat.choices[0], name) == getattr(choice, name)


def test_sums_that_are_not_there_stay_absent_in_chat() -> None:
    chat = chat_response(pb.GenerateResponse(choices=[pb.Choice(text="x")]))
    assert [field.name for field, _ in chat.ListFields()] == ["choices"]
