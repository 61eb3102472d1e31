"""From wire messages to what an engine takes: everything a client can get wrong in a scalar is found here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from protos import generation_pb2
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

AnyRequest = generation_pb2.GenerateRequest | generation_pb2.ChatRequest
Messages = list[tuple[str, str]]
"""(role, content), oldest first."""

MAX_SALT_BYTES = 256
ROLES = ("system", "user", "assistant", "tool")
NO_DEFAULTS: Mapping[str, Any] = {}

_SCALARS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "n",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids")
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class CacheOptions(TypedDict):
    """Fields of `worker.request.GenerateRequest`."""

    use_prefix_cache: bool
    cache_salt: str


def sampling_from_proto(
    proto: generation_pb2.SamplingParams, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> SamplingParams:
    """What the request says, then the model's own `defaults`, then ours. Raises InvalidRequest naming the field."""
    values = dict(defaults)
    for name in _SCALARS:
        if proto.HasField(name):  # type: ignore[arg-type]  # the stub wants a literal
            values[name] = getattr(proto, name)
    for name in _LISTS:
        given = getattr(proto, name)
        if given:
            values[name] = tuple(given)
    if proto.logit_bias:
        values["logit_bias"] = dict(proto.logit_bias)
    return SamplingParams(**values)


def sampling_to_proto(values: Mapping[str, Any]) -> generation_pb2.SamplingParams:
    """The wire form of keyword arguments; None = absent. Raises InvalidRequest for what no message can hold."""
    proto = generation_pb2.SamplingParams()
    for name, value in values.items():
        if value is None:
            continue
        try:
            _set_field(proto, name, value)
        except InvalidRequest:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(name, f"cannot be {type(value).__name__} {value!r:.40}") from error
    return proto


def check_defaults(defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same mapping, if a request that sets nothing could be answered with it; else ValueError."""
    try:
        SamplingParams(**defaults)
    except (TypeError, InvalidRequest) as error:
        raise ValueError(f"the model's generation defaults cannot be used: {error}") from error
    return defaults


def check_request(request: AnyRequest) -> None:
    """Refuse what is wrong whatever the model is. Raises InvalidRequest naming the field."""
    check_request_id(request.request_id)
    sampling_from_proto(request.sampling)
    cache_options(request)
    if isinstance(request, generation_pb2.ChatRequest):
        messages_from_proto(request.messages)
        return
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "neither text nor token_ids is given")
    if not (request.text if kind == "text" else request.token_ids.ids):
        raise InvalidRequest(kind, "is empty")


def cache_options(request: AnyRequest) -> CacheOptions:
    """What the request says of the prefix cache. Raises InvalidRequest for a salt that is too long."""
    size = len(request.cache_salt.encode())
    if size > MAX_SALT_BYTES:
        raise InvalidRequest("cache_salt", f"has {size} bytes, the limit is {MAX_SALT_BYTES}")
    use = request.use_prefix_cache if request.HasField("use_prefix_cache") else True
    return {"use_prefix_cache": use, "cache_salt": request.cache_salt}


def check_request_id(request_id: str) -> None:
    """Ids travel in metadata, so they are short and printable; empty = made by the server."""
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest("request_id", "must be 1 to 128 printable ASCII characters without spaces")


def messages_from_proto(messages: Iterable[generation_pb2.ChatMessage]) -> Messages:
    """A conversation as (role, content). Raises InvalidRequest naming the message."""
    conversation: Messages = []
    for position, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(f"messages[{position}].role", f"must be one of {', '.join(ROLES)}")
        conversation.append((message.role, message.content))
    if not conversation:
        raise InvalidRequest("messages", "is empty")
    return conversation


def prompt_estimate(request: AnyRequest) -> int:
    """Tokens of the prompt: exact for token ids, a guess of four bytes a token for text."""
    if isinstance(request, generation_pb2.ChatRequest):
        return 1 + sum(8 + len(message.content) // 4 for message in request.messages)
    if request.WhichOneof("prompt") == "token_ids":
        return len(request.token_ids.ids)
    return 1 + len(request.text) // 4


def _set_field(proto: generation_pb2.SamplingParams, name: str, value: Any) -> None:
    if name in _SCALARS:
        setattr(proto, name, value)
    elif name == "logit_bias":
        proto.logit_bias.update(value)
    elif name == "stop" and isinstance(value, str):
        proto.stop.append(value)
    elif name in _LISTS:
        getattr(proto, name).extend(value)
    else:
        known = (field.name for field in proto.DESCRIPTOR.fields)
        raise InvalidRequest(name, f"is no sampling parameter; there are {', '.join(known)}")
