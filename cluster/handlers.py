"""Handlers of gRPC methods, and how an interceptor changes what one does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour = Callable[[Any, Context], Awaitable[Any]]

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def behaviour_of(handler: Any) -> Any:
    """What a method does: a function of a message, or of messages, and a context."""
    return getattr(handler, _kind(handler))


def with_behaviour(handler: Any, behaviour: Any, *, deserializer: Callable[[bytes], Any] | None = None) -> Handler:
    """The same method, that does something else, and reads its message in another way if one is given."""
    changed: Handler = getattr(grpc, f"{_kind(handler)}_rpc_method_handler")(
        behaviour,
        request_deserializer=deserializer or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return changed


def _kind(handler: Any) -> str:
    return next(kind for kind in _KINDS if getattr(handler, kind) is not None)
