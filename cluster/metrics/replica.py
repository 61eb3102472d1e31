"""What a replica counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import grpc
from prometheus_client.core import Metric

from cluster.metrics.answer_times import AnswerTimes
from cluster.metrics.families import Histogram, counter, gauge, plain_counter, plain_gauge
from protos import generation_pb2
from worker.load import GraphReadiness, LoadSnapshot
from worker.request import Timings

READINESS = {GraphReadiness.EAGER: 0, GraphReadiness.PARTIAL: 1, GraphReadiness.FULL: 2}


class ReplicaMetrics:
    """Requests and tokens as they go out; everything else comes from the engine's load at the time of a scrape.

    Used on the event loop alone: once for each piece that is sent and each request that ends.
    """

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._first_token = Histogram()
        self._inter_token = Histogram()
        self._queue = Histogram()
        self._prefill = Histogram()
        self._decode = Histogram()

    def sent(self, times: AnswerTimes, piece: generation_pb2.GenerateResponse) -> None:
        """A piece of an answer is on its way. Its tokens share the time since the piece before."""
        now_s = time.monotonic()
        if not times.sent_s:
            self._prompt_tokens += piece.usage.prompt_tokens
            self._first_token.observe(now_s - times.opened_s)
        for choice in piece.choices:
            num_tokens, before_s = len(choice.token_ids), times.sent_s.get(choice.index)
            self._generation_tokens += num_tokens
            if before_s is not None and num_tokens:
                self._inter_token.observe((now_s - before_s) / num_tokens, num_tokens)
            times.sent_s[choice.index] = now_s

    def ended(self, code: grpc.StatusCode, timings: Timings | None = None) -> None:
        """A request is over; a complete one brings the engine's times."""
        self._requests[code.name] += 1
        if timings is not None:
            self._queue.observe(timings.queue_s)
            self._prefill.observe(timings.prefill_s)
            self._decode.observe(timings.decode_s)

    def families(self, load: LoadSnapshot) -> Iterator[Metric]:
        """For a scrape."""
        yield from _sequences(load)
        yield from _steps(load)
        yield from _graphs(load)
        yield from _weights(load)
        yield from self._answers()

    def _answers(self) -> Iterator[Metric]:
        outcomes = (((code,), count) for code, count in self._requests.items())
        yield counter("requests", "Requests that have ended, by status code.", outcomes, ("code",))
        yield plain_counter("prompt_tokens", "Tokens of prompts whose first token was sent.", self._prompt_tokens)
        yield plain_counter("generation_tokens", "Generated tokens that were sent.", self._generation_tokens)
        yield self._first_token.family(
            "time_to_first_token_seconds", "From taking a request to sending its first token."
        )
        yield self._inter_token.family(
            "inter_token_latency_seconds", "Between two tokens of a choice, as they were sent."
        )
        yield self._queue.family("request_queue_seconds", "Until a request was first scheduled.")
        yield self._prefill.family("request_prefill_seconds", "From there to the first token.")
        yield self._decode.family("request_decode_seconds", "From there to the last token.")


def _sequences(load: LoadSnapshot) -> Iterator[Metric]:
    yield plain_gauge("running_sequences", "Sequences that hold a row.", load.running)
    yield plain_gauge("waiting_sequences", "Sequences in the queue.", load.waiting)
    yield plain_gauge("outstanding_tokens", "Tokens to prefill and to generate, at most.", load.outstanding_tokens)
    yield plain_gauge("queue_age_seconds", "Age of the oldest sequence in the queue.", load.queue_age_s)
    yield plain_gauge("waiting_prefill_tokens", "Prompt tokens not computed yet.", load.waiting_prefill_tokens)
    yield plain_gauge("predicted_ttft_seconds", "Wait of a short prompt that came now.", load.predicted_ttft_s)
    yield plain_gauge("step_age_seconds", "How long the step under way has been running.", load.step_age_s)
    running = (((str(tier.tier),), tier.running) for tier in load.tiers)
    yield gauge("tier_running_sequences", "Running sequences, by tier.", running, ("tier",))
    free = (((str(tier.tier),), tier.free_slots) for tier in load.tiers)
    yield gauge("tier_free_slots", "Sequences of a tier that could start now.", free, ("tier",))
    queries, hits = load.prefix_cache_queries, load.prefix_cache_hits
    yield plain_counter("prefix_cache_queries", "Tokens of sequences that were started.", queries)
    yield plain_counter("prefix_cache_hits", "Those of them that were in the prefix cache.", hits)
    yield plain_gauge("blocks", "Blocks of the KV pool.", load.total_blocks)
    yield plain_gauge("free_blocks", "Blocks that no sequence holds.", load.free_blocks)


def _steps(load: LoadSnapshot) -> Iterator[Metric]:
    steps = ((("graph",), load.graph_replays), (("eager",), load.eager_steps))
    yield counter("steps", "Completed steps, by what ran them.", steps, ("runner",))
    yield plain_counter("preemptions", "Rows taken back because blocks had run out.", load.preemptions)
    yield plain_counter("wasted_rows", "Rows computed for sequences that had ended.", load.wasted_rows)


def _graphs(load: LoadSnapshot) -> Iterator[Metric]:
    graphs = load.graphs
    replays = (((use.phase, str(use.tier), str(use.bucket), use.variant), use.replays) for use in graphs.uses)
    labels = ("phase", "tier", "bucket", "variant")
    yield counter("graph_replays", "Replays of each captured graph.", replays, labels)
    misses = (((reason,), count) for reason, count in graphs.misses)
    yield counter("graph_misses", "Steps that ran eagerly for lack of a graph, by reason.", misses, ("reason",))
    yield plain_counter("graph_padding_rows", "Rows computed only to fill a bucket.", graphs.padding_rows)
    yield plain_gauge("graph_quarantined", "Graphs that disagreed with eager execution.", graphs.quarantined)
    yield plain_gauge("graph_dropped", "Graphs that were given up.", graphs.dropped)
    yield plain_gauge("graph_pool_bytes", "Device memory of all graphs.", graphs.pool_bytes)
    yield plain_gauge("graph_capture_seconds", "Spent warming up, capturing and checking.", graphs.capture_s)
    yield plain_gauge("readiness", "0 eager, 1 partly from graphs, 2 all from graphs.", READINESS[load.readiness])


def _weights(load: LoadSnapshot) -> Iterator[Metric]:
    weights = load.weights
    yield plain_counter("weight_checks", "Times that all weights were found as they were loaded.", weights.passes)
    yield plain_counter("weight_checked_bytes", "Bytes of weights that were compared.", weights.checked_bytes)
    yield plain_gauge("weight_check_bytes", "Bytes that one pass over the weights looks at.", weights.watched_bytes)
    yield plain_gauge("weight_check_age_seconds", "Since the last pass over the weights ended.", weights.age_s)
