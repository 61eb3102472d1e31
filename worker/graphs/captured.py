"""One captured graph with everything it needs to stay valid: buffers, weights, addresses, protected outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.graphs.addresses import AddressBook
from worker.graphs.backend import RecordedGraph
from worker.graphs.errors import GraphReleased, InputMismatch
from worker.graphs.key import GraphKey
from worker.graphs.lanes import InputLane, copy_each
from worker.graphs.lease import OutputEpoch, ReplayLease
from worker.graphs.module_call import difference
from worker.graphs.region import CaptureRegion


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """What one capture took."""

    num_bytes: int
    """Device memory in all: new graph memory and the executable."""
    pool_bytes: int
    """The part of it that the graph pool grew by."""
    capture_s: float
    instantiate_s: float
    """The part of `capture_s` after the region had run."""
    num_nodes: int | None
    """Operations in the graph, where known."""


class CapturedGraph:
    """Fill the static inputs, replay, read the outputs through the lease. Not thread-safe.

    Holds strong references to the region and to every tensor seen in it, so that no captured address is ever freed.
    """

    def __init__(
        self,
        key: GraphKey,
        region: CaptureRegion,
        recorded: RecordedGraph,
        epoch: OutputEpoch,
        *,
        cost: CaptureCost,
        kept_alive: Sequence[Tensor] = (),
        keeps_outputs: bool = False,
    ) -> None:
        self.key = key
        self.region = region
        self.cost = cost
        self._recorded: RecordedGraph | None = recorded
        self._outputs = recorded.outputs
        self._epoch = epoch
        self._kept_alive = (*(tensor for _, tensor in region.named_tensors()), *kept_alive)
        self._keeps_outputs = keeps_outputs
        self._addresses = AddressBook(region.tables())

    @property
    def is_released(self) -> bool:
        """Whether the graph is gone."""
        return self._recorded is None

    def load(self, values: Mapping[str, Tensor], lane: InputLane | None = None) -> None:
        """Copy `values` into the static inputs: on the current stream, or as `lane` does it.

        Every input must be given, in its captured shape and dtype, on the graph's device or the host; otherwise raises
        InputMismatch and copies nothing. A pinned host tensor may be changed again only after the copy has run.
        """
        self.check_inputs(values)
        pairs = [(static, values[name]) for name, static in self.region.inputs.items()]
        if lane is None:
            copy_each(pairs)
        else:
            lane.copy(pairs)

    def check_inputs(self, values: Mapping[str, Tensor]) -> None:
        """Raise InputMismatch, with what was captured and what was given, unless `values` fit the static inputs."""
        inputs = self.region.inputs
        if values.keys() != inputs.keys():
            missing, extra = sorted(inputs.keys() - values.keys()), sorted(values.keys() - inputs.keys())
            detail = f"inputs missing: {missing or 'none'}, unexpected: {extra or 'none'}"
            raise InputMismatch(detail, key=str(self.key))
        for name, static in inputs.items():
            problem = difference(static, values[name])
            if problem:
                raise InputMismatch(f"input {name} {problem}", key=str(self.key))

    def replay(self) -> ReplayLease:
        """Launch the graph on the current stream, after the pool's earlier replays and their readers."""
        if self._recorded is None:
            raise GraphReleased("replayed after its release", key=str(self.key))
        self._epoch.advance(str(self.key))
        self._recorded.replay()
        return ReplayLease(str(self.key), self._epoch, self._outputs)

    @property
    def kept_outputs(self) -> Any:
        """The output tensors themselves, for a graph captured with `keep_outputs`.

        Replays of graphs captured later leave them alone; replays of this graph, and of graphs captured before it,
        overwrite them. Only a caller that replays in capture order may use this instead of a lease.
        """
        assert self._keeps_outputs, "captured without keep_outputs: read through the lease"
        return self._outputs

    def verify_addresses(self) -> None:
        """Raise AddressChanged if a declared tensor was replaced or re-allocated since the capture."""
        self._addresses.verify(str(self.key))

    def release(self) -> None:
        """Destroy the executable and give up the pool's memory and all references. Must not be running."""
        if self._recorded is not None:
            self._recorded.reset()
        self._recorded = None
        self._outputs = None
        self._kept_alive = ()
