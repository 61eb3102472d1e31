"""Deterministic mode over the embedded model, whose products take the ways of real sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fakes.logit_record import LogitRecord
from tests.fakes.one_thread import one_thread  # noqa: F401
from worker.build import create_engine
from worker.config import WorkerConfig
from worker.deterministic.cpu_model import decoder_matrices
from worker.deterministic.cpu_product import PRODUCT_ROWS, product
from worker.deterministic.row_tiles import RowTiles
from worker.engine import Engine
from worker.load_causal_lm import ServedModel, load_causal_lm
from worker.model.files import ModelFiles
from worker.model.source import resolve_model
from worker.request import GenerateRequest
from worker.sampling import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def loaded() -> tuple[ModelFiles, ServedModel]:
    files = resolve_model("smollm2-135m")
    config = WorkerConfig(device="cpu")
    return files, load_causal_lm(config, files, device=torch.device("cpu"), dtype=torch.float32)


def engine(loaded: tuple[ModelFiles, ServedModel], **changes: Any) -> Engine:
    values: dict[str, Any] = {
        "device": "cpu",
        "deterministic": True,
        "max_batch": 8,
        "kv_cache_bytes": 64 << 20,
        "max_model_len": 1024,
    }
    return create_engine(WorkerConfig(**(values | changes)), *loaded, None)


def request(name: str, length: int, **params: Any) -> GenerateRequest:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(100, 40000, (length,), generator=generator).tolist()
    values = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **params}
    return GenerateRequest(request_id=name, prompt_token_ids=tuple(tokens), sampling=SamplingParams(**values))


REQUESTS = [request("a", 3), request("b", 30, temperature=1.0, seed=4), request("c", 50)]


def test_batch_chunks_and_phases_leave_every_bit_alone(loaded: tuple[ModelFiles, ServedModel]) -> None:
    record = LogitRecord()
    together = record.run(engine(loaded), REQUESTS)
    chunked = engine(loaded, prefill_chunk=16, max_batch=2, prefix_cache=False)
    assert record.run(chunked, REQUESTS) == together
    alone = record.run(chunked, [REQUESTS[1]])
    assert alone["b", 0] == together["b", 0]
    longer = GenerateRequest(
        request_id="a",
        prompt_token_ids=(*REQUESTS[0].prompt_token_ids, *together["a", 0][:3]),
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
    )
    one = record.run(chunked, [longer])
    assert one["a", 0] == together["a", 0][3:]
    assert record.num_compared >= 16


def test_one_thread_and_two_give_the_same_bits(loaded: tuple[ModelFiles, ServedModel]) -> None:
    model: Any = loaded[1].model
    for weight in [*list(decoder_matrices(model.decoder))[:4], model.decoder.lm_head]:
        x = torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(1))
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found += [product(x[:rows], weight, RowTiles((4, 8, 16))) for rows in (1, 6, 16)]
        assert torch.equal(found[0], found[3])
        assert torch.equal(found[1], found[4])
        assert torch.equal(found[2], found[5])
        assert torch.equal(found[2][:6], found[1])


def test_every_tile_of_rows_is_of_use_here(loaded: tuple[ModelFiles, ServedModel]) -> None:
    """Where a library rounds by the size of a product, the mode is right but slow: worth knowing."""
    model: Any = engine(loaded).runner.model  # type: ignore[attr-defined]
    assert model.tiles[576, 576].sizes == PRODUCT_ROWS
