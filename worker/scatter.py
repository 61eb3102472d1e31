"""Changes of single numbers of a staged tensor, on a device that has moved its neighbours on by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.staging import Staging


class Scatter:
    """Puts values at places of `staging.device[name]`, and of the host array it is filled from; leaves the rest alone.

    Uses memory allocated once, for `capacity` changes a launch: a step that serves allocates nothing.
    """

    def __init__(self, staging: Staging, name: str, *, capacity: int) -> None:
        target = staging.device[name]
        spec = {"places": ((capacity,), torch.int64), "values": ((capacity,), target.dtype)}
        self._capacity = capacity
        self._name = name
        self._staging = staging
        self._target = target.view(-1)
        self._changes = Staging(spec, target.device)

    def write(self, places: Sequence[int], values: Sequence[int]) -> None:
        """Queue the changes on the current stream. `places` count the tensor's elements in order, each at most once.

        Costs one copy and one small launch for every `capacity` changes.
        """
        self._staging.writable()[self._name].reshape(-1)[places] = values
        for first in range(0, len(places), self._capacity):
            self._launch(places[first : first + self._capacity], values[first : first + self._capacity])

    def _launch(self, places: Sequence[int], values: Sequence[int]) -> None:
        count = len(places)
        host = self._changes.writable()
        host["places"][:count], host["values"][:count] = places, values
        self._changes.upload()
        device = self._changes.device
        self._target.scatter_(0, device["places"][:count], device["values"][:count])
