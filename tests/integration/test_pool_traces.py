from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster import tracing
from protos import generation_pb2, generation_pb2_grpc
from tests.fakes.script_pool import ScriptPool, script_pool
from tests.fakes.waiting import until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET_ID = 77


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", lambda: provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def named(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name.removeprefix("graphpool."): span for span in spans.get_finished_spans()}


async def ask(pool: ScriptPool, *metadata: tuple[str, str], **sampling: int) -> None:
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[5, SECRET_ID]),
        sampling=generation_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
    )
    async with grpc.aio.insecure_channel(pool.router.address) as channel:
        await generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, metadata=metadata)


async def test_a_clients_trace_goes_on_through_router_and_replica(spans: InMemorySpanExporter) -> None:
    async with script_pool() as pool:
        spans.clear()
        await ask(pool, ("traceparent", f"00-{TRACE}-{PARENT}-01"), max_tokens=5)
        await until(lambda: "decode" in named(spans), 5)
    found = named(spans)
    assert set(found) >= {"answer", "placement", "queue", "prefill", "decode"}
    ids = {name: span.context.span_id for name, span in found.items() if span.context}
    parents = {name: span.parent.span_id for name, span in found.items() if span.parent}
    assert {span.context.trace_id for span in found.values() if span.context} == {int(TRACE, 16)}
    assert parents["answer"] == int(PARENT, 16)
    assert parents["placement"] == ids["answer"]
    assert {parents[stage] for stage in ("queue", "prefill", "decode")} == {ids["placement"]}
    assert (found["decode"].attributes or {})["graphpool.tokens"] == 5
    starts = [found[stage].start_time or 0 for stage in ("answer", "queue", "prefill", "decode")]
    assert starts == sorted(starts)


async def test_a_request_without_a_trace_begins_one_and_nonsense_does_too(spans: InMemorySpanExporter) -> None:
    async with script_pool() as pool:
        for metadata in ((), (("traceparent", "nonsense"),), (("traceparent", "9" * 4000),)):
            spans.clear()
            await ask(pool, *metadata, max_tokens=2)
            await until(lambda: {"decode", "answer"} <= set(named(spans)), 5)
            assert named(spans)["answer"].parent is None


async def test_spans_hold_no_prompt_and_say_what_failed_by_kind_alone(spans: InMemorySpanExporter) -> None:
    async with script_pool() as pool:
        spans.clear()
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(pool, max_tokens=999_999)
        await until(lambda: "answer" in named(spans), 5)
        await ask(pool, max_tokens=3)
    answers = [span for span in spans.get_finished_spans() if span.name == "graphpool.answer"]
    assert [span.status.is_ok for span in answers] == [False, True]
    text = "".join(span.to_json() for span in spans.get_finished_spans())
    assert f"{SECRET_ID}," not in text
    assert "999999" not in text


def test_without_a_setting_nothing_is_exported_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    tracing.configure_tracing("graphpool-test")()
    assert not trace.get_tracer("x").start_span("y").is_recording()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "jaeger")
    with pytest.raises(ValueError, match="jaeger"):
        tracing.configure_tracing("graphpool-test")
