"""The service that makes a replica fail on purpose."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from cluster import status
from cluster.config import ReplicaConfig, is_loopback, split_address
from cluster.handlers import Context
from protos import fault_pb2, fault_pb2_grpc
from worker.errors import InvalidRequest
from worker.faults import Faults, Kind, PromptFault

SERVICE = "graphpool.v1.FaultService"
MAX_DURATION_S = 3600.0
ANSWER_S = 0.02
"""For an answer to leave before the event loop stands still."""

T = TypeVar("T")
log = logging.getLogger(__name__)

PROMPT_FAULTS: dict[str, Kind] = {"nan_row": "nan", "kill": "kill", "crash_engine": "crash"}


class FaultServicer(fault_pb2_grpc.FaultServiceServicer):
    """Arms the faults of the worker in this process, and those of the process itself."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    async def Inject(  # noqa: D102, N802  # the contract is in the .proto
        self, request: fault_pb2.InjectRequest, context: Context
    ) -> fault_pb2.InjectResponse:
        async with status.on_error(context):
            self._inject(request)
            return fault_pb2.InjectResponse()

    async def Clear(  # noqa: D102, N802
        self,
        request: fault_pb2.ClearRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> fault_pb2.ClearResponse:
        self._faults.clear()
        return fault_pb2.ClearResponse()

    def _inject(self, request: fault_pb2.InjectRequest) -> None:
        kind = request.WhichOneof("fault")
        log.warning("fault injected: %s", kind)
        if kind == "exit":
            os._exit(request.exit.code)
        elif kind == "hang_engine":
            self._faults.hang(_duration_s(request.hang_engine))
        elif kind == "stall_mailbox":
            self._faults.stall_mailbox(_duration_s(request.stall_mailbox))
        elif kind == "block_event_loop":
            asyncio.get_running_loop().call_later(ANSWER_S, time.sleep, _duration_s(request.block_event_loop))
        elif kind == "slow_steps":
            _checked("slow_steps", lambda: self._faults.slow(request.slow_steps.factor, request.slow_steps.extra_s))
        elif kind == "flip_weight":
            flip = request.flip_weight
            _checked("flip_weight", lambda: self._faults.flip_weight(flip.tensor, flip.bit))
        elif kind in PROMPT_FAULTS:
            self._faults.on_prompt(_prompt_fault(kind, getattr(request, kind)))
        else:
            raise InvalidRequest("fault", "none is given")


def add_faults(server: grpc.aio.Server, config: ReplicaConfig, faults: Faults | None) -> bool:
    """Offer the service if the replica allows faults and only this machine can reach it; whether it does."""
    if faults is None or not config.enable_fault_injection:
        return False
    if not is_loopback(split_address("listen", config.listen)[0]):
        log.warning("fault injection is not offered at %s: others could reach it", config.listen)
        return False
    fault_pb2_grpc.add_FaultServiceServicer_to_server(FaultServicer(faults), server)
    log.warning("fault injection is enabled: whoever reaches this port can break this replica")
    return True


def _prompt_fault(kind: str, fault: fault_pb2.PromptFault) -> PromptFault:
    prompt, times = tuple(fault.prompt_token_ids), fault.times or None
    return _checked("prompt_token_ids", lambda: PromptFault(PROMPT_FAULTS[kind], prompt, fault.after_tokens, times))


def _duration_s(fault: fault_pb2.HangFault) -> float:
    if not 0 < fault.duration_s <= MAX_DURATION_S:
        raise InvalidRequest("duration_s", f"{fault.duration_s} is outside (0, {MAX_DURATION_S:.0f}]")
    return fault.duration_s


def _checked(field: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except ValueError as error:
        raise InvalidRequest(field, str(error)) from error
