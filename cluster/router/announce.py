"""The service replicas announce themselves to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cluster import status
from cluster.handlers import Context
from cluster.router.membership import Membership
from protos import replica_pb2, replica_pb2_grpc

SERVICE = "graphpool.v1.MembershipService"


class MembershipServicer(replica_pb2_grpc.MembershipServiceServicer):
    """Hands announcements to the membership.

    A replica that is not attached learns from the answer what this router refuses, and tells it to the others before it is
    ready for any of them; over the stream, this router might be the last to come.
    """

    def __init__(
        self, membership: Membership, *, router: str, period_s: float, verdicts: Callable[[], Mapping[bytes, float]]
    ) -> None:
        self._membership = membership
        self._router = router
        self._period_s = period_s
        self._verdicts = verdicts

    async def Announce(  # noqa: D102, N802  # the contract is in the .proto
        self, request: replica_pb2.AnnounceRequest, context: Context
    ) -> replica_pb2.AnnounceResponse:
        async with status.on_error(context):
            self._membership.announce(request)
            verdicts = {} if self._membership.is_attached(request.replica) else self._verdicts()
            poisons = (replica_pb2.PoisonVerdict(fingerprint=key, ttl_s=ttl_s) for key, ttl_s in verdicts.items())
            return replica_pb2.AnnounceResponse(router=self._router, next_s=self._period_s, poisons=poisons)
