"""A finished answer as plain values, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from cluster.client import Answer


def answer_values(pieces: Sequence[Answer]) -> dict[str, Any]:
    """The pieces of one stream put together, with the wire contract's field names."""
    last = pieces[-1]
    ends = [choice for piece in pieces for choice in piece.choices if choice.finish_reason is not None]
    return {
        "request_id": last.request_id,
        "text": "".join(piece.text for piece in pieces),
        "token_ids": [token_id for piece in pieces for token_id in piece.token_ids],
        "finish_reason": ends[0].finish_reason.value if ends and ends[0].finish_reason else None,
        "stop_string": ends[0].stop_string if ends else None,
        "stop_token_id": ends[0].stop_token_id if ends else None,
        "usage": _values(last.usage),
        "timings": _values(last.timings),
        "execution": _values(last.execution),
    }


def _values(message: Message | None) -> dict[str, Any] | None:
    if message is None:
        return None
    values: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return values
