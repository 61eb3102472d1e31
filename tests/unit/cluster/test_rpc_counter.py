"""What a call that is cancelled at the server counts as: a client that left, or a deadline that passed."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from cluster.metrics.rpcs import RpcCounter

DETAILS = Mock(method="/graphpool.v1.GenerationService/Generate")


@pytest.mark.parametrize(
    ("given_s", "left_s", "code"),
    [
        (None, None, "CANCELLED"),
        (10.0, 6.0, "CANCELLED"),
        (10.0, 0.0, "DEADLINE_EXCEEDED"),
        (10.0, 0.12, "DEADLINE_EXCEEDED"),
        (0.2, 0.15, "CANCELLED"),
        (0.2, 0.04, "DEADLINE_EXCEEDED"),
    ],
)
async def test_a_client_notices_its_deadline_a_little_before_the_server(
    given_s: float | None, left_s: float | None, code: str
) -> None:
    async def cancelled(_request: Any, _context: Any) -> None:
        raise asyncio.CancelledError

    async def handler_of(_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(cancelled)

    subject = RpcCounter("graphpool.v1.GenerationService")
    handler: Any = await subject.intercept_service(handler_of, DETAILS)
    context = Mock()
    context.time_remaining.side_effect = [given_s, left_s]
    with pytest.raises(asyncio.CancelledError):
        await handler.unary_unary(None, context)
    (sample,) = [one for one in subject.family().samples if one.name.endswith("rpcs_total")]
    assert (sample.labels, sample.value) == ({"method": "Generate", "code": code}, 1)
