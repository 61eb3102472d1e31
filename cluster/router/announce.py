"""The service replicas announce themselves to."""

from __future__ import annotations

from cluster import status
from cluster.handlers import Context
from cluster.router.membership import Membership
from protos import replica_pb2, replica_pb2_grpc

SERVICE = "graphpool.v1.MembershipService"


class MembershipServicer(replica_pb2_grpc.MembershipServiceServicer):
    """Hands announcements to the membership."""

    def __init__(self, membership: Membership, *, router: str, period_s: float) -> None:
        self._membership = membership
        self._router = router
        self._period_s = period_s

    async def Announce(  # noqa: D102, N802  # the contract is in the .proto
        self, request: replica_pb2.AnnounceRequest, context: Context
    ) -> replica_pb2.AnnounceResponse:
        async with status.on_error(context):
            self._membership.announce(request)
            return replica_pb2.AnnounceResponse(router=self._router, next_s=self._period_s)
