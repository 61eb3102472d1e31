"""What is asked of a pool and what it can give, from what its routers report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protos import control_pb2

READY = control_pb2.REPLICA_STATE_READY


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One model's replicas and requests at one time."""

    num_ready: int = 0
    max_rows: int = 0
    """Sequences that one replica can run at once; 0 while none has reported."""
    running: int = 0
    waiting: int = 0
    """In the replicas' queues."""
    held: int = 0
    """In the routers, for want of a replica."""
    queue_age_s: float = 0.0
    """Of the oldest that waits anywhere."""
    predicted_ttft_s: float = 0.0
    """Of a short prompt that came now, where it would begin first."""
    step_s: float = 0.0
    """Mean of a decode step over the replicas that decode; 0 = none does."""

    @property
    def sequences(self) -> int:
        """All that runs or wants to."""
        return self.running + self.waiting + self.held

    @classmethod
    def of(cls, reports: Iterable[control_pb2.GetLoadsResponse], model: str = "") -> Demand:
        """From several routers, each of which may know every replica; "" = of the one model that is served."""
        reports = list(reports)
        loads = _loads_of(reports, model)
        held = [one for report in reports for one in report.held if not model or one.model in ("", model)]
        steps = [load.step_ms / 1e3 for load in loads if load.running and load.step_ms]
        return cls(
            num_ready=len(loads),
            max_rows=max((load.max_rows for load in loads), default=0),
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            held=sum(one.requests for one in held),
            queue_age_s=max(
                (*(load.queue_age_s for load in loads if load.waiting), *(one.oldest_s for one in held)), default=0.0
            ),
            predicted_ttft_s=min((load.predicted_ttft_s for load in loads), default=0.0),
            step_s=sum(steps) / len(steps) if steps else 0.0,
        )


def _loads_of(reports: Sequence[control_pb2.GetLoadsResponse], model: str) -> list[control_pb2.Load]:
    """Of each ready replica once, however many routers know it."""
    found: dict[str, control_pb2.Load] = {}
    for report in reports:
        for replica in report.replicas:
            if replica.state == READY and (not model or replica.model == model):
                found[replica.incarnation] = replica.load
    return list(found.values())
