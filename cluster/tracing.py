"""Traces of requests, from the client's call through router and queue to the last token.

Without OpenTelemetry's SDK being set up nothing is recorded, and a request costs a few microseconds more. A client's trace
goes on here by the W3C `traceparent` of its metadata, and from router to replica by a field of the submission.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.version import version
from worker.request import Timings

KEY = "traceparent"
EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"
NANOSECONDS = 1_000_000_000
MAX_PARENT_LENGTH = 128

_propagator = TraceContextTextMapPropagator()
_parent: ContextVar[str] = ContextVar("trace_parent", default="")


def use_trace_parent(parent: str) -> None:
    """The trace that what this task does from now on belongs to; "" = none."""
    _parent.set(parent if len(parent) <= MAX_PARENT_LENGTH else "")


def current_trace_parent() -> str:
    """Of the call this code is running for."""
    return _parent.get()


def trace_parent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """What a call's metadata says; whatever is no trace context starts a trace of its own later."""
    return next((str(value) for key, value in metadata or () if key == KEY), "")


class RequestTrace:
    """The spans of one request in a router: the answer, and a child for each placement."""

    def __init__(self, request_id: str, model: str) -> None:
        attributes = {"graphpool.request_id": request_id, "graphpool.model": model}
        self._span = _tracer().start_span(
            "graphpool.answer", context=_context(_parent.get()), kind=SpanKind.SERVER, attributes=attributes
        )
        self._attempt: Span | None = None

    def place(self, replica: str, attempt: int) -> str:
        """The request goes to a replica; returns the trace parent that goes with it, "" while nothing is recorded."""
        self._end_attempt()
        if not self._span.is_recording():
            return _parent.get()
        attributes: dict[str, str | int] = {"graphpool.replica": replica, "graphpool.attempt": attempt}
        self._attempt = _tracer().start_span(
            "graphpool.placement",
            context=trace.set_span_in_context(self._span),
            kind=SpanKind.CLIENT,
            attributes=attributes,
        )
        return _parent_of(self._attempt)

    def __enter__(self) -> RequestTrace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        """The answer is over; an error is told by its type alone, for its text may say what was asked."""
        for span in (self._attempt, self._span):
            if span is not None and kind is not None:
                is_cancel = issubclass(kind, GeneratorExit | asyncio.CancelledError)
                span.set_status(Status(StatusCode.ERROR, "cancelled" if is_cancel else kind.__name__))
        self._end_attempt()
        self._span.end()

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.end()
            self._attempt = None


def record_stages(parent: str, timings: Timings, *, replica: str, num_tokens: int) -> None:
    """Spans of an answer's queue, prefill and decode on a replica, made when it is complete: it ends now."""
    if not parent:
        return
    context, at = _context(parent), time.time_ns()
    stages = [("queue", timings.queue_s), ("prefill", timings.prefill_s), ("decode", timings.decode_s)]
    began = at - sum(round(seconds * NANOSECONDS) for _, seconds in stages)
    for name, seconds in stages:
        ended = began + round(seconds * NANOSECONDS)
        span = _tracer().start_span(f"graphpool.{name}", context=context, start_time=began)
        span.set_attribute("graphpool.replica", replica)
        if name == "decode":
            span.set_attribute("graphpool.tokens", num_tokens)
        span.end(ended)
        began = ended


def configure_tracing(service: str) -> Callable[[], None]:
    """Export spans as OTEL_TRACES_EXPORTER says: "otlp", "console", or nothing; returns what flushes them at the end.

    "otlp" takes OpenTelemetry's own variables for its endpoint and headers, and needs its exporter package. Raises
    ValueError for another value, or without that package.
    """
    kind = os.environ.get(EXPORTER_VARIABLE, "none").strip() or "none"
    if kind == "none":
        return lambda: None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service, "service.version": version()}))
    provider.add_span_processor(BatchSpanProcessor(_exporter(kind)))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def _exporter(kind: str) -> Any:
    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if kind != "otlp":
        raise ValueError(f"{EXPORTER_VARIABLE} is {kind!r}, must be otlp, console or none")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # type: ignore[import-not-found]
            OTLPSpanExporter,
        )
    except ImportError:
        raise ValueError(
            f"{EXPORTER_VARIABLE} is otlp, which needs the package opentelemetry-exporter-otlp-proto-grpc"
        ) from None
    return OTLPSpanExporter()


def _tracer() -> Tracer:
    return trace.get_tracer("graphpool", version())


def _context(parent: str) -> Context | None:
    """None for no parent, which begins a trace."""
    return _propagator.extract({KEY: parent}) if parent else None


def _parent_of(span: Span) -> str:
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier.get(KEY, "")
