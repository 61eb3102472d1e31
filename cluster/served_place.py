"""What a replica that Serve has placed is called, and where it is found. Serve's rank alone does not say.

Serve keeps ranks without gaps: one that has run for a while may get another rank, and a new one the rank that an older one
was named after. Routers keep one replica of a name, and a port has one listener, so both are taken where they are free.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from dataclasses import replace

import grpc

from cluster.config import ReplicaConfig, join_address, split_address
from cluster.replica.router_list import RouterList
from cluster.security.config import ROUTER_NAME
from cluster.transport import open_link_channel
from protos import control_pb2, control_pb2_grpc

NODE_ADDRESS = "node-address"
"""As `advertise`: the address of the node that the replica is placed on."""
ASK_TIMEOUT_S = 2.0
"""A router that has not answered by then is not asked for names: the rank decides."""
MAX_PORTS_TRIED = 64
LIVE = (control_pb2.REPLICA_STATE_STARTING, control_pb2.REPLICA_STATE_READY)

log = logging.getLogger(__name__)


async def placed(config: ReplicaConfig) -> ReplicaConfig:
    """The same config for this very place: the node's address, a name that a replacement takes over, a metrics port."""
    import ray
    from ray import serve

    context = serve.get_replica_context()
    rank = context.rank
    return replace(
        config,
        name=config.name or free_name(context.app_name, rank.rank, await names_in_use(config)),
        advertise=ray.util.get_node_ip_address() if config.advertise == NODE_ADDRESS else config.advertise,
        metrics_listen=free_metrics_address(config.metrics_listen, rank.local_rank),
    )


def free_name(app_name: str, rank: int, in_use: Iterable[str]) -> str:
    """The rank's name; if a running replica has that, one that is free and that no other starting replica would take.

    The n that run have the lowest n ranks, however they are called, so the names that they do not use of the lowest n are
    as many as those that they use beyond.
    """
    start = place_name(app_name, 0)[:-1]
    ends = (name.removeprefix(start) for name in in_use if name.startswith(start))
    taken = sorted(int(end) for end in ends if end.isdecimal())
    if rank not in taken:
        return place_name(app_name, rank)
    spare = [number for number in range(len(taken)) if number not in taken]
    beyond = [number for number in taken if number >= len(taken)]
    # A rank below: Serve has not closed the gaps yet.
    return place_name(app_name, spare[beyond.index(rank)] if rank in beyond else taken[-1] + 1 + rank)


async def names_in_use(config: ReplicaConfig) -> set[str]:
    """Names of the replicas that run, as far as routers answer at once.

    One that drains, has failed, or whose connection broke and is tried again for a while, is succeeded.
    """
    routers = await RouterList(config.routers).look()
    found = await asyncio.gather(*(_names_at(router, config) for router in routers))
    return set().union(*found)


async def _names_at(router: str, config: ReplicaConfig) -> set[str]:
    async with open_link_channel(router, config.keepalive, config.security, peer=ROUTER_NAME) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        try:
            report = await stub.GetLoads(control_pb2.GetLoadsRequest(), timeout=ASK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("router %s does not say which names are in use: %s", router, error.code())
            return set()
    return {one.replica for one in report.replicas if one.state in LIVE and one.breaker == control_pb2.BREAKER_CLOSED}


def free_metrics_address(first: str, local_rank: int) -> str:
    """The replicas of one node take the ports from `first` on, their own rank's if it is free."""
    wanted = metrics_address(first, local_rank)
    if not first or split_address("metrics_listen", first)[1] == 0:
        return wanted
    candidates = (wanted, *(metrics_address(first, number) for number in range(MAX_PORTS_TRIED)))
    return next((address for address in candidates if _is_free(address)), wanted)


def metrics_address(first: str, local_rank: int) -> str:
    """The port of one rank; "" and port 0 stand for themselves."""
    if not first:
        return ""
    host, port = split_address("metrics_listen", first)
    return join_address(host, port + local_rank if port else 0)


def place_name(app_name: str, rank: int) -> str:
    """Of the rank-th replica of an application. Routers keep one replica of a name, whatever application it is of."""
    return f"replica-{rank}" if app_name == "graphpool" else f"{app_name}-{rank}"


def _is_free(address: str) -> bool:
    host, port = split_address("metrics_listen", address)
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except (OSError, OverflowError):
        return False
