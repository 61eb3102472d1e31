"""Kernels are built before anything runs: all of them, and nothing is run for it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes.compiled_offline import run_compiler
from worker.causal_lm import NativeCausalLM
from worker.context_ahead import make_context_ahead
from worker.kernels.nothing_runs import NothingRuns, nothing_launched
from worker.model.architecture import DecoderConfig
from worker.model.decoder import Decoder
from worker.model.shortened import shortened

from bench.shapes import TINY_SHAPE  # isort: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "deterministic", "processes"])
def test_no_step_of_any_key_builds_a_kernel_later(mode: str, tmp_path: Path) -> None:
    """And with processes, none is built in this one; no step loads what only torch's compiler needs."""
    pytest.importorskip("triton")
    done = run_compiler("-m", "tests.fakes.compile_ahead", mode, cache=tmp_path, timeout_s=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["asked"] == found["ahead"] > 10
    assert found["later"] == []
    assert found["is_untouched"]
    assert not found["has_symbols"]
    assert bool(found["here"]) == (mode != "processes")


def test_operators_give_shapes_whatever_is_in_memory_and_change_nothing() -> None:
    table, wrong = torch.arange(12.0).view(4, 3), torch.tensor([99, -1])
    with NothingRuns(), torch.inference_mode():
        looked_up = nn.functional.embedding(wrong, table)  # out of bounds, if it were looked up
        product = torch.mm(table, table.t()).float()
        changed = table.add_(1.0)
        row = table[1]
        packed = torch.stack([table.argmax(dim=-1), table.argmin(dim=-1)], dim=-1)
        out = torch.mm(table, table.t(), out=torch.empty(4, 4))
    assert looked_up.shape == (2, 3)
    assert product.shape == out.shape == (4, 4)
    assert changed is table
    assert row.data_ptr() == table.data_ptr() + 12
    assert (packed.shape, packed.dtype) == ((4, 2), torch.int64)
    assert table.tolist()[0] == [0.0, 1.0, 2.0]


def test_a_value_that_is_asked_for_ends_the_walk() -> None:
    flag = torch.tensor([True])
    with NothingRuns(), pytest.raises((RuntimeError, NotImplementedError)):
        (flag & flag).item()


def test_two_that_are_gone_through_at_once_leave_launches_as_they_were() -> None:
    """Two engines may start in one process: what one of them put in place must not stay, and launch nothing for good."""
    jit = pytest.importorskip("triton.runtime.jit").JITFunction
    run, may_leave, entered = jit.run, threading.Event(), threading.Event()

    def go_through() -> None:
        with nothing_launched():
            entered.set()
            may_leave.wait(10)

    first, second = threading.Thread(target=go_through), threading.Thread(target=go_through)
    first.start()
    entered.wait(10)
    second.start()
    may_leave.set()
    first.join(10)
    second.join(10)
    assert jit.run is run


def test_a_shortened_model_shares_weights_and_leaves_the_whole_one_alone() -> None:
    shape = TINY_SHAPE | {"num_hidden_layers": 5}
    decoder = Decoder(DecoderConfig.from_dict(shape), dtype=torch.float32, device=torch.device("cpu"))
    model = NativeCausalLM(decoder)
    short = shortened(model)
    assert isinstance(short, NativeCausalLM)
    assert (len(short.decoder.layers), len(model.decoder.layers)) == (2, 5)
    assert short.module is short.decoder
    assert short.decoder.layers[0] is decoder.layers[0]
    assert short.decoder.embedding is decoder.embedding


def test_without_a_driver_no_context_is_made_and_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.context_ahead.DRIVER", "libnosuchdriver.so.1")
    thread = make_context_ahead()
    thread.join(5)
    assert not thread.is_alive()
