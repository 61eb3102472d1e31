from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from cluster.codec import (
    MAX_SALT_BYTES,
    cache_options,
    check_defaults,
    check_request,
    messages_from_proto,
    prompt_estimate,
    sampling_from_proto,
    sampling_to_proto,
)
from protos import generation_pb2 as pb
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

GIVEN: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 3,
    "min_p": 0.125,
    "seed": -9,
    "stop": ("a", "bc"),
    "stop_token_ids": (1, 2),
    "ignore_eos": True,
    "min_tokens": 2,
    "presence_penalty": -1.5,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.25,
    "logit_bias": {5: -100.0, 6: 0.5},
    "logprobs": 4,
    "n": 2,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "allowed_token_ids": (3, 4),
}
ZEROS = {
    "temperature": 0.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": 0,
    "ignore_eos": False,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logprobs": 0,
    "include_stop_str_in_output": False,
    "skip_special_tokens": False,
}
"""Values that proto3 would not send if their fields were not optional."""
OUT_OF_RANGE = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("max_tokens", 2**63 - 1),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 101.0),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 2**31),
    ("min_p", -0.5),
    ("min_p", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 2**40),
    ("presence_penalty", 2.5),
    ("presence_penalty", -math.inf),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 2.5),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", dict.fromkeys(range(301), 1.0)),
    ("logprobs", -1),
    ("logprobs", 21),
    ("n", 0),
    ("n", 9),
    ("n", 2**31 - 1),
    ("n", -(2**63)),
    ("stop", ["x"] * 17),
    ("stop", [""]),
    ("stop", ["x" * 257]),
    ("stop", ["ä" * 129]),
]


def test_every_field_of_the_wire_message_is_covered_here() -> None:
    wire = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert wire == GIVEN.keys() == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_a_given_field_arrives(name: str) -> None:
    proto = sampling_to_proto({name: GIVEN[name], "max_tokens": 7})
    assert getattr(sampling_from_proto(proto), name) == GIVEN[name]


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_an_absent_field_takes_the_models_default_and_then_ours(name: str) -> None:
    absent = pb.SamplingParams()
    assert getattr(sampling_from_proto(absent), name) == getattr(SamplingParams(), name)
    defaults = {name: GIVEN[name]}
    assert getattr(sampling_from_proto(absent, defaults), name) == GIVEN[name]


@pytest.mark.parametrize("name", sorted(ZEROS))
def test_a_zero_that_is_given_is_not_absent(name: str) -> None:
    proto = pb.SamplingParams.FromString(sampling_to_proto({name: ZEROS[name]}).SerializeToString())
    other = {name: GIVEN[name], "max_tokens": 100}
    assert getattr(sampling_from_proto(proto, other), name) == ZEROS[name]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=str)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling_from_proto(sampling_to_proto({name: value}))
    assert caught.value.field == name


def test_min_tokens_may_not_exceed_the_models_default_of_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        sampling_from_proto(pb.SamplingParams(min_tokens=9), {"max_tokens": 8})


@given(st.binary(max_size=200))
def test_any_bytes_give_parameters_or_a_named_field(raw: bytes) -> None:
    try:
        proto = pb.SamplingParams.FromString(raw)
    except DecodeError:
        return
    refused: str | None = None
    try:
        sampling_from_proto(proto)
    except InvalidRequest as error:
        refused = error.field
    assert refused is None or refused in GIVEN


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2**63),
        ("max_tokens", "many"),
        ("max_tokens", 1.5),
        ("stop", [1]),
        ("stop", b"\xff"),
        ("stop_token_ids", 5),
        ("stop_token_ids", [2**63]),
        ("logit_bias", {2**63: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", 5),
        ("no_such_parameter", 1),
    ],
)
def test_a_value_that_no_message_can_hold_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling_to_proto({name: value})
    assert caught.value.field == name


def test_none_means_absent() -> None:
    assert sampling_to_proto(dict.fromkeys(GIVEN)) == pb.SamplingParams()


def test_one_stop_string_need_not_be_a_list() -> None:
    assert list(sampling_to_proto({"stop": "END"}).stop) == ["END"]


@pytest.mark.parametrize("defaults", [{"temperature": -1.0}, {"do_sample": True}, {"top_k": "x"}])
def test_generation_defaults_that_cannot_work_are_refused_at_start(defaults: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="generation defaults"):
        check_defaults(defaults)


def test_usable_generation_defaults_are_kept() -> None:
    assert check_defaults({"temperature": 0.2, "top_k": 50}) == {"temperature": 0.2, "top_k": 50}


@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids"),
        (pb.GenerateRequest(text="x", request_id="a b"), "request_id"),
        (pb.GenerateRequest(text="x", request_id="é"), "request_id"),
        (pb.GenerateRequest(text="x", request_id="x" * 129), "request_id"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(n=0)), "n"),
        (pb.ChatRequest(), "messages"),
        (pb.ChatRequest(messages=[pb.ChatMessage(role="user"), pb.ChatMessage(role="robot")]), "messages[1].role"),
        (pb.ChatRequest(messages=[pb.ChatMessage(content="hi")]), "messages[0].role"),
    ],
)
def test_a_request_that_is_wrong_for_any_model_is_refused_by_name(request_message: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(request_message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "request_message",
    [
        pb.GenerateRequest(text=" "),
        pb.GenerateRequest(text="\0"),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**40])),
        pb.ChatRequest(messages=[pb.ChatMessage(role="user")]),
    ],
)
def test_what_only_the_model_can_judge_passes(request_message: Any) -> None:
    check_request(request_message)


def test_messages_become_pairs() -> None:
    messages = [pb.ChatMessage(role="system", content="s"), pb.ChatMessage(role="tool", content="")]
    assert messages_from_proto(messages) == [("system", "s"), ("tool", "")]


def test_the_estimate_of_a_prompt_is_exact_for_ids_and_never_zero_for_text() -> None:
    assert prompt_estimate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(17)))) == 17
    assert prompt_estimate(pb.GenerateRequest(text="abcdefgh")) == 3
    assert prompt_estimate(pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="abcdefgh")])) > 3


@pytest.mark.parametrize("kind", [pb.GenerateRequest, pb.ChatRequest])
def test_the_prefix_cache_is_on_without_a_salt_unless_the_request_says_otherwise(kind: Any) -> None:
    assert cache_options(kind()) == {"use_prefix_cache": True, "cache_salt": ""}
    asked = kind(use_prefix_cache=False, cache_salt="tenant 7")
    assert cache_options(asked) == {"use_prefix_cache": False, "cache_salt": "tenant 7"}


def test_a_salt_is_limited_in_bytes() -> None:
    request = pb.GenerateRequest(text="a", cache_salt="é" * (MAX_SALT_BYTES // 2))
    check_request(request)
    request.cache_salt += "x"
    with pytest.raises(InvalidRequest) as caught:
        check_request(request)
    assert caught.value.field == "cache_salt"
    assert "é" not in str(caught.value)
