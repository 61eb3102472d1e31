"""From Python values to wire messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, cast

from google.protobuf.message import Message as ProtoMessage

from cluster.codec import sampling_to_proto
from cluster.config import MAX_TIMEOUT_S, MESSAGE_BYTES
from protos import generation_pb2
from worker.errors import InvalidRequest

M = TypeVar("M", bound=ProtoMessage)
Prompt = str | Sequence[int]
"""Text, or token ids."""
Message = tuple[str, str] | Mapping[str, str]
"""(role, content), or {"role": ..., "content": ...}."""


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of every generating call. Absent or None = the model's default."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    min_tokens: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    n: int | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    allowed_token_ids: Sequence[int] | None


class CacheArguments(TypedDict, total=False):
    """What a request may say of the prefix cache. Absent or None = the server's default."""

    use_prefix_cache: bool | None
    cache_salt: str | None


class AnswerOptions(SamplingOptions, CacheArguments, total=False):
    """Keyword arguments of every call that makes an answer."""

    model: str
    """Needed where a router serves several."""
    request_id: str
    """For logs and `abort`. Absent = made by the server."""
    timeout_s: float | None
    """Deadline of the whole answer. Absent or None = that of the client's config."""


class RequestArguments(CacheArguments):
    """Arguments of what makes a message of them."""

    model: str
    request_id: str
    sampling: SamplingOptions


_NOT_SAMPLING = ("model", "request_id", "timeout_s", "use_prefix_cache", "cache_salt")


def request_arguments(options: AnswerOptions) -> RequestArguments:
    """The options of a call, sorted. What no message has a field for is refused with those of sampling."""
    sampling = {name: value for name, value in options.items() if name not in _NOT_SAMPLING}
    return {
        "model": options.get("model", ""),
        "request_id": options.get("request_id", ""),
        "use_prefix_cache": options.get("use_prefix_cache"),
        "cache_salt": options.get("cache_salt"),
        "sampling": cast("SamplingOptions", sampling),
    }


def generate_request(
    prompt: Prompt, *, model: str, request_id: str, sampling: SamplingOptions, **cache: Unpack[CacheArguments]
) -> generation_pb2.GenerateRequest:
    """Raises InvalidRequest for values no message can hold; everything else is the server's to judge."""
    request = generation_pb2.GenerateRequest(
        request_id=_unicode("request_id", request_id),
        model=_unicode("model", model),
        sampling=sampling_to_proto(sampling),
        **_given(cache),
    )
    if isinstance(prompt, str):
        request.text = _unicode("text", prompt)
    else:
        request.token_ids.CopyFrom(_token_ids(prompt))
    return _sendable(request, "prompt")


def chat_request(
    messages: Iterable[Message],
    *,
    model: str,
    request_id: str,
    sampling: SamplingOptions,
    **cache: Unpack[CacheArguments],
) -> generation_pb2.ChatRequest:
    """Raises InvalidRequest for values no message can hold."""
    request = generation_pb2.ChatRequest(
        request_id=_unicode("request_id", request_id),
        model=_unicode("model", model),
        messages=_chat_messages(messages),
        sampling=sampling_to_proto(sampling),
        **_given(cache),
    )
    return _sendable(request, "messages")


def tokenize_request(
    text: str | None, messages: Iterable[Message] | None, *, model: str, add_special_tokens: bool
) -> generation_pb2.TokenizeRequest:
    """Of a conversation if there is one, else of a text."""
    request = generation_pb2.TokenizeRequest(model=_unicode("model", model), add_special_tokens=add_special_tokens)
    if messages is not None:
        request.messages.messages.extend(_chat_messages(messages))
        request.messages.SetInParent()
    elif text is not None:
        request.text = _unicode("text", text)
    return _sendable(request, "text" if messages is None else "messages")


def detokenize_request(
    token_ids: Iterable[int], *, model: str, skip_special_tokens: bool
) -> generation_pb2.DetokenizeRequest:
    """Raises InvalidRequest for what is no id at all."""
    return generation_pb2.DetokenizeRequest(
        model=_unicode("model", model),
        token_ids=_token_ids(token_ids).ids,
        skip_special_tokens=skip_special_tokens,
    )


def _sendable(request: M, field: str) -> M:
    """The same message. Raises InvalidRequest for one that no server takes: gRPC would try it several times."""
    size = request.ByteSize()
    if size > MESSAGE_BYTES:
        raise InvalidRequest(field, f"makes a message of {size} bytes, the limit is {MESSAGE_BYTES}")
    return request


def _given(cache: CacheArguments) -> dict[str, Any]:
    """Raises InvalidRequest for values of another type."""
    given = {name: value for name, value in cache.items() if value is not None}
    for name, kind in (("use_prefix_cache", bool), ("cache_salt", str)):
        if not isinstance(given.get(name, kind()), kind):
            raise InvalidRequest(name, f"cannot be {type(given[name]).__name__}")
    if "cache_salt" in given:
        _unicode("cache_salt", str(given["cache_salt"]))
    return given


def _chat_messages(messages: Iterable[Message]) -> list[generation_pb2.ChatMessage]:
    """A conversation on the wire. Raises InvalidRequest naming the message that is none."""
    return [_chat_message(position, message) for position, message in enumerate(messages)]


def check_timeout(timeout_s: float | None) -> float | None:
    """The same number of seconds; one that has passed is left to the server. Raises InvalidRequest for what is none.

    gRPC would take a time past its clock's end for one that is over.
    """
    if timeout_s is None or (type(timeout_s) in (int, float) and timeout_s <= MAX_TIMEOUT_S):
        return timeout_s
    raise InvalidRequest(
        "timeout_s", f"{timeout_s!r:.40} is no time of at most {MAX_TIMEOUT_S:g} s; None waits for ever"
    )


def _unicode(field: str, text: str) -> str:
    """Raises InvalidRequest for half of a surrogate pair, which an argument that is not UTF-8 is made of."""
    if not isinstance(text, str):
        raise InvalidRequest(field, f"cannot be {type(text).__name__}")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise InvalidRequest(field, "is not valid Unicode text")
    return text


def _token_ids(ids: Iterable[int]) -> generation_pb2.TokenIds:
    """Raises InvalidRequest for what is no id at all; bytes are text that nobody decoded, not ids."""
    if isinstance(ids, (bytes, bytearray)):
        raise InvalidRequest("token_ids", f"cannot be {type(ids).__name__}: decode it for a text")
    try:
        return generation_pb2.TokenIds(ids=ids)
    except (TypeError, ValueError) as error:
        raise InvalidRequest("token_ids", "holds something that is not an integer of 64 bits") from error


def _chat_message(position: int, message: Message) -> generation_pb2.ChatMessage:
    try:
        role, content = (message["role"], message["content"]) if isinstance(message, Mapping) else message
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"messages[{position}]", "is not a role and a content") from error
    return generation_pb2.ChatMessage(
        role=_unicode(f"messages[{position}].role", role), content=_unicode(f"messages[{position}].content", content)
    )
