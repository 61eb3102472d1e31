"""A finished answer as plain values, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from cluster.client import Answer, Choice, TokenLogprob


def answer_values(pieces: Sequence[Answer]) -> dict[str, Any]:
    """The pieces of one stream put together, with the wire contract's field names.

    Text, ids and end are those of choice 0; of several choices all are in `choices`, each with its `index`.
    """
    last = pieces[-1]
    parts: dict[int, list[Choice]] = {}
    for piece in pieces:
        for choice in piece.choices:
            parts.setdefault(choice.index, []).append(choice)
    values = {
        "request_id": last.request_id,
        "seed": next((piece.seed for piece in pieces if piece.seed is not None), None),
        **_choice_values(parts.get(0, ())),
        "usage": _values(last.usage),
        "timings": _values(last.timings),
        "execution": _values(last.execution),
    }
    if len(parts) > 1:
        values["choices"] = [{"index": index, **_choice_values(parts[index])} for index in sorted(parts)]
    return values


def _choice_values(parts: Sequence[Choice]) -> dict[str, Any]:
    end = next((part for part in parts if part.finish_reason is not None), None)
    logprobs = [_logprob_values(logprob) for part in parts for logprob in part.logprobs]
    return {
        "text": "".join(part.text for part in parts),
        "token_ids": [token_id for part in parts for token_id in part.token_ids],
        "finish_reason": end.finish_reason.value if end and end.finish_reason else None,
        "stop_string": end.stop_string if end else None,
        "stop_token_id": end.stop_token_id if end else None,
        **({"logprobs": logprobs} if logprobs else {}),
    }


def _logprob_values(one: TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in one.top]
    return {"token_id": one.token_id, "logprob": one.logprob, "top": top}


def _values(message: Message | None) -> dict[str, Any] | None:
    if message is None:
        return None
    values: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return values
