"""Asking for metrics as Prometheus does."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading: the text, and the value of each sample by its name and labels."""

    text: str
    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def value(self, name: str, **labels: str) -> float:
        """Of one sample, 0 if it is not there; the name goes without the prefix."""
        return self.values.get((f"graphpool_{name}", frozenset(labels.items())), 0.0)

    def by_labels(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Every sample of one name, by the values of these labels; zeros are left out."""
        found = {}
        for (sample, pairs), value in self.values.items():
            if sample == f"graphpool_{name}" and value:
                found[tuple(dict(pairs)[label] for label in labels)] = value
        return found


def fetch(address: str, path: str = "/metrics", *, token: str = "") -> str:
    request = urllib.request.Request(f"http://{address}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=10) as response:
        text: str = response.read().decode()
    return text


def parse(text: str) -> Scrape:
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return Scrape(text, {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples})


async def scrape(address: str) -> Scrape:
    """Over HTTP, on a thread: the server under test may share this event loop."""
    return parse(await asyncio.to_thread(fetch, address))
