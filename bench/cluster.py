"""What clients notice while a Ray cluster loses parts, scales and restarts.

    python -m bench.cluster                                # 3 rolling restarts, 2 scale cycles
    python -m bench.cluster --restarts 20 --cycles 10      # the full run
    python -m bench.cluster soak --minutes 30              # see bench/soak.py

See tests/chaos/cluster_campaign.py. Writes `bench/results/cluster_events.json`; exits with 1 if any answer was lost,
or any token came twice or was not the expected one.
"""

from __future__ import annotations

from tests.chaos.cluster_campaign import Plan, plan_from, run  # first: it sets what gRPC reads when it is imported

import argparse  # isort: skip
import asyncio
import os
import statistics
import sys
from collections.abc import Sequence

from bench import soak
from bench.results_file import Results, cpu_name
from tests.chaos.cluster_events import Event, together


def results_of(events: Sequence[Event], *, seed: int, load_average: str) -> Results:
    """A line for each kind of event, with sums, the longest gap of all, and the median and the longest time."""
    results = Results(
        bench="cluster_events",
        hardware=cpu_name(),
        correctness={
            "all_right": all(event.is_flawless for event in events),
            "seed": seed,
            "problems": [f"{event.name}: {problem}" for event in events for problem in event.problems][:20],
        },
        extra={"load_average": load_average},
    )
    for name, found in together(events).items():
        whole_s = [event.whole_s for event in found if event.whole_s]
        figures: list[tuple[str, str, float]] = [
            ("times", "1", len(found)),
            ("running", "answers", sum(event.answers for event in found)),
            ("lost", "answers", sum(event.lost for event in found)),
            ("doubled", "tokens", sum(event.duplicated for event in found)),
            ("changed", "tokens", sum(event.changed for event in found)),
            ("moved", "answers", sum(event.moved for event in found)),
            ("longest_gap_ms", "ms", round(1000 * max(event.longest_gap_s for event in found))),
        ]
        if whole_s:
            figures += [
                ("whole_p50_s", "s", round(statistics.median(whole_s), 1)),
                ("whole_longest_s", "s", round(max(whole_s), 1)),
            ]
        for metric, unit, value in figures:
            results.add(
                system="graphpool", model="script", metric=metric, unit=unit, value=value, scope="router", note=name
            )
    return results


def measure(plan: Plan) -> Results:
    """Run it, on a machine that other things may keep busy."""
    before = os.getloadavg()[0]
    events = asyncio.run(run(plan))
    return results_of(events, seed=plan.seed, load_average=f"{before:.1f} before, {os.getloadavg()[0]:.1f} after")


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["soak"]:
        return soak.main(given[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = measure(plan_from(parser, given))
    print(results.write())
    return int(not results.correctness["all_right"])


if __name__ == "__main__":
    sys.exit(main())
