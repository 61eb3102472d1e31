"""From the name of a model to its files: the embedded model, a directory, a GGUF file or a hub repository."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, get_args

from worker.errors import ModelLoadError
from worker.model.cache import ConvertedModels, default_cache_dir
from worker.model.embedded import EMBEDDED_MODEL, embedded_model
from worker.model.files import CONFIG, ModelFiles, files_in, read_json, refuse_own_code
from worker.model.gguf import converted_gguf
from worker.model.progress import Progress, silent

__all__ = ["LoadFormat", "ModelFiles", "resolve_model"]

LoadFormat = Literal["auto", "dummy"]
"""auto: the checkpoint's weights. dummy: random weights of the config's shapes; no weights are looked for."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_IGNORED = ("*/*", "consolidated*")


def resolve_model(
    name: str, *, load_format: str = "auto", cache_dir: Path | None = None, progress: Progress | None = None
) -> ModelFiles:
    """The files of a model, made or fetched first when they are not on this machine yet.

    `name` is `smollm2-135m`, a directory, a `.gguf` file, a hub id such as `Qwen/Qwen2.5-1.5B-Instruct`, or, with the
    load format "dummy", a `config.json` alone. `cache_dir` replaces `~/.cache/graphpool`. Raises ModelLoadError.
    """
    if load_format not in get_args(LoadFormat):
        raise ValueError(f"load_format must be one of {', '.join(get_args(LoadFormat))}, not {load_format!r}")
    weights = load_format != "dummy"
    models = ConvertedModels(cache_dir=cache_dir or default_cache_dir())
    progress = progress or silent
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises for users that are not there
    if not name:
        raise ModelLoadError("there is no model without a name")
    if name == EMBEDDED_MODEL:
        return files_in(name, embedded_model(models, progress), weights=weights)
    if path.is_dir():
        return files_in(name, path, weights=weights)
    if path.suffix == ".gguf" and path.is_file():
        return files_in(name, converted_gguf(path.stem, path, models, progress), weights=weights)
    if path.suffix == ".json" and path.is_file():
        return _config_alone(name, path, weights=weights)
    if path.is_file():
        raise ModelLoadError(f"{name} is neither a directory nor a .gguf file")
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return files_in(name, _hub_snapshot(name, weights=weights), weights=weights)
    raise ModelLoadError(f"there is no {name}")


def _config_alone(name: str, path: Path, *, weights: bool) -> ModelFiles:
    if weights:
        raise ModelLoadError(f"{name} is a config without weights: it can only be served with load_format=dummy")
    config = read_json(path)
    refuse_own_code(CONFIG, config)
    return ModelFiles(name=name, directory=path.parent, config=config)


def _hub_snapshot(name: str, *, weights: bool) -> Path:
    """A hub repository's JSON, template and safetensors files, from the hub's own cache or the network."""
    from huggingface_hub import snapshot_download

    wanted = [pattern for pattern in _HUB_FILES if weights or pattern != "*.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=list(_HUB_IGNORED)))
    except Exception as error:  # the errors of the hub's client and its HTTP library share no base
        raise ModelLoadError(
            f"{name} is neither a local directory nor {EMBEDDED_MODEL}, and the model hub does not give it: "
            f"{_hub_problem(error)}"
        ) from error


def _hub_problem(error: Exception) -> str:
    """What a person can do about it; the client's own sentences run over many lines."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "its licence must be accepted on the hub first, and HF_TOKEN must say by whom"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such model, or HF_TOKEN may not see it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "the hub cannot be reached, and nothing of it lies in the hub's cache (HF_HOME)"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
