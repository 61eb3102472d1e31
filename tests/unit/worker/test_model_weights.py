from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.checkpoints import config_dict, edit_weights, write_checkpoint
from tests.fakes.dense_attend import DenseAttend
from worker.errors import ModelLoadError, UnsupportedModel
from worker.model.architecture import DecoderConfig
from worker.model.decoder import Decoder
from worker.model.files import files_in
from worker.model.weights import checkpoint_targets, list_tensors, load_weights

CPU = torch.device("cpu")
HEAD, EMBEDDING = "lm_head__weight", "model__embed_tokens__weight"


def empty_decoder(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = DecoderConfig.from_dict(json.loads((directory / "config.json").read_text()))
    decoder = Decoder(config, dtype=dtype, device=CPU)
    for parameter in decoder.parameters():
        parameter.fill_(torch.nan)
    return decoder


def load(directory: Path, **options: Any) -> Decoder:
    decoder = empty_decoder(directory, **options)
    load_weights(decoder, files_in("tiny", directory).safetensors)
    return decoder


@torch.inference_mode()
def logits(decoder: Decoder) -> torch.Tensor:
    ids = torch.arange(20)
    return decoder.logits(decoder(ids, ids, DenseAttend(2)))


@torch.inference_mode()
def reference_logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.arange(20)[None]).logits
    return logits[0]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_every_parameter_comes_from_the_checkpoint(tmp_path: Path, model_type: str) -> None:
    write_checkpoint(tmp_path, model_type)

    assert all(parameter.isfinite().all() for parameter in load(tmp_path).parameters())


def test_a_tied_checkpoint_without_a_head_uses_the_embedding(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")

    decoder = load(tmp_path)

    assert decoder.lm_head is decoder.embedding
    torch.testing.assert_close(logits(decoder), reference_logits(reference), atol=1e-4, rtol=0)


def test_a_tied_checkpoint_may_store_the_same_matrix_as_head(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    edit_weights(tmp_path, **{HEAD: reference.model.embed_tokens.weight.detach().clone()})

    torch.testing.assert_close(logits(load(tmp_path)), reference_logits(reference), atol=1e-4, rtol=0)


def test_a_tied_checkpoint_may_store_the_matrix_as_head_alone(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    weight = reference.model.embed_tokens.weight.detach().clone()
    edit_weights(tmp_path, **{HEAD: weight, EMBEDDING: None})

    torch.testing.assert_close(logits(load(tmp_path)), reference_logits(reference), atol=1e-4, rtol=0)


def test_a_tied_checkpoint_with_another_head_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    edit_weights(tmp_path, **{HEAD: torch.randn(97, 32)})

    with pytest.raises(ModelLoadError, match=r"lm_head\.weight differs .*tie_word_embeddings"):
        load(tmp_path)


def test_an_untied_checkpoint_uses_its_head(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, "llama")
    decoder = load(tmp_path)

    assert not torch.equal(decoder.lm_head, decoder.embedding)
    torch.testing.assert_close(logits(decoder), reference_logits(reference), atol=1e-4, rtol=0)


def test_an_untied_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    edit_weights(tmp_path, **{HEAD: None})

    with pytest.raises(ModelLoadError, match=r"lacks lm_head\.weight \[97, 32\]"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model__layers__1__mlp__up_proj__weight": None}, r"lacks model\.layers\.1\.mlp\.up_proj\.weight \[48, 32\]"),
        (
            {"model__layers__0__self_attn__q_proj__bias": torch.zeros(64)},
            r"does not account for: model\.layers\.0\.self_attn\.q_proj\.bias \[64\]",
        ),
        (
            {"model__norm__weight": torch.zeros(31)},
            r"model\.norm\.weight has shape \[31\], the config means \[32\]",
        ),
        (
            {"model__layers__0__self_attn__k_proj__weight": torch.zeros(64, 32)},
            r"k_proj\.weight has shape \[64, 32\], the config means \[32, 32\]",
        ),
    ],
)
def test_what_does_not_fit_the_config_is_refused_by_name_and_shape(
    tmp_path: Path, edit: dict[str, Any], message: str
) -> None:
    write_checkpoint(tmp_path, "llama")
    edit_weights(tmp_path, **edit)

    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_nothing_is_read_when_something_is_missing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    edit_weights(tmp_path, model__norm__weight=None)
    decoder = empty_decoder(tmp_path)

    with pytest.raises(ModelLoadError):
        load_weights(decoder, files_in("tiny", tmp_path).safetensors)

    assert decoder.embedding.isnan().all()


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    edit_weights(tmp_path, model__norm__weight=torch.zeros(32, dtype=torch.int8))

    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is stored as I8"):
        load(tmp_path)


def test_frequencies_that_old_checkpoints_store_are_left_aside(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    edit_weights(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))

    assert load(tmp_path).final_norm.isfinite().all()


def test_a_sharded_checkpoint_gives_the_same_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen2")
    whole = load(tmp_path)
    tensors = sorted(load_file(tmp_path / "model.safetensors").items())
    (tmp_path / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in range(3):
        name = f"model-{number}.safetensors"
        save_file(dict(tensors[number::3]), tmp_path / name)
        weight_map |= {tensor: name for tensor, _ in tensors[number::3]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    sharded = load(tmp_path)

    for (name, left), right in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert torch.equal(left, right), name


def test_weights_are_converted_to_the_dtype_asked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")

    exact, narrow = load(tmp_path), load(tmp_path, dtype=torch.bfloat16)

    for left, right in zip(narrow.parameters(), exact.parameters(), strict=True):
        assert torch.equal(left, right.bfloat16())


def test_progress_ends_at_the_number_of_bytes_it_announced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    decoder, seen = empty_decoder(tmp_path), []

    load_weights(decoder, files_in("tiny", tmp_path).safetensors, lambda *report: seen.append(report))

    names, done, totals = zip(*seen, strict=True)
    assert set(names) == {"loading the weights"}
    assert list(done) == sorted(done)
    assert done[-1] == totals[-1] == sum(parameter.nbytes for parameter in decoder.parameters())


def test_each_parameter_is_covered_exactly_once() -> None:
    decoder = Decoder(
        DecoderConfig.from_dict(config_dict("llama", attention_bias=True, mlp_bias=True)),
        dtype=torch.float32,
        device=CPU,
    )
    for parameter in decoder.parameters():
        parameter.zero_()

    for target in checkpoint_targets(decoder).values():
        target.add_(1)

    assert all((parameter == 1).all() for parameter in decoder.parameters())


def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x80\x04not a checkpoint")

    with pytest.raises(ModelLoadError, match="cannot be read"):
        list_tensors([path])
