from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.dense_attend import DenseAttend
from worker.model.load import LoadedModel, load_model
from worker.model.source import resolve_model

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 8}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": YARN}),
    ("mistral", {}),
    ("qwen2", {"head_dim": 8}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "rope_parameters": YARN}),
]


def load(directory: Path, **changes: Any) -> LoadedModel:
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU} | changes
    return load_model(resolve_model(str(directory)), **options)


@torch.inference_mode()
def ours(model: LoadedModel, token_ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits of every token: the prompt at once, the rest one by one."""
    attend = DenseAttend(model.config.num_layers)
    positions = torch.arange(len(token_ids))
    steps = [slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, len(token_ids)))]
    hidden = [model.decoder(token_ids[step], positions[step], attend) for step in steps]
    return model.decoder.logits(torch.cat(hidden))


@pytest.mark.parametrize(("model_type", "changes"), FAMILIES)
def test_logits_equal_those_of_transformers_in_prefill_and_decode(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    reference = write_checkpoint(tmp_path, model_type, **changes)
    token_ids = torch.randint(0, 97, (300,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(input_ids=token_ids[None]).logits[0]

    logits = ours(load(tmp_path), token_ids, prompt=280)

    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_two_sequences_side_by_side_give_what_each_gives_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    model = load(tmp_path)
    first, second = torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10, 11])

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = [slice(0, 4), slice(4, 7)]
        return torch.cat([DenseAttend(2)(layer, q[part], k[part], v[part]) for part in parts])

    with torch.inference_mode():
        together = model.decoder(torch.cat((first, second)), torch.tensor([0, 1, 2, 3, 0, 1, 2]), attend)
        alone = [model.decoder(ids, torch.arange(len(ids)), DenseAttend(2)) for ids in (first, second)]

    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_single_precision_and_in_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    write_checkpoint(tmp_path, "llama")
    token_ids = torch.arange(40)
    exact = ours(load(tmp_path), token_ids, prompt=30)

    logits = ours(load(tmp_path, dtype=dtype), token_ids, prompt=30)

    assert logits.dtype is dtype
    assert (logits.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_projections_that_share_an_input_are_one_matrix(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    decoder = load(tmp_path).decoder

    matmuls: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.name() in ("aten::mm", "aten::addmm", "aten::linear"):
                matmuls.append(func.name())
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Count():  # type: ignore[no-untyped-call]
        decoder(torch.tensor([1]), torch.tensor([0]), DenseAttend(2))

    assert len(matmuls) == 4 * decoder.config.num_layers


def test_a_loaded_decoder_has_no_gradients_and_is_in_evaluation_mode(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    decoder = load(tmp_path).decoder

    assert not decoder.training
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
