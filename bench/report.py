"""Turns the result files into tables and pictures; nobody types a figure by hand.

    python -m bench.report                 fill the marked places of README.md and docs/, draw every picture
    python -m bench.report --check         change nothing; exit code 1 if a marked place is out of date
    python -m bench.report --show NAME     print the tables of one benchmark

A marked place is what stands between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.options import bench_parser, folder_path
from bench.report_tables import tables_of
from bench.results_file import RESULTS

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- bench:(?P<name>[\w.-]+) -->\n)(?P<text>.*?)(<!-- /bench:(?P=name) -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    options = bench_parser(__doc__)
    options.add_argument("--check", action="store_true")
    options.add_argument("--show", metavar="NAME")
    options.add_argument("--no-plots", action="store_true")
    options.add_argument("--results", type=folder_path, default=RESULTS)
    options.add_argument("--root", type=folder_path, default=ROOT)
    args = options.parse_args(arguments)
    documents = read_results(args.results)
    if args.show:
        if args.show not in documents:
            options.error(f"no result is named {args.show}, only {', '.join(documents)}")
        print(tables_of(documents[args.show]))
        return 0
    tables = {name: tables_of(document) for name, document in documents.items()}
    stale = [path for path in pages(args.root) if fill(path, tables, write=not args.check)]
    for path in stale:
        print(f"{path.relative_to(args.root)} {'is out of date' if args.check else 'filled'}")
    if args.check:
        return int(bool(stale))
    if not args.no_plots:
        draw(documents, args.results)
    return 0


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Result documents by the name of their benchmark."""
    documents = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    return {document["bench"]: document for document in documents}


def pages(root: Path) -> list[Path]:
    """The files that may hold marked places."""
    return [path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.is_file()]


def fill(path: Path, tables: Mapping[str, str], *, write: bool) -> bool:
    """Put the tables into a page's marked places; whether that changes it. Raises KeyError for a name without a result."""
    before = path.read_text(encoding="utf-8")
    after = PLACE.sub(lambda place: f"{place[1]}{tables[place['name']]}\n{place[4]}", before)
    if write and after != before:
        path.write_text(after, encoding="utf-8")
    return after != before


def draw(documents: Mapping[str, dict[str, Any]], folder: Path) -> None:
    """One picture a benchmark."""
    from bench.plots import plot

    for document in documents.values():
        path = plot(document, folder)
        if path is not None:
            print(path)


if __name__ == "__main__":
    raise SystemExit(main())
