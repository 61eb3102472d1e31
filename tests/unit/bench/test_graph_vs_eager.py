"""What is measured of a worker with graphs and without them, on the CPU: a tiny model, emulated captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from bench import graph_vs_eager
from bench.engine_runs import Worker, build
from bench.modules import hf_model
from bench.results_file import Results


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    found = build("any", "cpu", capture="startup")
    yield found
    found.close()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of a tiny model, and clocks that need no GPU."""

    def once(work: Callable[[], object], *_: object, **__: object) -> float:
        work()
        return 1.0

    for name, value in {"BATCHES": (1, 4), "CONTEXT": 8, "PROMPTS": (16,), "STEPS": 3}.items():
        monkeypatch.setattr(graph_vs_eager, name, value)
    for name in ("device_ms", "host_ms", "launches"):
        monkeypatch.setattr(graph_vs_eager, name, once)


def test_every_batch_and_prompt_is_measured_both_ways(worker: Worker) -> None:
    results = Results(bench="graph_vs_eager", hardware="none")
    graph_vs_eager.measure_ours("tiny", worker, results)
    found = {(row.system, row.metric, row.batch, row.context, row.scope) for row in results.rows}
    assert len(found) == len(results.rows)
    for system in ("graphpool", "graphpool_eager"):
        assert {one[1:] for one in found if one[0] == system} >= {
            *(("decode_step_ms", batch, 8, "replica") for batch in (1, 4)),
            ("ttft_ms", 1, 16, "replica"),
            ("launches", 1, None, "step"),
        }
    assert {one for one in found if one[0] == "graphpool" and one[4] == "step"} >= {
        ("graphpool", "decode_step_ms", batch, 8, "step") for batch in (1, 4)
    }
    assert worker.engine.runner is worker.runner
    assert not worker.engine.has_work


def test_tokens_are_compared_with_eager_and_logits_with_the_peer(worker: Worker) -> None:
    found = graph_vs_eager.check(worker, hf_model("any", "cpu"))
    assert found["tokens_equal_to_eager"] == 1
    assert found["keys_captured"] == len(worker.runner.session.graphs)
    # Weights of its own: as far away as two random vectors are.
    assert found["relative_logit_error_to_transformers"] > 0.5
