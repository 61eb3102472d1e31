"""What is captured: a function without arguments that reads static tensors and returns tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

TensorTable = Mapping[str, Tensor | None]
"""A live table of tensors by name, such as a module's own parameters: looked up again to see whether one was replaced."""

DrawInputs = Callable[[torch.Generator, bool], int]
"""Fill the static inputs with random valid values; with True, poison the padding rows. The valid rows, which come first,
depend on the generator only. Returns how many rows are valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRegion:
    """One function to record, and every tensor that it touches by address."""

    run: Callable[[], Any]
    """Reads static tensors, launches work on the current stream only, returns a tree of tensors."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Static buffers that are filled before a replay."""
    constants: Sequence[tuple[str, TensorTable]] = ()
    """(prefix, table) of weights and the like: read, never replaced."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that the region changes and whose values matter: saved before warm-up and put back after it."""
    scratch: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that the region changes and whose values do not matter between replays: output buffers, padding blocks."""
    reset: Callable[[], object] | None = None
    """Puts back, after warm-up, whatever else the region has changed: a cache, a counter."""
    generators: tuple[torch.Generator, ...] = ()
    """Generators the region draws from; a replay advances them as a run does. Without any, randomness is refused."""
    draw: DrawInputs | None = None
    """How to make inputs for a self-check; None = normal floats, integers as they are, every row valid."""

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every declared tensor, by a name for people."""
        for prefix, table in self.tables():
            for name, tensor in table.items():
                if tensor is not None:
                    yield f"{prefix}{name}", tensor

    def tables(self) -> Iterator[tuple[str, TensorTable]]:
        """(prefix, table) of everything declared."""
        yield "input ", self.inputs
        yield "state ", self.state
        yield "scratch ", self.scratch
        yield from self.constants

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """What runs inside leaves no trace in `state`, and `reset` is called after it."""
        saved = {name: tensor.detach().clone() for name, tensor in self.state.items()}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self.state.items():
                    tensor.copy_(saved[name])
            if self.reset is not None:
                self.reset()


def module_tables(module: nn.Module) -> tuple[tuple[str, TensorTable], ...]:
    """The live parameter and buffer tables of a module and all its submodules."""
    tables: list[tuple[str, TensorTable]] = []
    for path, submodule in module.named_modules():
        prefix = f"{path}." if path else ""
        tables += [(prefix, table) for table in (submodule._parameters, submodule._buffers) if table]
    return tuple(tables)


def storage_of(tensor: Tensor) -> int:
    """Identity of the memory behind a tensor; views of one storage share it."""
    return int(tensor.untyped_storage()._cdata)
