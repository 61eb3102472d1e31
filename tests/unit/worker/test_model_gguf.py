from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.gguf_files import TEMPLATE, vocabulary, write_gguf
from worker.errors import ModelLoadError, UnsupportedModel
from worker.model import gguf_convert
from worker.model.gguf_config import config_from_gguf
from worker.model.gguf_convert import convert, tensor_name
from worker.model.load import load_model
from worker.model.progress import silent
from worker.model.source import resolve_model
from worker.text.processor import TextProcessor

VOCAB = 262


def converted(
    tmp_path: Path, model_type: str, changes: dict[str, Any] | None = None, **metadata: Any
) -> tuple[Any, Path]:
    """A model, and the directory its GGUF file was converted into."""
    model = write_checkpoint(tmp_path / "reference", model_type, vocab_size=VOCAB, **(changes or {}))
    directory = tmp_path / "converted"
    directory.mkdir()
    convert(write_gguf(tmp_path / "tiny.gguf", model, **metadata), directory, silent)
    return model, directory


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen2", {"head_dim": 8}),
        ("qwen3", {}),
    ],
)
def test_every_tensor_survives_the_way_through_gguf(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    model, directory = converted(tmp_path, model_type, changes)

    weights = load_file(directory / "model.safetensors")

    expected = model.state_dict()
    if changes.get("tie_word_embeddings"):
        del expected["lm_head.weight"]
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name].float(), tensor, atol=0, rtol=0, msg=name)


def test_a_gguf_file_is_resolved_loaded_and_remembered(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "reference", "qwen3", vocab_size=VOCAB)
    source = write_gguf(tmp_path / "Tiny Model.gguf", model)
    reports: list[str] = []

    files = resolve_model(str(source), cache_dir=tmp_path / "cache", progress=lambda what, *_: reports.append(what))
    reports_then = set(reports)
    reports.clear()
    again = resolve_model(str(source), cache_dir=tmp_path / "cache", progress=lambda what, *_: reports.append(what))

    assert reports_then == {
        *("checking the model file", "starting the converter", "converting the weights", "converting the tokenizer")
    }
    assert not reports
    assert again == files
    assert files.directory.name.startswith("tiny-model-")
    loaded = load_model(files, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(loaded.decoder.embedding, model.model.embed_tokens.weight)
    assert loaded.eos_token_ids == (2,)
    text = TextProcessor.from_files(files)
    assert text.decode(text.encode("hello 12 日本")) == "hello 12 日本"
    assert text.render_chat([("user", "hi")])[0] == 1


def test_what_cannot_be_converted_is_named_by_the_child_process(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "reference", "llama", vocab_size=VOCAB)
    source = write_gguf(tmp_path / "tiny.gguf", model, tokenizer__ggml__pre="never-heard-of")

    with pytest.raises(UnsupportedModel, match="pre-tokenizer 'never-heard-of'"):
        resolve_model(str(source), cache_dir=tmp_path / "cache")

    assert not list((tmp_path / "cache" / "models").glob("tiny*"))


def test_a_truncated_file_is_one_clear_sentence(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "reference", "llama", vocab_size=VOCAB)
    source = write_gguf(tmp_path / "tiny.gguf", model)
    source.write_bytes(source.read_bytes()[:5000])

    with pytest.raises(ModelLoadError, match=r"tiny\.gguf"):
        resolve_model(str(source), cache_dir=tmp_path / "cache")


def test_tensors_are_kept_in_the_smallest_dtype_that_holds_them_exactly(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "reference", "llama", vocab_size=VOCAB)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.ones(32))
        model.model.layers[0].input_layernorm.weight.fill_(1 + 2**-10)
        model.model.layers[1].input_layernorm.weight.fill_(1 + 2**-20)
    directory = tmp_path / "converted"
    directory.mkdir()

    convert(write_gguf(tmp_path / "tiny.gguf", model), directory, silent)

    weights = load_file(directory / "model.safetensors")
    assert weights["model.norm.weight"].dtype is torch.bfloat16
    assert weights["model.layers.0.input_layernorm.weight"].dtype is torch.float16
    assert weights["model.layers.1.input_layernorm.weight"].dtype is torch.float32


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_convert, "SHARD_BYTES", 20_000)
    model, directory = converted(tmp_path, "llama")

    files = resolve_model(str(directory))

    assert len(files.safetensors) > 2
    loaded = load_model(files, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(loaded.decoder.lm_head, model.lm_head.weight)


def test_the_config_says_what_the_metadata_says(tmp_path: Path) -> None:
    _, directory = converted(tmp_path, "llama")
    files = resolve_model(str(directory))

    assert files.config["rms_norm_eps"] == 1e-5
    assert files.config["head_dim"] == 16
    assert files.config["tie_word_embeddings"] is False
    assert files.generation_config == {"eos_token_id": 2}
    assert (directory / "chat_template.jinja").read_text() == TEMPLATE


def metadata(**changes: Any) -> dict[str, Any]:
    values = {
        "general.architecture": "llama",
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.block_count": 2,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.context_length": 131_072,
        "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "llama.rope.freq_base": 500_000.0,
        "llama.rope.dimension_count": 64,
        "tokenizer.ggml.tokens": vocabulary(VOCAB)[0],
    }
    return values | {key.replace("__", "."): value for key, value in changes.items()}


def llama3_divisors(factor: float) -> list[float]:
    """What llama.cpp's converter stores in rope_freqs.weight."""
    divisors = []
    for pair in range(32):
        wavelength = 2 * math.pi * 500_000.0 ** (2 * pair / 64)
        smooth = (8192 / wavelength - 1) / 3
        divisors.append(1 / ((1 - smooth) / factor + smooth) if 0 < smooth < 1 else (1.0 if smooth >= 1 else factor))
    return divisors


def test_llama_3_scaling_is_recovered_from_the_divisors_a_file_stores() -> None:
    config = config_from_gguf(metadata(), (), llama3_divisors(32.0))

    assert config["rope_parameters"] == {
        "rope_theta": 500_000.0,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("divisors", [[8.0] * 32, [1.0, 8.0], [*llama3_divisors(8.0)[:-1], 9.0]])
def test_other_divisors_are_refused(divisors: list[float]) -> None:
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        config_from_gguf(metadata(), (), divisors)


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}, {"rope_type": "linear"}),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 4.0,
                "llama__rope__scaling__original_context_length": 8192,
            },
            {"rope_type": "yarn", "original_max_position_embeddings": 8192},
        ),
    ],
)
def test_rope_scaling_is_not_dropped(changes: dict[str, Any], parameters: dict[str, Any]) -> None:
    found = config_from_gguf(metadata(**changes), ())["rope_parameters"]

    assert found == {"rope_theta": 500_000.0, "factor": 4.0, **parameters}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general__architecture": "gemma3"}, "gemma3"),
        ({"llama__expert_count": 8}, "expert_count"),
        ({"llama__attention__head_count_kv": [2, 4]}, "differs by layer"),
        ({"llama__rope__dimension_count": 32, "llama__attention__key_length": 64}, "dimension_count"),
        ({"llama__attention__value_length": 32}, "value_length"),
        ({"llama__rope__scaling__type": "longrope"}, "longrope"),
        ({"llama__rope__scaling__type": "linear"}, "rope.scaling.factor"),
        ({"llama__logit_scale": 0.5}, "logit_scale"),
    ],
)
def test_metadata_that_would_change_the_output_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        config_from_gguf(metadata(**changes), ())


