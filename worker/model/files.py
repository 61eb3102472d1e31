"""The files of one model on disk, and which of them may be read at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.errors import ModelLoadError, UnsafeCheckpoint

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Weights in these formats run code while they are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """One model on disk: safetensors, config and tokenizer."""

    name: str
    """As it was asked for."""
    directory: Path
    config: Mapping[str, Any]
    """`config.json`."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """`generation_config.json`, empty where there is none."""
    safetensors: tuple[Path, ...] = ()
    """Empty when the weights are to be made up (`load_format="dummy"`)."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be served, not only token ids."""
        return (self.directory / TOKENIZER).is_file()


def files_in(name: str, directory: Path, *, weights: bool = True) -> ModelFiles:
    """The model in a directory; `weights=False` looks for its config (and tokenizer) alone.

    Raises UnsafeCheckpoint for pickled weights and for a model that brings its own code, ModelLoadError for a directory
    that holds no model.
    """
    config = read_json(directory / CONFIG)
    refuse_own_code(CONFIG, config)
    if (directory / "tokenizer_config.json").is_file():
        refuse_own_code("tokenizer_config.json", read_json(directory / "tokenizer_config.json"))
    has_defaults = (directory / GENERATION_CONFIG).is_file()
    return ModelFiles(
        name=name,
        directory=directory,
        config=config,
        generation_config=read_json(directory / GENERATION_CONFIG) if has_defaults else {},
        safetensors=_safetensors_in(directory) if weights else (),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelLoadError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return content


def refuse_own_code(file: str, content: Mapping[str, Any]) -> None:
    """Raise UnsafeCheckpoint when a config asks for Python code that comes with the checkpoint."""
    if content.get("auto_map"):
        raise UnsafeCheckpoint(f"{file} asks to run code of its own (auto_map), and such code is never run")


def _safetensors_in(directory: Path) -> tuple[Path, ...]:
    index = directory / WEIGHTS_INDEX
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if not names:
            raise ModelLoadError(f"{index} lists no files")
        return tuple(_shard(directory, name) for name in names)
    if (directory / WEIGHTS).is_file():
        return (directory / WEIGHTS,)
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return (others[0],)
    if others:
        raise ModelLoadError(f"{directory} has {len(others)} safetensors files but no {WEIGHTS_INDEX}")
    raise _without_safetensors(directory)


def _shard(directory: Path, name: object) -> Path:
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise UnsafeCheckpoint(f"{WEIGHTS_INDEX} names {name!r}, which is not a safetensors file of this directory")
    if not (directory / name).is_file():
        raise ModelLoadError(f"{directory} has no {name}, which {WEIGHTS_INDEX} lists")
    return directory / name


def _without_safetensors(directory: Path) -> ModelLoadError:
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return UnsafeCheckpoint(
            f"{directory} holds {pickles[0]} and no safetensors: pickled weights can run code and are never opened; "
            "convert them to safetensors first (`save_pretrained` of transformers writes it)"
        )
    ggufs = sorted(path.name for path in directory.glob("*.gguf"))
    if ggufs:
        return ModelLoadError(
            f"{directory} holds GGUF files: name the one to serve, for example {directory / ggufs[0]}"
        )
    return ModelLoadError(f"{directory} has no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX}")
