"""The control service, over any backend."""

from __future__ import annotations

from cluster import status
from cluster.backend import Backend
from cluster.handlers import Context
from cluster.security.tenancy import Tenancy
from protos import control_pb2, control_pb2_grpc
from worker.errors import InvalidRequest

SERVICE = "graphpool.v1.ControlService"
MAX_GRACE_S = 24 * 3600.0


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Looks at a backend and steers it."""

    def __init__(self, backend: Backend, tenancy: Tenancy | None = None) -> None:
        self._backend = backend
        self._tenancy = tenancy

    async def GetServerInfo(  # noqa: D102, N802  # the contract is in the .proto
        self,
        request: control_pb2.GetServerInfoRequest,  # noqa: ARG002
        context: Context,
    ) -> control_pb2.ServerInfo:
        async with status.on_error(context):
            return self._backend.server_info()

    async def GetModelInfo(  # noqa: D102, N802
        self, request: control_pb2.GetModelInfoRequest, context: Context
    ) -> control_pb2.ModelInfo:
        async with status.on_error(context):
            return await self._backend.model_info(request.model)

    async def GetLoads(  # noqa: D102, N802
        self,
        request: control_pb2.GetLoadsRequest,  # noqa: ARG002
        context: Context,
    ) -> control_pb2.GetLoadsResponse:
        async with status.on_error(context):
            return control_pb2.GetLoadsResponse(replicas=self._backend.loads(), held=self._backend.held())

    async def Drain(  # noqa: D102, N802
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainResponse:
        async with status.on_error(context):
            if not 0 <= request.grace_s <= MAX_GRACE_S:
                raise InvalidRequest("grace_s", f"{request.grace_s} is outside [0, {MAX_GRACE_S:.0f}]")
            await self._backend.drain(request.replica, grace_s=request.grace_s)
            return control_pb2.DrainResponse()

    async def Abort(  # noqa: D102, N802
        self, request: control_pb2.AbortRequest, context: Context
    ) -> control_pb2.AbortResponse:
        async with status.on_error(context):
            # Another tenant's request is as good as none: that it exists is nobody's business.
            may_abort = self._tenancy is None or self._tenancy.may_abort(request.request_id)
            return control_pb2.AbortResponse(found=may_abort and self._backend.abort(request.request_id))
