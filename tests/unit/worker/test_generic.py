"""Unmodified transformers models on the paged pool give what they give by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.fakes.tiny_model import tiny_engine
from worker.attention.decode import PagedDecodeAttention
from worker.attention.fixed_prefill import ChunkPrefillAttention, FreshPrefillAttention
from worker.attention.prefill import PagedPrefillAttention, PrefillSegment
from worker.errors import ModelLoadError, UnsupportedModel
from worker.generic.causal_lm import TransformersCausalLM
from worker.generic.load import load_transformers
from worker.graph_runner import GraphRunner
from worker.kv_cache import KVCache
from worker.load import GraphReadiness
from worker.load_causal_lm import ServedModel
from worker.model.files import ModelFiles, files_in
from worker.request import ChoiceDelta, GenerateRequest
from worker.sampling import SamplingParams

VOCAB, LENGTH, BLOCK = 97, 20, 4
TABLE = torch.tensor([3, 1, 5, 2, 7], dtype=torch.int32)
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GROUPED = BASE | {"num_key_value_heads": 2}


def rope(kind: str, **extra: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, **extra}}


SERVED = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "llama-linear": lambda: transformers.LlamaConfig(**GROUPED, **rope("linear")),
    "llama-yarn": lambda: transformers.LlamaConfig(**GROUPED, **rope("yarn", original_max_position_embeddings=32)),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8),
    "mistral-window": lambda: transformers.MistralConfig(**GROUPED, head_dim=8, sliding_window=7),
    "gemma": lambda: transformers.GemmaConfig(**BASE, num_key_value_heads=1, head_dim=16),
    "gemma3-window": lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=5),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**BASE),
}
REFUSED = {
    "softcap": lambda: transformers.Gemma2Config(**GROUPED, head_dim=8),
    "num_experts": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "dynamic": lambda: transformers.LlamaConfig(**GROUPED, **rope("dynamic")),
}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def poisoned_cache(model: TransformersCausalLM) -> KVCache:
    shape = model.shape
    cache = KVCache(
        num_layers=shape.num_layers,
        num_blocks=10,
        block_size=BLOCK,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.storage.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("family", SERVED)
@torch.inference_mode()
def test_prefill_chunks_and_decode_equal_the_model_alone(family: str) -> None:
    alone = model_of(SERVED[family]())
    ids = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1))
    expected = alone(ids[None], use_cache=False).logits[0]
    model = TransformersCausalLM(alone)
    cache, places = poisoned_cache(model), torch.arange(LENGTH)
    slots = TABLE.long()[places // BLOCK] * BLOCK + places % BLOCK
    whole = PagedPrefillAttention(cache, slots=slots[:9], segments=[PrefillSegment(0, 0, 9, TABLE[:3])])
    found = [model.compute(ids[:9], places[:9], whole, None)]
    chunk = PagedPrefillAttention(cache, slots=slots[9:15], segments=[PrefillSegment(0, 9, 6, TABLE[:4])])
    found.append(model.compute(ids[9:15], places[9:15], chunk, torch.arange(6)))
    for i in range(15, LENGTH):
        one = slice(i, i + 1)
        step = PagedDecodeAttention(cache, slots=slots[one], block_tables=TABLE[None], context_lens=places[one] + 1)
        found.append(model.compute(ids[one], places[one], step, None))
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", SERVED)
@torch.inference_mode()
def test_padded_prefill_of_fixed_shape_is_exact(family: str) -> None:
    alone = model_of(SERVED[family]())
    ids = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2))
    expected = alone(ids[None], use_cache=False).logits[0]
    model = TransformersCausalLM(alone)
    cache, places = poisoned_cache(model), torch.arange(LENGTH)
    cache.scrub([0])  # the padding block holds whatever padding rows wrote: finite
    slots = TABLE.long()[places // BLOCK] * BLOCK + places % BLOCK

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_zeros(16 - len(tensor))])

    fresh = FreshPrefillAttention(cache, slots=padded(slots[:11]))
    first = model.compute(padded(ids[:11]), padded(places[:11]), fresh, torch.arange(11))
    later = ChunkPrefillAttention(
        cache,
        slots=padded(slots[11:]),
        positions=padded(places[11:]),
        block_table=torch.cat([TABLE, torch.zeros(2, dtype=torch.int32)]),
        context_len=torch.tensor([LENGTH]),
    )
    second = model.compute(padded(ids[11:]), padded(places[11:]), later, torch.arange(LENGTH - 11))
    torch.testing.assert_close(torch.cat([first, second]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("reason", REFUSED)
def test_what_would_differ_is_refused_by_name(reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        TransformersCausalLM(model_of(REFUSED[reason]()))


@pytest.mark.parametrize("family", SERVED)
def test_every_shape_of_a_worker_is_captured_whole_and_its_answers_equal_eager(family: str) -> None:
    served = ServedModel(TransformersCausalLM(model_of(SERVED[family]())), (), {}, "transformers")
    requests = [
        GenerateRequest(
            request_id=str(length),
            prompt_token_ids=tuple((3 * i + length) % VOCAB for i in range(length)),
            sampling=SamplingParams(temperature=0, max_tokens=6),
        )
        for length in (1, 5, 9, 22)
    ]
    answers = []
    for graphs in ("off", "fake"):
        engine = tiny_engine(served, graphs=graphs, max_batch=4, capture="startup")
        while engine.prepare_next():
            pass
        for request in requests:
            engine.add(request)
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for event in engine.step():
                assert isinstance(event, ChoiceDelta), event
                found.setdefault(event.request_id, []).extend(event.token_ids)
        answers.append(found)
    assert isinstance(engine.runner, GraphRunner)
    assert engine.runner.readiness is GraphReadiness.FULL
    assert not engine.runner.dispatcher.misses
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": "wide"},
        {"num_hidden_layers": None},
        {"hidden_size": -1},
        {"vocab_size": 0.5},
    ],
)
def test_a_config_that_transformers_chokes_on_is_a_model_that_cannot_be_loaded(wrong: dict[str, Any]) -> None:
    files = ModelFiles(name="odd", directory=Path("/nonexistent"), config={"model_type": "llama", **GROUPED, **wrong})
    with pytest.raises(ModelLoadError, match="transformers cannot load odd") as caught:
        load_transformers(files, device=torch.device("cpu"), dtype=torch.float32, is_dummy=True, seed=0)
    assert "\n" not in str(caught.value)


def saved(directory: Path, config: Any) -> ModelFiles:
    """A checkpoint of random weights of this config."""
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return files_in("odd", directory)


def load(files: ModelFiles) -> TransformersCausalLM:
    return load_transformers(files, device=torch.device("cpu"), dtype=torch.float32, is_dummy=False, seed=0)


@pytest.mark.parametrize("kind", ["no-such-model", None])
def test_a_model_type_that_nobody_knows_is_refused_by_name(kind: str | None) -> None:
    files = ModelFiles(name="odd", directory=Path("/nonexistent"), config={**GROUPED, "model_type": kind})
    with pytest.raises(UnsupportedModel, match=f"knows model type {kind!r}"):
        load(files)


def test_what_the_config_tells_is_refused_before_weights_take_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = saved(tmp_path, transformers.MixtralConfig(**GROUPED, num_local_experts=4))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(UnsupportedModel, match="mixture-of-experts"):
        load(files)


def test_a_checkpoint_that_lacks_weights_is_refused_and_not_filled_at_random(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = saved(tmp_path, transformers.LlamaConfig(**GROUPED))
    config = transformers.Olmo2Config(**GROUPED)
    config.save_pretrained(tmp_path)
    capfd.readouterr()
    with pytest.raises(ModelLoadError, match=r"odd: the checkpoint lacks .*post_feedforward_layernorm"):
        load(files_in("odd", files.directory))
    assert capfd.readouterr() == ("", "")


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path) -> None:
    files = saved(tmp_path, transformers.GemmaConfig(**BASE, num_key_value_heads=1, head_dim=16))
    transformers.GemmaConfig(**BASE | {"intermediate_size": 48}, num_key_value_heads=1, head_dim=16).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelLoadError, match=r"holds in another shape model.layers.0.mlp"):
        load(files_in("odd", files.directory))


def test_weights_that_the_model_has_no_place_for_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = saved(tmp_path, transformers.GemmaConfig(**BASE, num_key_value_heads=1, head_dim=16))
    tensors = load_file(tmp_path / "model.safetensors") | {"vision.weight": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(files)
    assert "odd: the model has no place for vision.weight" in caplog.text
