"""A YAML document that knows on which line each of its values stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from cluster.doctor.finding import Finding, Status

Path = tuple[str | int, ...]
MAX_VALUES, MAX_DEPTH = 100_000, 64
"""Of a document, with its aliases written out: those can hold each other, or as many values as no machine has room for."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file."""

    values: Any
    lines: dict[Path, int]
    """Of each key or item, counted from 1."""
    source: str = ""
    """What it is, shown when a finding is about all of it: "serveConfigV2"."""
    file: str = ""
    """The file's name, shown where there are several."""

    def get(self, *path: str | int, default: Any = None) -> Any:
        """The value there; `default` when anything on the way is missing or is no container."""
        value = self.values
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return default
        return value

    def mapping(self, *path: str | int) -> dict[str, Any]:
        """The mapping there; an empty one when there is none."""
        value = self.get(*path)
        return value if isinstance(value, dict) else {}

    def items(self, *path: str | int) -> list[Any]:
        """The list there; an empty one when there is none."""
        value = self.get(*path)
        return value if isinstance(value, list) else []

    def line(self, path: Path) -> int:
        """Of the value, or of what should hold it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def scalars(self) -> Iterator[tuple[Path, Any]]:
        """Every value that holds no others."""
        return _scalars(self.values, ())

    def find(self, status: Status, path: Path, detail: str, remedy: str) -> Finding:
        """A finding about the value at `path`."""
        place = f"{self.file} line {self.line(path)}: {shown(path) or self.source or 'the file'}"
        return Finding(place.strip(), status, detail, remedy)

    def moved(self, by: int, source: str) -> Document:
        """The same inside another file, so many lines further down."""
        return replace(self, lines={path: line + by for path, line in self.lines.items()}, source=source)


def shown(path: Path) -> str:
    """A path from its last but one name on: containers[0].image."""
    names = [index for index, step in enumerate(path) if isinstance(step, str)]
    tail = path[names[-2] if len(names) > 1 else 0 :]
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in tail).removeprefix(".")


def read_documents(text: str, file: str = "") -> list[Document]:
    """Every document of a file. Raises ValueError for what is no YAML, has a key twice, or too much in it."""
    loader = yaml.SafeLoader(text)
    try:
        documents = []
        while loader.check_node():
            node = loader.get_node()
            lines: dict[Path, int] = {}
            _collect(node, (), lines)
            documents.append(Document(loader.construct_document(node), lines, file=file))
        return documents
    except yaml.YAMLError as error:
        raise ValueError(f"this is no YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError("values lie in each other too deep to be read") from error
    finally:
        loader.dispose()


def _collect(node: Any, path: Path, lines: dict[Path, int]) -> None:
    if len(path) > MAX_DEPTH:
        raise ValueError(f"line {node.start_mark.line + 1}: values lie in each other more than {MAX_DEPTH} deep")
    if len(lines) > MAX_VALUES:
        raise ValueError(f"line {node.start_mark.line + 1}: there are more than {MAX_VALUES} values in it")
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"line {key.start_mark.line + 1}: a key is a list or a mapping, must be a name")
            place = (*path, key.value)
            if place in lines and key.value != "<<":
                raise ValueError(
                    f"line {key.start_mark.line + 1}: {key.value!r} is there twice, and only one of them counts"
                )
            lines[place] = key.start_mark.line + 1
            _collect(value, place, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _collect(item, (*path, index), lines)


def _scalars(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _scalars(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _scalars(inner, (*path, index))
    else:
        yield path, value
