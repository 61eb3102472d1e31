"""Planned memory against a worker that is really built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import config_dict, write_checkpoint, write_config
from worker.config import WorkerConfig
from worker.errors import ModelLoadError, UnsupportedModel
from worker.graphs.key import GraphKey
from worker.memory_measure import measure_memory
from worker.memory_plan import CONTEXT_BYTES, MemoryPlan, plan_memory

GIB = 1 << 30
SMALL: dict[str, Any] = {
    "max_batch": 4,
    "prefill_chunk": 16,
    "block_size": 4,
    "kv_cache_bytes": 1 << 20,
    "dtype": "float32",
}


def plan(model: Path, gpu_bytes: int = 8 * GIB, **changes: Any) -> MemoryPlan:
    return plan_memory(WorkerConfig(model=str(model), **(SMALL | changes)), gpu_bytes)


NEOX = config_dict("gpt_neox", num_key_value_heads=4, head_dim=8)


@pytest.mark.parametrize("config", [config_dict("llama"), config_dict("qwen3"), NEOX], ids=lambda it: it["model_type"])
def test_weights_and_kv_pool_are_those_of_the_built_worker(config: dict[str, Any], tmp_path: Path) -> None:
    model = write_config(tmp_path, config)
    planned = plan(model, load_format="dummy", kernels="torch")
    built = measure_memory(WorkerConfig(model=str(model), device="cpu", graphs="fake", load_format="dummy", **SMALL))
    assert planned.weights_bytes == built.weights_bytes
    assert planned.kv.num_bytes == built.kv_bytes
    assert planned.kv.num_blocks == built.num_blocks
    assert planned.graphs is not None
    assert {line.key for line in planned.graphs.lines} == set(built.graphs) | set(built.dropped)


def test_the_implementation_is_the_one_a_worker_would_take(tmp_path: Path) -> None:
    assert plan(write_config(tmp_path / "a", config_dict("llama"))).implementation == "native"
    assert plan(write_config(tmp_path / "b", NEOX)).implementation == "transformers"
    with pytest.raises(UnsupportedModel, match="gpt_neox"):
        plan(tmp_path / "b", model_impl="native")


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_a_number_that_no_model_has_is_refused_by_name(tmp_path: Path, name: str) -> None:
    for value in (0, 2**60, "64"):
        with pytest.raises(ModelLoadError, match=f"{name} is "):
            plan(write_config(tmp_path, config_dict("llama", **{name: value})))


def test_a_config_alone_and_a_checkpoint_give_the_same_plan(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "whole", "llama")
    config = write_config(tmp_path / "config", config_dict("llama")) / "config.json"
    whole, alone = plan(tmp_path / "whole"), plan(config)
    assert whole.weights_bytes == alone.weights_bytes
    assert whole.stored_bytes["F32"] > 0
    assert not alone.stored_bytes


def test_the_kv_pool_takes_what_the_fraction_leaves(tmp_path: Path) -> None:
    model = write_config(tmp_path, config_dict("llama", max_position_embeddings=512))
    planned = plan(model, gpu_bytes=2 * GIB, kv_cache_bytes=None, gpu_memory_fraction=0.5, max_batch=4096)
    taken = CONTEXT_BYTES + planned.weights_bytes + planned.kv.num_bytes
    assert taken == pytest.approx(GIB, rel=0.01)


def test_a_gpu_that_cannot_hold_one_sequence_does_not_fit(tmp_path: Path) -> None:
    model = write_config(tmp_path, config_dict("llama"))
    assert plan(model).fits
    assert not plan(model, kv_cache_bytes=4096).fits
    assert not plan(model, gpu_bytes=CONTEXT_BYTES).fits


def test_sequences_of_a_tier_are_limited_by_blocks_and_by_rows(tmp_path: Path) -> None:
    planned = plan(write_config(tmp_path, config_dict("llama")), kv_cache_bytes=400_000)
    usable = planned.kv.num_blocks - planned.kv.reserved_blocks
    assert planned.kv.sequences == {64: 4, 128: 4, 256: min(usable // 64, 4), 512: min(usable // 128, 4)}
    assert planned.kv.num_tokens == 4 * usable


def test_an_eager_worker_has_no_graphs_and_reserves_padding_only(tmp_path: Path) -> None:
    planned = plan(write_config(tmp_path, config_dict("llama")), graphs="off")
    assert planned.graphs is None
    assert planned.graph_bytes == 0
    assert planned.kv.reserved_blocks == 1


def test_the_parts_add_up(tmp_path: Path) -> None:
    planned = plan(write_config(tmp_path, config_dict("llama")))
    parts = planned.context_bytes + planned.weights_bytes + planned.kv.num_bytes + planned.inputs_bytes
    assert planned.used_bytes == parts + planned.graph_bytes


def test_a_cap_on_graphs_shows_in_the_plan(tmp_path: Path) -> None:
    model = write_config(tmp_path, config_dict("llama"))
    everything, capped = plan(model), plan(model, max_graph_bytes=45 << 20)
    assert everything.graphs is not None
    assert capped.graphs is not None
    assert all(line.fits for line in everything.graphs.lines)
    assert not all(line.fits for line in capped.graphs.lines)
    assert GraphKey("decode", 64, 1) in {line.key for line in everything.graphs.lines}


def test_a_model_that_is_not_there_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        plan(tmp_path / "nothing")
