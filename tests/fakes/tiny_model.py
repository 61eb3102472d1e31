"""A real engine around a tiny random model: everything but the size is what is served."""

from __future__ import annotations

from pathlib import Path

import torch

from worker.build import create_engine
from worker.causal_lm import NativeCausalLM
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.load_causal_lm import ServedModel
from worker.model.architecture import DecoderConfig
from worker.model.decoder import Decoder
from worker.model.files import ModelFiles
from worker.model.load import randomise

VOCAB = 211
EOS = 3


def tiny_config(**changes: object) -> DecoderConfig:
    values: dict[str, object] = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    return DecoderConfig(**(values | changes))  # type: ignore[arg-type]


def tiny_model(
    seed: int = 0, *, device: str = "cpu", dtype: torch.dtype = torch.float32, **changes: object
) -> ServedModel:
    """Weights ten times the usual spread, so that the tokens of an answer differ from each other."""
    config = tiny_config(**changes)
    decoder = Decoder(config, dtype=dtype, device=torch.device(device)).eval()
    randomise(decoder, seed)
    for name, parameter in decoder.named_parameters():
        if not name.endswith("norm"):
            parameter.mul_(10)
    return ServedModel(NativeCausalLM(decoder), (EOS,), {}, "native")


def tiny_engine(model: ServedModel, **changes: object) -> Engine:
    values: dict[str, object] = {"block_size": 4, "prefill_chunk": 16, "max_batch": 8, "kv_cache_bytes": 4 << 20}
    config = WorkerConfig(**(values | changes))  # type: ignore[arg-type]
    files = ModelFiles(name="tiny", directory=Path("/nonexistent"), config={"model_type": "llama"})
    return create_engine(config, files, model, None)
