"""Runs the corpus of bad requests against any server of GenerationService."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import yaml
from google.protobuf.message import Message

from protos import generation_pb2

CORPUS = Path(__file__).parent.parent / "data" / "bad_requests.yaml"
ANSWER_WITHIN_S = 0.1
TRANSFER_S_PER_BYTE = 0.25 / 2**20
"""Flow control of gRPC, on a machine with other things to do."""
METHODS: Mapping[str, type[Message]] = {
    "Generate": generation_pb2.GenerateRequest,
    "GenerateStream": generation_pb2.GenerateRequest,
    "Chat": generation_pb2.ChatRequest,
    "ChatStream": generation_pb2.ChatRequest,
    "Tokenize": generation_pb2.TokenizeRequest,
    "Detokenize": generation_pb2.DetokenizeRequest,
}
_NUMBER = re.compile(r"\$(?P<name>[VL])(?:(?P<sign>[-+*])(?P<operand>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and what a case has to know of its model."""

    address: str
    vocab_size: int
    max_model_len: int
    control_tokens: Mapping[str, int]
    """Text and id of each control token."""
    properties: frozenset[str] = frozenset()
    """What cases may need: "strict_template" (refuses two user turns in a row), "speed" (L tokens take no time)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request and how it must end."""

    name: str
    method: str
    code: str
    request: Mapping[str, Any] = field(default_factory=dict)
    raw: str | None = None
    repeat: int = 1
    field: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended."""

    code: str
    details: str
    trailers: Mapping[str, str]
    seconds: float
    num_bytes: int

    @property
    def was_prompt(self) -> bool:
        """Whether the answer came as soon as the contract wants it, the transfer of a large request aside."""
        return self.seconds <= ANSWER_WITHIN_S + TRANSFER_S_PER_BYTE * self.num_bytes


def load_cases() -> list[Case]:
    """Every case of the corpus."""
    entries = yaml.safe_load(CORPUS.read_text(encoding="utf-8"))
    return [Case(**{**entry, "needs": tuple(entry.get("needs", ()))}) for entry in entries]


def message_bytes(case: Case, target: Target) -> bytes:
    """The request on the wire."""
    if case.raw is not None:
        return bytes.fromhex(case.raw) * case.repeat
    message = METHODS[case.method]()
    _fill(message, case.request, target)
    return message.SerializeToString()


async def run_case(channel: grpc.aio.Channel, target: Target, case: Case) -> Outcome:
    """Send it and wait for its end."""
    raw = message_bytes(case, target)
    untyped: Any = channel
    path = f"/graphpool.v1.GenerationService/{case.method}"
    started_s = time.perf_counter()
    try:
        if case.method.endswith("Stream"):
            async for _ in untyped.unary_stream(path)(raw, timeout=30):
                pass
        else:
            await untyped.unary_unary(path)(raw, timeout=30)
    except grpc.aio.AioRpcError as error:
        seconds = time.perf_counter() - started_s
        metadata: Any = error.trailing_metadata()
        trailers = {str(key): str(value) for key, value in metadata}
        return Outcome(error.code().name, error.details() or "", trailers, seconds, len(raw))
    return Outcome("OK", "", {}, time.perf_counter() - started_s, len(raw))


def _fill(message: Any, fields: Mapping[str, Any], target: Target) -> None:
    for name, value in fields.items():
        _set(message, name, _resolved(value, target), target)


def _set(message: Any, name: str, value: Any, target: Target) -> None:
    if isinstance(value, list):
        entries = getattr(message, name)
        for entry in value:
            if isinstance(entry, Mapping):
                _fill(entries.add(), entry, target)
            else:
                entries.append(entry)
    elif isinstance(value, Mapping) and name == "logit_bias":
        message.logit_bias.update(value)
    elif isinstance(value, Mapping):
        part = getattr(message, name)
        part.SetInParent()
        _fill(part, value, target)
    else:
        setattr(message, name, value)


def _resolved(value: Any, target: Target) -> Any:
    """The value with its placeholders filled in."""
    if isinstance(value, list):
        return [_resolved(entry, target) for entry in value]
    if isinstance(value, Mapping) and "$repeat" in value:
        unit, count = value["$repeat"]
        return _resolved(unit, target) * _resolved(count, target)
    if isinstance(value, Mapping) and "$map" in value:
        step, count, entry = value["$map"]
        return {step * place: entry for place in range(count)}
    if value == "$CONTROL":
        return "".join(target.control_tokens)
    found = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    return value if found is None else _number(found, target)


def _number(found: re.Match[str], target: Target) -> int:
    number = target.vocab_size if found["name"] == "V" else target.max_model_len
    operand = int(found["operand"] or 0)
    return {"+": number + operand, "-": number - operand, "*": number * operand, None: number}[found["sign"]]
