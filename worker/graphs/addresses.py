"""Remembers where every captured tensor lies, and says which have moved."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from worker.graphs.errors import AddressChanged
from worker.graphs.region import TensorTable


class AddressBook:
    """Addresses of the tensors in some live tables, as they are now."""

    def __init__(self, tables: Iterable[tuple[str, TensorTable]]) -> None:
        self._entries = [
            (table, name, prefix, tensor.data_ptr())
            for prefix, table in tables
            for name, tensor in table.items()
            if tensor is not None
        ]

    def __len__(self) -> int:
        return len(self._entries)

    def moved(self) -> list[str]:
        """Names of the tensors that were replaced, re-allocated or removed since."""
        return [f"{prefix}{name}" for table, name, prefix, address in self._entries if _moved(table.get(name), address)]

    def verify(self, key: str) -> None:
        """Raise AddressChanged naming the tensors that have moved."""
        moved = self.moved()
        if moved:
            shown = ", ".join(moved[:5]) + (f" and {len(moved) - 5} more" if len(moved) > 5 else "")
            raise AddressChanged(f"{shown} moved since the capture", key=key)


def _moved(tensor: Tensor | None, address: int) -> bool:
    return tensor is None or tensor.data_ptr() != address
