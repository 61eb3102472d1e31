"""Builds a transformers model from safetensors, or from its config alone."""

from __future__ import annotations

import torch

from worker.errors import ModelLoadError, WorkerError
from worker.generic.causal_lm import TransformersCausalLM
from worker.model.files import ModelFiles


def load_transformers(
    files: ModelFiles, *, device: torch.device, dtype: torch.dtype, is_dummy: bool, seed: int
) -> TransformersCausalLM:
    """Raises ModelLoadError when transformers does not know the model, UnsupportedModel when we cannot serve it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if not is_dummy:
            model = AutoModelForCausalLM.from_pretrained(
                files.directory, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
            )
            return TransformersCausalLM(model.to(device).eval().requires_grad_(False))
        config = AutoConfig.for_model(**{"model_type": files.config["model_type"], **files.config})
        torch.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except WorkerError:
        raise
    except Exception as error:  # every model class checks its config in its own way
        raise ModelLoadError(f"transformers cannot load {files.name}: {' '.join(str(error).split())}") from error
    return TransformersCausalLM(model.to(device).eval().requires_grad_(False))
