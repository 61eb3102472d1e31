"""Graphs of parts of a model, such as attention or MLP, with the rest eager: for models that cannot be captured whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from worker.graphs.bisect import record_calls
from worker.graphs.captured import CapturedGraph
from worker.graphs.errors import InputMismatch
from worker.graphs.key import GraphKey
from worker.graphs.module_call import ModuleCall
from worker.graphs.pool import GraphPool
from worker.graphs.recorder import WARMUP_STEPS, GraphRecorder
from worker.graphs.region import storage_of

Chooses = Callable[[str, nn.Module], bool]
"""Whether to capture the submodule of this name. Parts of a chosen submodule are captured with it."""


@dataclass(frozen=True, slots=True)
class _PartGraph:
    """A submodule captured at one shape; `position` counts captures."""

    call: ModuleCall
    captured: CapturedGraph
    position: int


class _Part:
    """One chosen submodule: its own forward, and its graphs by shape."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        self.graphs: dict[Any, _PartGraph] = {}
        self._had_own_forward = "forward" in vars(module)

    def install(self, forward: Callable[..., Any]) -> None:
        """Call `forward` instead of the module's."""
        self.module.forward = forward

    def restore(self) -> None:
        """Call the module's own forward again."""
        if self._had_own_forward:
            self.module.forward = self.forward
        else:
            del self.module.forward

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_PartGraph, dict[str, Tensor]] | None:
        """The graph for a call and the tensors to load, or None."""
        call = ModuleCall(args, kwargs)
        graph = self.graphs.get(call.signature)
        if graph is None or (torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors.values())):
            return None
        try:
            return graph, graph.call.match(args, kwargs)
        except InputMismatch:
            return None


class PartialGraphs:
    """Replaces the forward of chosen submodules by graph replays wherever the call has a captured shape.

    A forward pass replays its graphs in the order of capture, which keeps each output intact until the next pass, without
    copies; a call out of order, or of another shape, runs eagerly and is counted. Tensors that leave the model are copied
    if a graph owns them. Inference only, one pass at a time, used by one thread.
    """

    def __init__(self, module: nn.Module, chooses: Chooses, *, pool: GraphPool) -> None:
        self.graph_calls: Counter[str] = Counter()
        """Replays by submodule."""
        self.eager_calls: Counter[str] = Counter()
        """Calls of chosen submodules that ran eagerly."""
        self._module = module
        self._recorder = GraphRecorder(pool)
        self._parts = {name: _Part(name, module.get_submodule(name)) for name in _outermost(module, chooses)}
        if not self._parts:
            raise ValueError("no submodule was chosen")
        self._owned: set[int] = set()
        self._num_captured = 0
        self._next = 0
        self._is_recording = False
        self._hooks = [module.register_forward_pre_hook(self._start_pass), module.register_forward_hook(self._end_pass)]
        for part in self._parts.values():
            part.install(self._forward_of(part))

    @property
    def names(self) -> tuple[str, ...]:
        """The submodules that are captured."""
        return tuple(self._parts)

    def capture(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_warmup_steps: int = WARMUP_STEPS,
        reset: Callable[[], object] | None = None,
    ) -> None:
        """Capture every chosen submodule for the shapes that this call of the whole model gives it.

        Call again for more shapes, the largest first. `reset` puts back what the submodules change.
        """
        self._is_recording = True
        try:
            calls = record_calls(self._module, args, kwargs or {})
        finally:
            self._is_recording = False
        for name, call in calls.items():
            part = self._parts.get(name)
            if part is not None and call.signature not in part.graphs:
                self._capture_part(part, call, num_warmup_steps, reset)

    def remove(self) -> None:
        """Give the model its own forwards back and release the graphs."""
        for hook in self._hooks:
            hook.remove()
        for part in self._parts.values():
            part.restore()
            for graph in part.graphs.values():
                self._recorder.release(graph.captured)
            part.graphs.clear()

    def _capture_part(
        self, part: _Part, call: ModuleCall, num_warmup_steps: int, reset: Callable[[], object] | None
    ) -> None:
        position = self._num_captured
        key = GraphKey("decode", 0, 1, f"{part.name}.{position}")
        region = call.region(part.module, forward=part.forward, reset=reset)
        self._recorder.warm_up(key, region, num_steps=num_warmup_steps)
        captured = self._recorder.capture(key, region, keep_outputs=True)
        part.graphs[call.signature] = _PartGraph(call, captured, position)
        self._num_captured += 1
        leaves = pytree.tree_leaves(captured.kept_outputs)
        self._owned |= {storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}

    def _forward_of(self, part: _Part) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._is_recording:
                return part.forward(*args, **kwargs)
            found = part.find(args, kwargs)
            if found is None or found[0].position < self._next:
                self.eager_calls[part.name] += 1
                return part.forward(*args, **kwargs)
            graph, values = found
            self._next = graph.position + 1
            self.graph_calls[part.name] += 1
            graph.captured.load(values)
            graph.captured.replay()
            return graph.captured.kept_outputs

        return forward

    def _start_pass(self, *_: Any) -> None:
        self._next = 0

    def _end_pass(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        return pytree.tree_map_only(
            Tensor, lambda tensor: tensor.clone() if storage_of(tensor) in self._owned else tensor, output
        )


def _outermost(module: nn.Module, chooses: Chooses) -> list[str]:
    """Names of the chosen submodules that are not inside another chosen one."""
    chosen: list[str] = []
    for name, submodule in module.named_modules():
        if name and not any(name.startswith(f"{outer}.") for outer in chosen) and chooses(name, submodule):
            chosen.append(name)
    return chosen
