"""Metric families from plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

PREFIX = "graphpool_"
SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0),
)
"""Upper bounds of the buckets of times."""

Samples = Iterable[tuple[Sequence[str], float]]
"""(values of the labels, value)."""


class Histogram:
    """Counts by upper bound. Not for several threads."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, as often as it occurred."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, help_text: str) -> HistogramMetricFamily:
        """For a scrape; the name goes without the prefix."""
        bounds = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(PREFIX + name, help_text, buckets=buckets, sum_value=self._sum)


def counter(name: str, help_text: str, samples: Samples, labels: Sequence[str]) -> CounterMetricFamily:
    """A counter with labels; "_total" is added to the name."""
    family = CounterMetricFamily(PREFIX + name, help_text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def gauge(name: str, help_text: str, samples: Samples, labels: Sequence[str]) -> GaugeMetricFamily:
    """A gauge with labels."""
    family = GaugeMetricFamily(PREFIX + name, help_text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def plain_counter(name: str, help_text: str, value: float) -> CounterMetricFamily:
    """A counter without labels."""
    return CounterMetricFamily(PREFIX + name, help_text, value=value)


def plain_gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    """A gauge without labels."""
    return GaugeMetricFamily(PREFIX + name, help_text, value=value)
