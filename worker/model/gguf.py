"""GGUF files: converted once, by a child process, into the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from worker.errors import ModelLoadError, UnsupportedModel
from worker.model.cache import ConvertedModels, sha256_of
from worker.model.progress import Progress

_MAGIC = b"GGUF"


def converted_gguf(name: str, source: Path, models: ConvertedModels, progress: Progress) -> Path:
    """The directory of safetensors, config and tokenizer made from a GGUF file; made now if it was not before.

    Raises ModelLoadError when the file is no GGUF, UnsupportedModel naming what in it cannot be served.
    """
    with source.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ModelLoadError(f"{source} is not a GGUF file")
    sha256 = models.known_sha256(source) or sha256_of(source, progress)
    found = models.find(name, sha256)
    return found or models.create(name, source, sha256, lambda directory: convert_in_child(source, directory, progress))


def convert_in_child(source: Path, directory: Path, progress: Progress) -> None:
    """Fill `directory` from `source` in a process of its own, and wait for it."""
    progress("starting the converter", 0, 0)  # which imports for seconds before it tells anything
    command = [sys.executable, "-m", "worker.model.gguf_convert", str(source.resolve()), str(directory)]
    with subprocess.Popen(  # noqa: S603 - our own interpreter and module
        command, env=_child_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            problem, last_line = _follow(child, progress)
            status = child.wait()
        except BaseException:
            child.kill()
            raise
    if problem is not None:
        raise problem
    if status != 0:
        raise ModelLoadError(f"{source.name}: the converter ended with status {status}: {last_line}")


def _follow(child: subprocess.Popen[str], progress: Progress) -> tuple[ModelLoadError | None, str]:
    """Pass the child's progress on; return the error it reported, if any, and the last line libraries printed."""
    problem: ModelLoadError | None = None
    last_line = "no message"
    for line in child.stdout or ():
        try:
            message = json.loads(line)
        except ValueError:
            last_line = line.strip() or last_line
            continue
        if "error" in message:
            problem = (UnsupportedModel if message["error"] == "unsupported" else ModelLoadError)(message["message"])
        else:
            progress(message["what"], message["done"], message["total"])
    return problem, last_line


def _child_environment() -> dict[str, str]:
    """Ours, with this very package importable, no network and no accelerator."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",
    }
