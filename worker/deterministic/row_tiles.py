"""How the rows of a step are cut into tiles that sum in the same order. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_PADDING = 4
"""A tile is padded by at most a quarter of itself, if there is a smaller one."""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Numbers of rows that are computed at a time; each gives every row the same bits."""

    sizes: tuple[int, ...]
    """Ascending."""

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes is {self.sizes}, must be positive and ascending")

    def cut(self, rows: int) -> tuple[int, ...]:
        """Tiles that hold `rows` rows; all are full but the last."""
        tiles: list[int] = []
        while rows > 0:
            tile = self._next(rows)
            tiles.append(tile)
            rows -= tile
        return tuple(tiles)

    def _next(self, rows: int) -> int:
        smaller = [size for size in self.sizes if size <= rows]
        larger = [size for size in self.sizes if size > rows]
        if not larger or (smaller and (smaller[-1] == rows or (larger[0] - rows) * _MAX_PADDING > larger[0])):
            return smaller[-1]
        return larger[0]
