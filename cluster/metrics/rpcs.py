"""Counts calls by method and by how they ended."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from prometheus_client.core import Metric

from cluster.handlers import Behaviour, Context, Handler, behaviour_of, with_behaviour
from cluster.metrics.families import counter

ON_THE_WAY_S = 0.05
"""A deadline is told as the time that is left, and counted from when that arrives."""
_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


class RpcCounter(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stub only
    """Counts the calls to one service. Methods that do not exist are not counted: a client could make up any number."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"
        self._counts: Counter[tuple[str, str]] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's handler, counted if it is one of the service's."""
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None or not path.startswith(self._prefix):
            return handler
        return self._counted(handler, path.removeprefix(self._prefix))

    def family(self) -> Metric:
        """For a scrape."""
        help_text = "Calls of clients that have ended, by method and status code."
        return counter("rpcs", help_text, self._counts.items(), ("method", "code"))

    def _counted(self, handler: Any, method: str) -> Handler:
        behaviour = behaviour_of(handler)
        assert inspect.iscoroutinefunction(behaviour), f"{method} is not a coroutine function"
        return with_behaviour(handler, self._watched(behaviour, method))

    def _watched(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def answer(request: Any, context: Context) -> Any:
            code = grpc.StatusCode.UNKNOWN.name
            given_s = context.time_remaining()
            try:
                response = await behaviour(request, context)
                code = grpc.StatusCode.OK.name
                return response
            except grpc.aio.AbortError:
                code = _NAMES.get(_number(context.code()), code)
                raise
            except asyncio.CancelledError:
                is_late = _is_late(given_s, context.time_remaining())
                code = (grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED).name
                raise
            finally:
                self._counts[method, code] += 1

        return answer


def _is_late(given_s: float | None, left_s: float | None) -> bool:
    """Whether it is the deadline that ended a call. A client notices first: gRPC rounds what it tells up by a hundredth."""
    return given_s is not None and left_s is not None and left_s <= 0.01 * given_s + ON_THE_WAY_S


def _number(code: Any) -> int:
    return int(code.value[0]) if isinstance(code, grpc.StatusCode) else int(code)
