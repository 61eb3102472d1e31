"""What a pool does as a whole, from the loads of its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos import control_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTotals:
    """Sums over the replicas that answer, and the worst of what is waited for."""

    num_replicas: int
    num_ready: int
    running: int
    waiting: int
    tokens_per_s: float
    queue_age_s: float
    """Of the oldest waiting request."""
    predicted_ttft_s: float
    """Of a short prompt that came now, on the replica where it would begin first."""
    graph_share: float | None
    """Part of all steps so far that replayed graphs; None before the first step."""
    cache_share: float | None
    """Part of all prompt tokens so far that were in a prefix cache; None without prompts."""

    @classmethod
    def of(cls, replicas: Sequence[control_pb2.ReplicaLoad]) -> PoolTotals:
        """Replicas that have never reported count as known, and for nothing else."""
        loads = [replica.load for replica in replicas]
        ready = [replica.load for replica in replicas if replica.state == control_pb2.REPLICA_STATE_READY]
        replays = sum(load.graph_replays for load in loads)
        queries = sum(load.prefix_cache_queries for load in loads)
        return cls(
            num_replicas=len(replicas),
            num_ready=len(ready),
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            tokens_per_s=sum(load.tokens_per_s for load in loads),
            queue_age_s=max((load.queue_age_s for load in loads if load.waiting), default=0.0),
            predicted_ttft_s=min((load.predicted_ttft_s for load in ready), default=0.0),
            graph_share=_share(replays, replays + sum(load.eager_steps for load in loads)),
            cache_share=_share(sum(load.prefix_cache_hits for load in loads), queries),
        )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
