"""The decision as a policy of Ray Serve's autoscaling."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from cluster.autoscale.config import ScalingConfig
from cluster.autoscale.decide import Memory, decide
from cluster.autoscale.demand import Demand
from cluster.autoscale.watch import RouterWatch
from cluster.config import ReplicaConfig, from_mapping
from cluster.security.config import SecurityConfig

log = logging.getLogger(__name__)

SERVE_DELAY_S = 0.1
"""What Serve adds on its own account to each decision: patience is this policy's business."""


class RouterLoadPolicy:
    """Called by Serve's controller on its event loop, several times a second; never waits.

    A controller that starts anew makes a new one: the past is then taken to have needed what there is. While no router
    answers, nothing changes.
    """

    def __init__(self, scaling: dict[str, Any], replica: dict[str, Any], model: str) -> None:
        self.config = from_mapping(ScalingConfig, scaling)
        config = replica_config(replica)
        self._model = model
        self._memory: Memory | None = None
        self._decided_s = float("-inf")
        self._desired: int | None = None
        self._watch = RouterWatch(
            config.routers,
            period_s=self.config.decide_every_s / 2,
            keepalive=config.keepalive,
            security=config.security,
        )

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """See Ray's AutoscalingContext: (replicas wanted, state that Serve keeps)."""
        now_s, current = time.monotonic(), int(context.target_num_replicas)
        reports = self._watch.reports
        if not reports:
            return current, {}
        if self._desired is None or now_s - self._decided_s >= self.config.decide_every_s:
            demand = Demand.of(reports, self._model)
            desired, self._memory = decide(demand, current, self._memory, now_s, self.config)
            if desired != current:
                log.warning("%d replicas are wanted, %d are asked for: %s", desired, current, demand)
            self._desired, self._decided_s = desired, now_s
        return self._desired, {}


def replica_config(values: dict[str, Any]) -> ReplicaConfig:
    """The part of a replica's configuration that reaching its routers takes, from plain values."""
    security = from_mapping(SecurityConfig, values.get("security") or {})
    return ReplicaConfig(routers=tuple(values["routers"]), security=security)


def autoscaling_options(scaling: ScalingConfig, replica: ReplicaConfig, model: str) -> dict[str, Any]:
    """For a deployment: this policy, and Serve's own delays out of its way.

    No number to begin with: Serve would go back to it with every change of the config. A new pool begins with the least
    there may be, one that runs with what it has.
    """
    kwargs = {
        "scaling": asdict(scaling),
        "replica": {"routers": list(replica.routers), "security": asdict(replica.security)},
        "model": model,
    }
    return {
        "min_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
        "upscale_delay_s": SERVE_DELAY_S,
        "downscale_delay_s": SERVE_DELAY_S,
        "downscale_to_zero_delay_s": SERVE_DELAY_S,
        "metrics_interval_s": SERVE_DELAY_S,
        "look_back_period_s": 10 * SERVE_DELAY_S,
        "policy": {"policy_function": "cluster.autoscale.policy:RouterLoadPolicy", "policy_kwargs": kwargs},
    }
