"""Loads a model for serving: the native decoder, or transformers' own code for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.causal_lm import CausalLM, NativeCausalLM
from worker.config import WorkerConfig
from worker.config_numbers import check_config_numbers
from worker.errors import UnsupportedModel
from worker.model.architecture import SUPPORTED_MODEL_TYPES
from worker.model.files import ModelFiles
from worker.model.load import eos_token_ids, generation_defaults, load_model
from worker.model.progress import Progress


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model ready to run, and what its authors recommend."""

    model: CausalLM
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]
    implementation: str
    """"native" or "transformers"."""


def load_causal_lm(
    config: WorkerConfig,
    files: ModelFiles,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> ServedModel:
    """Raises ModelLoadError. With `model_impl="auto"`, what the native decoder refuses by name runs on transformers."""
    check_config_numbers(files.config)
    if config.model_impl == "transformers":
        return _generic(config, files, device, dtype)
    if config.model_impl == "auto" and files.config.get("model_type") not in SUPPORTED_MODEL_TYPES:
        return _generic(config, files, device, dtype)
    try:
        native = load_model(
            files, dtype=dtype, device=device, load_format=config.load_format, seed=config.seed, progress=progress
        )
    except UnsupportedModel:
        if config.model_impl == "native":
            raise
        return _generic(config, files, device, dtype)
    model = NativeCausalLM(native.decoder)
    return ServedModel(model, native.eos_token_ids, native.generation_defaults, "native")


def _generic(config: WorkerConfig, files: ModelFiles, device: torch.device, dtype: torch.dtype) -> ServedModel:
    from worker.generic.load import load_transformers  # transformers takes seconds to import

    model = load_transformers(
        files, device=device, dtype=dtype, is_dummy=config.load_format == "dummy", seed=config.seed
    )
    return ServedModel(model, eos_token_ids(files), generation_defaults(files.generation_config), "transformers")
