"""The service routers attach to."""

from __future__ import annotations

from collections.abc import Callable

from cluster import status
from cluster.config import ReplicaConfig
from cluster.handlers import Context
from cluster.replica.attached import AttachedRouters
from cluster.replica.engine_backend import EngineBackend
from cluster.replica.session import AttachSession
from protos import replica_pb2, replica_pb2_grpc

SERVICE = "graphpool.v1.ReplicaService"


class AttachServicer(replica_pb2_grpc.ReplicaServiceServicer):
    """A session for each router."""

    def __init__(
        self,
        backend: EngineBackend,
        config: ReplicaConfig,
        hello: Callable[[], replica_pb2.ReplicaHello],
        *,
        on_answered: Callable[[str], None],
    ) -> None:
        """`on_answered` is told the name of a router that has had a whole answer."""
        self.routers = AttachedRouters()
        self._backend = backend
        self._config = config
        self._hello = hello
        self._sessions: set[AttachSession] = set()
        self._on_answered = on_answered

    def hang_up(self) -> None:
        """End every session once it has sent what there is."""
        for session in self._sessions:
            session.hang_up()

    async def Attach(  # type: ignore[override]  # noqa: D102, N802  # the contract is in the .proto
        self,
        request_iterator: object,  # noqa: ARG002  # the session reads from the context
        context: Context,
    ) -> None:
        session = AttachSession(
            self._backend, self._config, self._hello(), routers=self.routers, on_answered=self._on_answered
        )
        self._sessions.add(session)
        try:
            async with status.on_error(context):
                await session.run(context)
        finally:
            self._sessions.discard(session)