def test_metadata_that_is_switched_off_is_accepted() -> None:
    assert config_from_gguf(metadata(llama__expert_count=0), ())["num_hidden_layers"] == 2


def test_all_tokens_that_end_an_answer_are_kept() -> None:
    config = config_from_gguf(metadata(tokenizer__ggml__eos_token_id=2, tokenizer__ggml__eot_token_id=7), ())

    assert config["eos_token_id"] == [2, 7]


def test_tensors_without_a_place_in_a_decoder_are_refused_by_name() -> None:
    assert tensor_name("blk.11.attn_q.bias") == "model.layers.11.self_attn.q_proj.bias"
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_gate_exps\.weight"):
        tensor_name("blk.0.ffn_gate_exps.weight")


@pytest.mark.parametrize(
    ("pre", "changes", "text", "pieces"),
    [
        ("smollm", {}, "a 12", 4),
        ("gpt-2", {}, "a 12", 3),
        ("qwen2", {}, "e\u0301", 2),
        ("gpt-2", {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 1}, "ab", 3),
        ("llama-bpe", {"tokenizer__ggml__bos_token_id": 1}, "ab", 3),
        ("llama-bpe", {"tokenizer__ggml__bos_token_id": 1, "tokenizer__ggml__add_bos_token": False}, "ab", 2),
    ],
)
def test_the_tokenizer_keeps_the_rules_of_its_kind(
    tmp_path: Path, pre: str, changes: dict[str, Any], text: str, pieces: int
) -> None:
    _, directory = converted(tmp_path, "llama", tokenizer__ggml__pre=pre, **changes)

    assert len(TextProcessor.from_files(resolve_model(str(directory))).encode(text)) == pieces
