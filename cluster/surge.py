"""Whether a replica's successor finds a place beside it. Needs a connection to Ray, and Serve where it runs already."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

SURGE_PERCENT = 20
"""Replicas beyond the number while they are replaced: the share that Serve replaces at a time, and at least one."""


def has_room(num_replicas: int, options: Mapping[str, Any], deployment_name: str) -> bool:
    """Whether one more than `num_replicas` would find a place now. With several pools, none of them counts as there."""
    import ray

    if not ray.is_initialized():
        return False
    from ray._private.state import available_resources_per_node

    missing = max(num_replicas - _num_running(deployment_name), 0)
    return places(available_resources_per_node().values(), options) > missing


def places(free: Iterable[Mapping[str, float]], options: Mapping[str, Any]) -> float:
    """Replicas that fit into what nodes have left; infinity for such that take nothing."""
    needs = {name: float(options[key]) for name, key in (("CPU", "num_cpus"), ("GPU", "num_gpus")) if options[key]}
    if not needs:
        return math.inf
    return sum(min(int(node.get(name, 0.0) / need + 1e-6) for name, need in needs.items()) for node in free)


def _num_running(deployment_name: str) -> int:
    """Replicas of the one pool there is. Which of several is about to be changed is not known here: none is counted."""
    from ray import serve

    pools = [
        application.deployments[deployment_name].replica_states
        for application in serve.status().applications.values()
        if deployment_name in application.deployments
    ]
    return pools[0].get("RUNNING", 0) if len(pools) == 1 else 0
