"""What is replayed on a GPU equals what runs eagerly: modules, decoders, buckets, sessions."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.graphs.bucketed import BucketedGraphRunner, PaddedAxes
from worker.graphs.cuda_backend import CudaCapture, alias_without_owning
from worker.graphs.dispatcher import Dispatcher, Miss
from worker.graphs.key import GraphKey
from worker.graphs.module_runner import CUDAGraphRunner
from worker.graphs.partial import PartialGraphs
from worker.graphs.plan import enumerate_keys, plan_captures
from worker.graphs.pool import GraphPool
from worker.graphs.recorder import GraphRecorder
from worker.graphs.region import CaptureRegion, module_tables
from worker.graphs.self_check import SelfCheck
from worker.graphs.session import CaptureSession, SessionOptions
from worker.graphs.smoke import smoke_test
from worker.graphs.sync_counter import SyncCounter, SyncKind
from worker.load import GraphReadiness

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZE = 256


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (12, 64)).transpose(1, 2).chunk(3, dim=1)
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Branches(nn.Module):
    """Tuple and dict outputs, integers, a view of the input."""

    def forward(self, x: Tensor) -> Any:
        return {"top": x.topk(3, dim=-1), "half": x[..., : SIZE // 2], "order": x.argsort(dim=-1)}


def modules() -> dict[str, Callable[[], nn.Module]]:
    return {
        "mlp": lambda: nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE)),
        "attention": Attention,
        "encoder": lambda: nn.TransformerEncoderLayer(SIZE, 4, batch_first=True, dropout=0.0),
        "convolution": lambda: nn.Sequential(nn.Conv1d(16, 32, 3), nn.BatchNorm1d(32), nn.ReLU()),
        "branches": Branches,
    }


def assert_equal(actual: Any, expected: Any, dtype: torch.dtype) -> None:
    loose = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(actual, expected, rtol=loose, atol=loose)


@pytest.fixture
def recorder() -> GraphRecorder:
    return GraphRecorder(GraphPool(CudaCapture()))


def test_the_smoke_test_passes() -> None:
    result = smoke_test("cuda")
    assert result.is_ok, result.detail


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in modules()), *((name, torch.bfloat16) for name in ("mlp", "attention"))],
    ids=str,
)
def test_a_replay_of_a_module_equals_eager(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = modules()[name]().to("cuda", dtype).eval()
    runner = CUDAGraphRunner()
    runner.warmup(module, torch.randn(4, 16, SIZE, device="cuda", dtype=dtype))
    runner.capture(module, torch.randn(4, 16, SIZE, device="cuda", dtype=dtype))
    for _ in range(5):
        x = torch.randn(4, 16, SIZE, device="cuda", dtype=dtype)
        with torch.no_grad():
            expected = module(x)
        assert_equal(runner.replay(x).clone(), expected, dtype)


@pytest.mark.parametrize("copy", ["same_stream", "copy_stream"])
@pytest.mark.parametrize("use_pool", [True, False])
def test_pool_and_copy_stream_change_nothing(copy: Any, use_pool: bool) -> None:
    module = modules()["mlp"]().cuda().eval()
    sample = torch.randn(8, SIZE, device="cuda")
    runner = CUDAGraphRunner(copy=copy, use_pool=use_pool)
    runner.warmup(module, sample)
    runner.capture(module, sample)
    for source in (torch.randn(8, SIZE, device="cuda"), torch.randn(8, SIZE).pin_memory(), torch.randn(8, SIZE)):
        with torch.no_grad():
            expected = module(source.cuda())
        assert_equal(runner.replay(source).clone(), expected, torch.float32)


def test_a_replay_may_run_on_any_stream() -> None:
    module, x = modules()["mlp"]().cuda().eval(), torch.randn(8, SIZE, device="cuda")
    runner = CUDAGraphRunner()
    runner.warmup(module, x)
    runner.capture(module, x)
    with torch.no_grad():
        expected = module(x)
    for _ in range(3):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            output = runner.replay(x).clone()
        torch.cuda.current_stream().wait_stream(stream)
        assert_equal(output, expected, torch.float32)


def test_graphs_of_a_pool_share_memory_and_still_compute_their_own(recorder: GraphRecorder) -> None:
    x = torch.randn(64, SIZE, device="cuda")
    graphs = []
    for number in range(4):
        region = CaptureRegion(run=lambda number=number: torch.relu(x) * number + 1, inputs={"x": x})  # type: ignore[misc]
        key = GraphKey("decode", 0, 64, f"times {number}")
        recorder.warm_up(key, region)
        graphs.append(recorder.capture(key, region))
    assert len({graph._outputs.data_ptr() for graph in graphs}) < 4, "outputs overlap: that is why they are leased"
    for number in (2, 0, 3, 1, 2):
        torch.testing.assert_close(graphs[number].replay().clone(), torch.relu(x) * number + 1)


def test_an_alias_reads_the_memory_and_does_not_keep_it() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        owner = (torch.arange(24, device="cuda") % 5).to(dtype).view(2, 3, 4)[:, 1:].transpose(0, 1)
        alias = alias_without_owning(owner)
        assert (alias.shape, alias.stride(), alias.dtype) == (owner.shape, owner.stride(), owner.dtype)
        assert torch.equal(alias, owner)
        assert alias.data_ptr() == owner.data_ptr()
    gc.collect()
    before = torch.cuda.memory_allocated()
    large = torch.zeros(1 << 20, device="cuda")
    alias = alias_without_owning(large)
    del large
    assert torch.cuda.memory_allocated() == before
    del alias


def test_kept_outputs_lie_apart(recorder: GraphRecorder) -> None:
    x, graphs = torch.randn(64, SIZE, device="cuda"), []
    for number in range(3):
        region = CaptureRegion(run=lambda number=number: x * number, inputs={"x": x})  # type: ignore[misc]
        key = GraphKey("decode", 0, 64, f"kept {number}")
        recorder.warm_up(key, region)
        graphs.append(recorder.capture(key, region, keep_outputs=True))
    for graph in graphs:
        graph.replay()
    for number, graph in enumerate(graphs):
        torch.testing.assert_close(graph.kept_outputs, x * number)


def test_nodes_and_instantiation_time_are_reported() -> None:
    pytest.importorskip("cuda.bindings")
    recorder = GraphRecorder(GraphPool(CudaCapture(keep_graph=True)))
    x, key = torch.zeros(4, device="cuda"), GraphKey("decode", 0, 4)
    region = CaptureRegion(run=lambda: (x + 1) * 2, inputs={"x": x})
    recorder.warm_up(key, region)
    graph = recorder.capture(key, region)
    assert graph.cost.num_nodes == 2
    assert 0 < graph.cost.instantiate_s < 0.05
    assert graph.replay().clone().tolist() == [2, 2, 2, 2]


def test_a_capture_waits_for_no_device_and_empties_no_cache(recorder: GraphRecorder) -> None:
    x, key = torch.zeros(4, device="cuda"), GraphKey("decode", 0, 4)
    region = CaptureRegion(run=lambda: x + 1, inputs={"x": x})
    with SyncCounter() as counter:
        recorder.warm_up(key, region)
        recorder.capture(key, region)
    assert counter.count(SyncKind.DEVICE) == 0, counter.calls


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(512, SIZE), nn.Linear(SIZE, 512)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.SiLU()) for _ in range(4)))

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.layers(self.embed(tokens)))


def decode_session(model: Model, pool: GraphPool, dispatcher: Dispatcher, **options: Any) -> CaptureSession:
    def region_of(key: GraphKey) -> CaptureRegion:
        tokens = torch.zeros(key.bucket, dtype=torch.int64, device="cuda")

        def draw(rng: torch.Generator, poison: bool) -> int:
            rows = max(1, key.bucket - 1)
            tokens.copy_(torch.randint(512, tokens.shape, generator=rng))
            tokens[rows:] = 511 if poison else 0
            return rows

        @torch.no_grad()
        def run() -> Tensor:
            logits: Tensor = model(tokens)
            return logits

        return CaptureRegion(run=run, inputs={"tokens": tokens}, constants=module_tables(model), draw=draw)

    plan = plan_captures(enumerate_keys(tiers=(256,), decode_buckets=(1, 2, 4, 8, 16, 32, 64)))
    return CaptureSession(
        plan,
        region_of,
        pool=pool,
        dispatcher=dispatcher,
        self_check=SelfCheck(),
        options=SessionOptions(**({"is_strict": True} | options)),
    )


@pytest.mark.parametrize("two_pass", [True, False])
def test_a_session_serves_while_it_captures(two_pass: bool) -> None:
    model, dispatcher = Model().cuda(), Dispatcher()
    session = decode_session(model, GraphPool(CudaCapture()), dispatcher, two_pass=two_pass)
    hits, rng = 0, torch.Generator().manual_seed(1)
    progress: Any = "started"
    while progress is not None:
        progress = session.capture_next()
        tokens = torch.randint(512, (int(torch.randint(1, 65, (), generator=rng)),), generator=rng).cuda()
        key = dispatcher.dispatch("decode", 256, len(tokens))
        if isinstance(key, Miss):
            continue
        hits += 1
        padded = functional.pad(tokens, (0, key.bucket - len(tokens)))
        session.graphs[key].load({"tokens": padded})
        logits = session.graphs[key].replay().clone()[: len(tokens)]
        with torch.no_grad():
            torch.testing.assert_close(logits, model(tokens), rtol=1e-4, atol=1e-4)
    assert hits >= 5
    assert session.readiness is GraphReadiness.FULL
    assert all(check.is_equal for check in session.checks.values())


def test_buckets_of_batch_and_length_equal_eager() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.qkv = nn.Linear(SIZE, 3 * SIZE)

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask == 0, float("-inf"))
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None, :])

    model = Masked().cuda().eval()

    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        mask = torch.ones(batch, length, dtype=torch.int64, device="cuda")
        return {"x": torch.randn(batch, length, SIZE, device="cuda"), "mask": mask}

    axes = PaddedAxes(length_dim=1)
    runner = BucketedGraphRunner(
        model,
        inputs(1, 64),
        batch_sizes=(1, 2, 4, 8),
        lengths=(64, 128),
        axes={"x": axes, "mask": axes},
        output_axes=axes,
    )
    runner.capture()
    assert not runner.dispatcher.quarantined
    for batch in (1, 2, 3, 5, 8):
        for length in (1, 63, 64, 65, 128):
            given = inputs(batch, length)
            with torch.no_grad():
                torch.testing.assert_close(runner(**given), model(**given), rtol=1e-4, atol=1e-4)
    assert not runner.dispatcher.misses


def test_parts_of_a_model_can_be_captured_alone() -> None:
    class Peeking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()) for _ in range(4))

        def forward(self, x: Tensor) -> Any:
            first = x
            for block in self.blocks:
                x = block(x)
                if x.sum().item() > 0:
                    x = x + first
            return x

    model, plain = Peeking().cuda().eval(), Peeking().cuda().eval()
    graphs = PartialGraphs(model, lambda _, module: isinstance(module, nn.Sequential), pool=GraphPool(CudaCapture()))
    graphs.capture((torch.randn(8, SIZE, device="cuda"),))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(8, SIZE, device="cuda")
            torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
    assert graphs.graph_calls == dict.fromkeys(graphs.names, 4)
