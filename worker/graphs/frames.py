"""Which line of the user's code is running: the innermost frame outside torch and outside this package."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType, TracebackType

import torch

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_TORCH_LAYERS = str(Path(torch.__file__).parent / "nn" / "modules")
_PLUMBING = str(Path(torch.__file__).parent / "nn" / "modules" / "module.py")


def calling_line() -> str:
    """`file:line in function` of the code that is running now; a torch layer if there is nothing else in the region."""
    layer = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if _is_layer(filename) and not layer:
            layer = _describe(filename, frame.f_lineno, frame.f_code.co_name)
        if layer and filename.startswith(_HERE):
            return layer
        if not filename.startswith((_TORCH, _HERE)):
            return _describe(filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return layer


def raising_line(traceback: TracebackType | None) -> tuple[str, str]:
    """(`file:line in function`, source text) of the innermost frame of an error outside torch and this package."""
    found, text = "", ""
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not filename.startswith((_TORCH, _HERE)):
            found = _describe(filename, traceback.tb_lineno, traceback.tb_frame.f_code.co_name)
            text = linecache.getline(filename, traceback.tb_lineno).strip()
        traceback = traceback.tb_next
    return found, text


def files_of(traceback: TracebackType | None) -> tuple[str, ...]:
    """The file of every frame of an error, outermost first."""
    files = []
    while traceback is not None:
        files.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    return tuple(files)


def _is_layer(filename: str) -> bool:
    return filename.startswith(_TORCH_LAYERS) and filename != _PLUMBING


def _describe(filename: str, line: int, function: str) -> str:
    path = Path(filename)
    return f"{path.parent.name}/{path.name}:{line} in {function}"
