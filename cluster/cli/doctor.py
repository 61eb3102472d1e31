"""`graphpool doctor`: whether this machine can run a pool, and what to do if not."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli import options
from cluster.cli.running import FAILED, one_sentence_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cluster.doctor.bisect import BisectReport
    from cluster.doctor.finding import Finding

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


doctor = typer.Typer(name="doctor", invoke_without_command=True)


@doctor.callback()
def machine(
    context: typer.Context,
    bisect: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Capture this model, and find the layer and the operator that fail."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    cache_dir: options.CacheDir = None,
) -> None:
    """Check driver, CUDA, packages, ports, memory, files and environment, and capture a graph. Changes nothing.

    Exit code 1: a check failed, or the model that --bisect looked at cannot be captured.
    """
    if context.invoked_subcommand is not None:
        return
    with one_sentence_errors():
        if bisect is None:
            findings = _findings(cache_dir)
            is_ok = all(finding.status != "fail" for finding in findings)
            values: dict[str, Any] = {"ok": is_ok, "checks": [asdict(finding) for finding in findings]}
            _show(values if as_json else findings_table(findings))
        else:
            from cluster.doctor.bisect import bisect_model

            report = bisect_model(bisect, cache_dir=cache_dir)
            is_ok = report.is_ok
            _show({"ok": is_ok, **asdict(report)} if as_json else bisect_text(report))
    if not is_ok:
        raise typer.Exit(FAILED)


@doctor.command()
def deploy(
    files: Annotated[
        list[Path],
        typer.Argument(
            parser=options.path, metavar="FILE...", help="Cluster files of `ray up`, Serve configs, KubeRay manifests."
        ),
    ],
    step_ms: Annotated[
        float | None,
        typer.Option(min=0.001, help="How long a decode step takes at most. Default: 10 on a GPU, 50 on a CPU."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look for mistakes in the files that bring a cluster up: line, reason, and what to write instead.

    Several files are also held against each other. Contacts nothing. Exit code 1: something would not work, or not safely.
    """
    with one_sentence_errors():
        from cluster.doctor.deploy.check import check_deployment

        findings = check_deployment(files, step_ms=step_ms)
        is_ok = all(finding.status != "fail" for finding in findings)
        values = {"ok": is_ok, "checks": [asdict(finding) for finding in findings]}
        _show(values if as_json else findings_lines(findings))
    if not is_ok:
        raise typer.Exit(FAILED)


def findings_lines(findings: list[Finding]) -> RenderableType:
    """For places with long names: the place, then what was found there and what to do."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    lines: list[RenderableType] = []
    for finding in findings:
        lines.append(Text.assemble((f"{finding.status:<6}", COLOURS[finding.status]), finding.check))
        remedy = f": {finding.remedy}" if finding.remedy else ""
        lines.append(Padding(Text(f"{finding.detail}{remedy}"), (0, 0, 0, 6)))
    return Group(*lines)


def findings_table(findings: list[Finding]) -> RenderableType:
    """One line a check, the remedy in the last column."""
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for finding in findings:
        status = Text(finding.status, COLOURS[finding.status])
        table.add_row(finding.check, status, Text(finding.detail), Text(finding.remedy))
    return table


def bisect_text(report: BisectReport) -> RenderableType:
    """What was found, in sentences."""
    from rich.text import Text

    if report.is_ok:
        return Text(f"{report.model} can be captured whole on {report.device}.", "green")
    lines = [
        f"{report.model} cannot be captured whole on {report.device}; {report.num_tried} parts were tried.",
        f"It fails in {report.layer} ({report.layer_class}):",
        f"  {report.error}",
    ]
    if report.findings:
        lines += ["Everything that one run of the whole model shows:", *(f"  {finding}" for finding in report.findings)]
    return Text("\n".join(lines))


def _findings(cache_dir: Any) -> list[Finding]:
    from cluster.doctor.finding import run_checks
    from cluster.doctor.gpu import gpu_checks
    from cluster.doctor.machine import machine_checks
    from cluster.doctor.packages import package_checks
    from worker.model.cache import default_cache_dir

    return list(run_checks([*package_checks(), *gpu_checks(), *machine_checks(cache_dir or default_cache_dir())]))


def _show(what: Any) -> None:
    if isinstance(what, dict):
        json.dump(what, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    from rich.console import Console

    Console().print(what)
