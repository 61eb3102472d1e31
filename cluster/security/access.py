"""Which roles may call which method."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.security.caller import Role

LOOK = (Role.USER, Role.OPERATOR, Role.MONITOR, Role.ROUTER, Role.REPLICA)
GENERATE = (Role.USER, Role.OPERATOR, Role.ROUTER)
STEER = (Role.OPERATOR, Role.ROUTER)

_SERVICES: Mapping[str, tuple[Role, ...]] = {
    "graphpool.v1.GenerationService": GENERATE,
    "graphpool.v1.ReplicaService": (Role.ROUTER,),
    "graphpool.v1.MembershipService": (Role.REPLICA,),
    "grpc.health.v1.Health": LOOK,
    "grpc.reflection.v1.ServerReflection": LOOK,
    "grpc.reflection.v1alpha.ServerReflection": LOOK,
}
_METHODS: Mapping[str, tuple[Role, ...]] = {
    "graphpool.v1.ControlService/GetServerInfo": LOOK,
    "graphpool.v1.ControlService/GetModelInfo": LOOK,
    "graphpool.v1.ControlService/GetLoads": LOOK,
    "graphpool.v1.ControlService/Abort": GENERATE,
}


def roles_for(path: str) -> tuple[Role, ...]:
    """For the path of a call, "/service/method"; what is not listed here only an operator may try."""
    name = path.removeprefix("/")
    service = name.partition("/")[0]
    return _METHODS.get(name) or _SERVICES.get(service) or STEER
