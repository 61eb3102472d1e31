"""Bytes that are no message, or too many of them, are the client's fault and end as such."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from cluster import status
from cluster.config import MESSAGE_BYTES
from cluster.errors import MalformedMessage, MessageTooLarge
from cluster.handlers import Behaviour, Context, Handler, behaviour_of, with_behaviour

Refused = MalformedMessage | MessageTooLarge
Deserializer = Callable[[bytes], Message]


class RefuseMalformed(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stub only
    """Answers INVALID_ARGUMENT to unary requests whose bytes do not parse.

    Those over MESSAGE_BYTES get RESOURCE_EXHAUSTED, as gRPC itself gives it: a server may have to let larger messages
    through for its own kind.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's handler with its parser and its behaviour replaced."""
        handler = await continuation(handler_call_details)
        if handler is None or not _can_wrap(handler):
            return handler
        return _tolerant(handler)


def _can_wrap(handler: Handler) -> bool:
    behaviour = handler.unary_unary or handler.unary_stream
    return inspect.iscoroutinefunction(behaviour) and handler.request_deserializer is not None


def _tolerant(handler: Any) -> Handler:
    deserializer = _lenient(handler.request_deserializer)
    return with_behaviour(handler, _checked(behaviour_of(handler)), deserializer=deserializer)


def _lenient(deserialize: Deserializer) -> Callable[[bytes], Message | Refused]:
    def parse(raw: bytes) -> Message | Refused:
        if len(raw) > MESSAGE_BYTES:
            return MessageTooLarge(len(raw), MESSAGE_BYTES)
        try:
            return deserialize(raw)
        except DecodeError:
            message_class = getattr(deserialize, "__self__", None)
            return MalformedMessage(message_class.__name__ if isinstance(message_class, type) else "message")

    return parse


def _checked(behaviour: Behaviour) -> Behaviour:
    async def answer(request: Message | Refused, context: Context) -> Any:
        if isinstance(request, MalformedMessage | MessageTooLarge):
            await status.abort(context, request)
        return await behaviour(request, context)

    return answer
