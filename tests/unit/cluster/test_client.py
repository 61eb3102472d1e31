from __future__ import annotations

import math
import pickle
from typing import Any

import grpc
import pytest

from cluster import client
from cluster.client import CallError, SamplingOptions
from cluster.client.answers import answer_of
from cluster.client.errors import call_error
from cluster.client.requests import chat_request, detokenize_request, generate_request, tokenize_request
from cluster.codec import sampling_from_proto
from cluster.status import CODES
from protos import generation_pb2 as pb
from worker.errors import InvalidRequest
from worker.request import FinishReason


class FakeRpcError:
    """As much of a grpc.RpcError as is read."""

    def __init__(self, code: grpc.StatusCode, details: str | None = "why", *trailers: tuple[str, str]) -> None:
        self._parts = (code, details, trailers)

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str | None:
        return self._parts[1]

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._parts[2]


@pytest.mark.parametrize("code", sorted(set(CODES.values()), key=str))
def test_every_status_a_server_gives_has_an_error_of_its_own(code: grpc.StatusCode) -> None:
    error = call_error(FakeRpcError(code))
    assert type(error) is not CallError
    assert (error.code, error.details, str(error)) == (code, "why", f"{code.name}: why")


def test_a_status_from_elsewhere_is_a_call_error_too() -> None:
    error = call_error(FakeRpcError(grpc.StatusCode.OUT_OF_RANGE, None))
    assert (type(error), error.details) == (CallError, "")


@pytest.mark.parametrize(("pushback", "expected"), [("250", 0.25), ("0", 0.0), ("-1", None)])
def test_the_time_to_come_back_is_told(pushback: str, expected: float | None) -> None:
    error = call_error(FakeRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", ("grpc-retry-pushback-ms", pushback)))
    assert error.retry_after_s == expected


def test_an_answer_that_broke_off_says_where_to_go_on_and_poison_what_it_is() -> None:
    broken = call_error(FakeRpcError(grpc.StatusCode.UNAVAILABLE, "gone", ("request-id", "r"), ("resume-index", "7")))
    assert (broken.request_id, broken.resume_index, broken.is_poison) == ("r", 7, False)
    poison = call_error(FakeRpcError(grpc.StatusCode.INTERNAL, "no", ("poison", "true")))
    assert (poison.request_id, poison.resume_index, poison.is_poison) == ("", None, True)
    assert pickle.loads(pickle.dumps(broken)).resume_index == 7  # made here


def test_every_public_error_of_a_call_is_a_call_error() -> None:
    errors = [value for name in client.__all__ if isinstance(value := getattr(client, name), type)]
    kinds = [kind for kind in errors if issubclass(kind, Exception)]
    assert len(kinds) == 14
    assert [kind for kind in kinds if not issubclass(kind, CallError)] == [InvalidRequest]  # which no call has met


def test_sampling_options_are_the_fields_of_the_wire_message() -> None:
    assert SamplingOptions.__annotations__.keys() == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


def test_a_prompt_is_text_or_ids_and_options_that_are_none_stay_absent() -> None:
    text = generate_request("x", model="m", request_id="r", sampling={"max_tokens": None, "temperature": 0.0})
    ids = generate_request([1, 2], model="", request_id="", sampling={"stop": "END"})
    assert text == pb.GenerateRequest(text="x", model="m", request_id="r", sampling=pb.SamplingParams(temperature=0.0))
    assert list(ids.token_ids.ids) == [1, 2]
    assert sampling_from_proto(ids.sampling).stop == ("END",)


def test_an_empty_list_of_ids_is_still_a_list_of_ids() -> None:
    assert generate_request([], model="", request_id="", sampling={}).WhichOneof("prompt") == "token_ids"


def test_messages_are_pairs_or_mappings() -> None:
    messages: list[Any] = [("system", "s"), {"role": "user", "content": "u"}]
    request = chat_request(messages, model="", request_id="", sampling={})
    assert [(message.role, message.content) for message in request.messages] == [("system", "s"), ("user", "u")]


@pytest.mark.parametrize("message", [("user",), {"role": "user"}, ("user", 5), 5, ("a", "b", "c"), ("user", "\ud800")])
def test_a_message_that_is_none_is_refused_by_its_place(message: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\]"):
        chat_request([("user", "x"), message], model="", request_id="", sampling={})


@pytest.mark.parametrize("name", ["role", "content"])
@pytest.mark.parametrize("value", ["\ud800", 5, None, b"x"])
def test_a_part_of_a_message_that_is_no_text_is_refused_by_its_name(name: str, value: Any) -> None:
    message: Any = {"role": "user", "content": "x", name: value}
    with pytest.raises(InvalidRequest, match=rf"^messages\[0\]\.{name}: "):
        chat_request([message], model="", request_id="", sampling={})


@pytest.mark.parametrize("ids", [["a"], [1.5], [2**63], [None]])
def test_ids_that_are_none_are_refused(ids: Any) -> None:
    with pytest.raises(InvalidRequest, match="token_ids"):
        generate_request(ids, model="", request_id="", sampling={})
    with pytest.raises(InvalidRequest, match="token_ids"):
        detokenize_request(ids, model="", skip_special_tokens=False)


def test_a_conversation_is_tokenised_even_if_it_is_empty() -> None:
    empty = tokenize_request(None, [], model="", add_special_tokens=True)
    text = tokenize_request("x", None, model="", add_special_tokens=False)
    assert empty.WhichOneof("input") == "messages"
    assert (text.text, text.add_special_tokens) == ("x", False)


@pytest.mark.parametrize("kind", [pb.GenerateResponse, pb.ChatResponse])
def test_an_answer_holds_what_the_response_does(kind: type[Any]) -> None:
    top = [pb.TopLogprob(token_id=4, logprob=-0.5)]
    common: dict[str, Any] = {
        "index": 0,
        "token_ids": [4],
        "logprobs": [pb.TokenLogprob(token_id=4, logprob=-0.5, top=top)],
        "finish_reason": pb.FINISH_REASON_STOP,
        "stop_string": "END",
    }
    response = kind(request_id="r", sequence=3, usage=pb.Usage(prompt_tokens=2))
    if kind is pb.GenerateResponse:
        response.choices.append(pb.Choice(text="hi", **common))
    else:
        response.choices.append(pb.ChatChoice(message=pb.ChatMessage(role="assistant", content="hi"), **common))
    answer = answer_of(response)
    assert (answer.request_id, answer.sequence, answer.text, answer.token_ids) == ("r", 3, "hi", (4,))
    assert answer.finish_reason is FinishReason.STOP
    assert answer.usage == pb.Usage(prompt_tokens=2)
    assert answer.timings is None
    assert answer.execution is None
    (choice,) = answer.choices
    assert (choice.stop_string, choice.stop_token_id) == ("END", None)
    assert choice.logprobs[0].top == ((4, -0.5),)


def test_the_text_of_an_answer_is_that_of_its_first_choice() -> None:
    choices = [pb.Choice(index=1, text="b"), pb.Choice(index=0, text="a")]
    answer = answer_of(pb.GenerateResponse(choices=choices))
    assert answer.text == "a"
    assert answer_of(pb.GenerateResponse()).text == ""


@pytest.mark.parametrize("value", [5, None, b"x", "\ud800"])
@pytest.mark.parametrize("name", ["request_id", "model"])
def test_a_name_that_is_no_text_is_refused_by_its_field(name: str, value: Any) -> None:
    names: dict[str, Any] = {"request_id": "", "model": "", name: value}
    with pytest.raises(InvalidRequest, match=rf"^{name}: "):
        generate_request("x", sampling={}, **names)
    with pytest.raises(InvalidRequest, match=rf"^{name}: "):
        chat_request([("user", "x")], sampling={}, **names)
    if name == "model":
        with pytest.raises(InvalidRequest, match=r"^model: "):
            tokenize_request("x", None, model=value, add_special_tokens=True)
        with pytest.raises(InvalidRequest, match=r"^model: "):
            detokenize_request([1], model=value, skip_special_tokens=False)


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, 1e18, "5", True])
async def test_a_time_that_grpc_would_take_for_over_is_refused_by_its_field(timeout_s: Any) -> None:
    with client.GraphpoolClient("127.0.0.1:9") as blocking, pytest.raises(InvalidRequest, match=r"^timeout_s: "):
        blocking.generate("x", timeout_s=timeout_s)
    async with client.AsyncGraphpoolClient("127.0.0.1:9") as asynchronous:
        with pytest.raises(InvalidRequest, match=r"^timeout_s: "):
            await asynchronous.generate("x", timeout_s=timeout_s)


