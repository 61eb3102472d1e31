"""What a request needs of a replica, as far as its placement goes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.codec import AnyRequest
from protos import generation_pb2

PREFIX_TOKENS = 64
"""Of a prompt, compared with those of others."""
MIN_PREFIX_TOKENS = 32
"""A shorter prompt has no block worth going out of the way for."""
BYTES_PER_TOKEN = 4
"""Of text, roughly."""


@dataclass(frozen=True, slots=True)
class Want:
    """A request's size and the identity of its first tokens."""

    cost: int
    """Tokens of the prompt and of its answers at most."""
    length: int
    """Of the longest sequence it may become."""
    prefix: bytes = b""
    """Equal for prompts that begin alike and may share cached blocks; empty = nothing to share."""
    num_sequences: int = 1
    """Rows it takes."""


def want_of(request: AnyRequest, *, prompt_cost: int, answer_cost: int) -> Want:
    """What this request needs, given its size in tokens."""
    num_choices = max(request.sampling.n, 1) if request.sampling.HasField("n") else 1
    length = prompt_cost + answer_cost // num_choices
    return Want(prompt_cost + answer_cost, length, prefix_of(request), num_choices)


def prefix_of(request: AnyRequest) -> bytes:
    """A hash of the first PREFIX_TOKENS tokens and the cache salt; empty for short prompts and those not cached."""
    if request.HasField("use_prefix_cache") and not request.use_prefix_cache:
        return b""
    if isinstance(request, generation_pb2.ChatRequest):
        start = _start(part for message in request.messages for part in (message.role, message.content))
    elif request.WhichOneof("prompt") == "token_ids":
        ids = request.token_ids.ids[:PREFIX_TOKENS]
        start = array("q", ids).tobytes() if len(ids) >= MIN_PREFIX_TOKENS else b""
    else:
        start = _start((request.text,))
    return hashlib.blake2b(start, key=_key(request.cache_salt), digest_size=16).digest() if start else b""


def _start(texts: Iterable[str]) -> bytes:
    """The first bytes of these texts, with their borders; nothing if there are too few."""
    limit = PREFIX_TOKENS * BYTES_PER_TOKEN
    start = bytearray()
    for text in texts:
        start += text[: limit - len(start)].encode() + b"\0"
        if len(start) >= limit:
            break
    return bytes(start[:limit]) if len(start) >= MIN_PREFIX_TOKENS * BYTES_PER_TOKEN else b""


def _key(salt: str) -> bytes:
    """A salt may be longer than a key of the hash."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""
