"""Counts where the host waits for a device, to prove that a step path does not."""

from __future__ import annotations

import contextlib
import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch._ops import HigherOrderOperator, OpOverload

from worker.graphs.frames import calling_line
from worker.graphs.operator_mode import OperatorMode
from worker.graphs.operators import bound_arguments, has_data_dependent_shape, host_copy, is_host_read


class SyncKind(enum.Enum):
    """What the host waited for."""

    DEVICE = "the whole device"
    STREAM = "one stream"
    EVENT = "one event"
    VALUE = "a value, shape or blocking copy"


@dataclass(frozen=True, slots=True)
class SyncCall:
    """One wait: what for, through which call, from which line."""

    kind: SyncKind
    call: str
    where: str


OnSync = Callable[[SyncCall], None]

_PATCHED: tuple[tuple[SyncKind, Any, str], ...] = (
    (SyncKind.DEVICE, torch.cuda, "synchronize"),
    (SyncKind.DEVICE, torch.accelerator, "synchronize"),
    (SyncKind.DEVICE, torch.cuda, "empty_cache"),
    (SyncKind.STREAM, torch.cuda.Stream, "synchronize"),
    (SyncKind.EVENT, torch.cuda.Event, "synchronize"),
)


class SyncPatches:
    """While entered, reports the waits that Python code asks for by name, in every thread, before they happen."""

    def __init__(self, on_sync: OnSync) -> None:
        self._on_sync = on_sync
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        for kind, owner, name in _PATCHED:
            original = getattr(owner, name)
            self._originals.append((owner, name, original))
            setattr(owner, name, self._reporting(kind, f"{owner.__name__}.{name}", original))
        return self

    def __exit__(self, *_: object) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def _reporting(self, kind: SyncKind, call: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def reporting(*args: Any, **kwargs: Any) -> Any:
            self._on_sync(SyncCall(kind, call, calling_line()))
            return original(*args, **kwargs)

        return reporting


class SyncCounter:
    """Counts, while entered, every wait of this thread, and waits by name (`torch.cuda.synchronize`, ...) of all threads.

    Waits inside foreign libraries are not seen; `torch.cuda.set_sync_debug_mode` complements it on a GPU.
    """

    def __init__(self) -> None:
        self.calls: list[SyncCall] = []
        self._watching = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._watching.enter_context(SyncPatches(self.calls.append))
        self._watching.enter_context(_ValueReads(self.calls.append))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watching.__exit__(kind, error, traceback)

    def count(self, *kinds: SyncKind) -> int:
        """Waits of these kinds so far; of all kinds when none is named."""
        return sum(self.by_kind[kind] for kind in (kinds or tuple(SyncKind)))

    @property
    def by_kind(self) -> Counter[SyncKind]:
        """Waits so far, by kind."""
        return Counter(call.kind for call in self.calls)


class _ValueReads(OperatorMode):
    """Sees the operators of this thread that make the host wait for a value."""

    def __init__(self, on_sync: OnSync) -> None:
        super().__init__()
        self._on_sync = on_sync

    def on_operator(self, func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, then report it if the host had to wait."""
        result = func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return result
        arguments = bound_arguments(func, args, kwargs)
        waits = is_host_read(func) or has_data_dependent_shape(func, arguments)
        if waits or host_copy(func, arguments, result) is not None:
            self._on_sync(SyncCall(SyncKind.VALUE, str(func), calling_line()))
        return result