def test_an_option_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with client.GraphpoolClient("127.0.0.1:9") as blocking:
        with pytest.raises(InvalidRequest, match=r"^max_new_tokens: is no sampling parameter; there are .*max_tokens"):
            blocking.generate("x", max_new_tokens=3)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match=r"^max_tokens: cannot be str 'many'"):
            blocking.generate("x", max_tokens="many")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [b"hello", bytearray(b"hello")])
def test_bytes_are_neither_text_nor_ids(text: Any) -> None:
    with client.GraphpoolClient("127.0.0.1:9") as blocking, pytest.raises(InvalidRequest, match="decode it for a text"):
        blocking.generate(text)


def test_a_message_that_no_server_takes_is_not_sent() -> None:
    with client.GraphpoolClient("127.0.0.1:9") as blocking:
        with pytest.raises(InvalidRequest, match=r"^prompt: makes a message of 5000013 bytes, the limit is 4194304"):
            blocking.generate("x" * 5_000_000, model="m", request_id="r")
        with pytest.raises(InvalidRequest, match=r"^messages: makes a message of"):
            blocking.chat_stream([("user", "x" * 5_000_000)])
        with pytest.raises(InvalidRequest, match=r"^text: makes a message of"):
            blocking.tokenize("x" * 5_000_000)


def test_what_a_client_needs_comes_from_one_module() -> None:
    assert all(hasattr(client, name) for name in client.__all__)
    assert {"ClientConfig", "ClientSecurity", "InvalidRequest", "CallError"} <= set(client.__all__)
