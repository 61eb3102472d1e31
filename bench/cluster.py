"""What clients notice while a Ray cluster loses parts, scales and restarts.

    python -m bench.cluster                                # 3 rolling restarts, 2 scale cycles
    python -m bench.cluster --restarts 20 --cycles 10      # the full run
    python -m bench.cluster --model smollm2-135m           # fewer, with a real model on the CPU
    python -m bench.cluster soak --minutes 30              # see bench/soak.py

See tests/chaos/cluster_campaign.py and cluster_model.py. Writes `bench/results/cluster_events.json`, or
`cluster_events_model.json`; exits with 1 if any answer was lost, or any token came twice or was not the expected one.
"""

from __future__ import annotations

from tests.chaos.cluster_campaign import Plan, plan_from, run  # first: it sets what gRPC reads when it is imported

import asyncio  # isort: skip
import os
import statistics
import sys
from collections.abc import Sequence

from bench import soak
from bench.options import add_plan_options, bench_parser
from bench.results_file import Results, cpu_name
from tests.chaos.cluster_events import Event, together
from tests.chaos.cluster_model import ModelPlan, run_model
from tests.fakes.ray_cluster import missing


def results_of(
    events: Sequence[Event],
    *,
    seed: int,
    load_average: str,
    bench: str = "cluster_events",
    model: str = "script",
) -> Results:
    """A line for each kind of event, with sums, the longest gap of all, and the median and the longest time."""
    results = Results(
        bench=bench,
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
                system="graphpool", model=model, metric=metric, unit=unit, value=value, scope="router", note=name
            )
    return results


def measure(plan: Plan) -> Results:
    """Run it, on a machine that other things may keep busy."""
    before = os.getloadavg()[0]
    events = asyncio.run(run(plan))
    return results_of(events, seed=plan.seed, load_average=f"{before:.1f} before, {os.getloadavg()[0]:.1f} after")


def measure_model(plan: ModelPlan) -> Results:
    """The same with a real model."""
    before = os.getloadavg()[0]
    events = asyncio.run(run_model(plan))
    average = f"{before:.1f} before, {os.getloadavg()[0]:.1f} after"
    return results_of(events, seed=plan.seed, load_average=average, bench="cluster_events_model", model=plan.model)


def model_plan_from(arguments: list[str]) -> ModelPlan:
    """By the command line; exits where there can be no cluster."""
    parser = bench_parser(__doc__)
    parser.add_argument("--model", required=True, help="name or directory, as of a worker")
    numbers = dict.fromkeys(("streams", "questions", "min_tokens", "max_tokens", "seed"))
    add_plan_options(parser, ModelPlan(), **numbers, rounds="of a node, a controller and a restart")
    options = parser.parse_args(arguments)
    if (problem := missing()) is not None:
        parser.error(problem)
    return ModelPlan(**vars(options))


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["soak"]:
        return soak.main(given[1:])
    parser = bench_parser(__doc__)
    if any(argument.partition("=")[0] == "--model" for argument in given):
        results = measure_model(model_plan_from(given))
    else:
        results = measure(plan_from(parser, given))
    print(results.write())
    return int(not results.correctness["all_right"])


if __name__ == "__main__":
    sys.exit(main())
