"""Requests as a program gone wrong would send them: valid ones with bytes changed, fields of odd values, and noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos import control_pb2, generation_pb2, replica_pb2

METHODS: Mapping[str, tuple[type[Message], bool]] = {
    "GenerationService/Generate": (generation_pb2.GenerateRequest, False),
    "GenerationService/GenerateStream": (generation_pb2.GenerateRequest, True),
    "GenerationService/Chat": (generation_pb2.ChatRequest, False),
    "GenerationService/ChatStream": (generation_pb2.ChatRequest, True),
    "GenerationService/Resume": (generation_pb2.ResumeRequest, True),
    "GenerationService/ResumeChat": (generation_pb2.ResumeChatRequest, True),
    "GenerationService/Tokenize": (generation_pb2.TokenizeRequest, False),
    "GenerationService/Detokenize": (generation_pb2.DetokenizeRequest, False),
    "ControlService/GetServerInfo": (control_pb2.GetServerInfoRequest, False),
    "ControlService/GetModelInfo": (control_pb2.GetModelInfoRequest, False),
    "ControlService/GetLoads": (control_pb2.GetLoadsRequest, False),
    "ControlService/Abort": (control_pb2.AbortRequest, False),
    "MembershipService/Announce": (replica_pb2.AnnounceRequest, False),
    "ReplicaService/Attach": (replica_pb2.RouterFrame, True),
    "NoSuchService/Method": (generation_pb2.GenerateRequest, False),
}
"""Request class, and whether answers stream. Drain is not among them: what it does it is meant to do."""
_INTEGERS = (0, 1, -1, 2, 3, 8, 16, 255, 511, 512, 4096, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, 1e30, -1e30, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    "",
    "x",
    "user",
    "assistant",
    "\x00",
    "é" * 50,
    "😀",
    "<|im_end|>",
    "../../etc",
    "a" * 3000,
    "%s%n{0}",
    "{{7*7}}",
)


def requests(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """(method, bytes), the same for the same seed."""
    dice = random.Random(seed)
    names = list(METHODS)
    for _ in range(count):
        name = dice.choice(names)
        yield name, dice.choice(_SHAPES)(dice, METHODS[name][0])


def _filled(dice: random.Random, kind: type[Message]) -> bytes:
    """Fields of odd values."""
    return _message(dice, kind, 0).SerializeToString()


def _mutated(dice: random.Random, kind: type[Message]) -> bytes:
    """A message with some bytes changed, dropped or repeated."""
    raw = bytearray(_filled(dice, kind)) or bytearray(b"\x0a\x01x")
    for _ in range(dice.randint(1, 8)):
        at = dice.randrange(len(raw)) if raw else 0
        change = dice.randrange(4)
        if change == 0 and raw:
            raw[at] ^= 1 << dice.randrange(8)
        elif change == 1 and raw:
            del raw[at : at + dice.randint(1, 9)]
        elif change == 2:
            raw[at:at] = raw[at : at + dice.randint(1, 64)]
        else:
            raw[at:at] = dice.randbytes(dice.randint(1, 8))
    return bytes(raw)


def _noise(dice: random.Random, _: type[Message]) -> bytes:
    return dice.randbytes(dice.choice((0, 1, 2, 5, 40, 300, 5000)))


def _foreign(dice: random.Random, _: type[Message]) -> bytes:
    """Another method's message."""
    return _filled(dice, dice.choice(list(METHODS.values()))[0])


_SHAPES: tuple[Callable[[random.Random, type[Message]], bytes], ...] = (
    _filled,
    _filled,
    _mutated,
    _mutated,
    _noise,
    _foreign,
)


def _message(dice: random.Random, kind: type[Message], depth: int) -> Message:
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if dice.random() < 0.5:
            _set(dice, message, field, depth)
    return message


def _set(dice: random.Random, message: Any, field: Any, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for _ in range(dice.choice((0, 1, 5, 310))):
            getattr(message, field.name)[dice.choice(_INTEGERS)] = dice.choice(_FLOATS)
    elif field.is_repeated:
        for _ in range(dice.choice((0, 1, 2, 20))):
            value = _value(dice, field, depth)
            entries = getattr(message, field.name)
            if field.message_type is None:
                entries.append(value)
            else:
                entries.add().CopyFrom(value)
    elif field.message_type is None:
        setattr(message, field.name, _value(dice, field, depth))
    elif depth < 4:
        getattr(message, field.name).CopyFrom(_value(dice, field, depth))


def _value(dice: random.Random, field: Any, depth: int) -> Any:
    if field.message_type is not None:
        return _message(dice, field.message_type._concrete_class, depth + 1)
    kind = field.cpp_type
    if field.type == FieldDescriptor.TYPE_BYTES:
        return dice.randbytes(dice.choice((0, 1, 16, 1000)))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return dice.choice(_TEXTS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return dice.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return dice.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return dice.choice((0, 1, 2, 3, 99))
    low, high = {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    }[kind]
    return min(max(dice.choice(_INTEGERS), low), high)
