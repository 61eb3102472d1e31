"""Make sure that a model is on this machine: `python -m worker.model.fetch smollm2-135m`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from worker.errors import ModelLoadError
from worker.model.cache import ConvertedModels, default_cache_dir
from worker.model.embedded import EMBEDDED_MODEL, embedded_model
from worker.model.source import resolve_model


class TerminalProgress:
    """One line on stderr for each stage, rewritten in place on a terminal."""

    def __init__(self) -> None:
        self._shown = ("", -1)

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show how far `what` is; without a terminal, only that it is complete."""
        percent = 100 * done // max(total, 1)
        terminal = sys.stderr.isatty()
        if (what, percent) == self._shown or (not terminal and percent < 100):
            return
        self._shown = (what, percent)
        start, end = ("\r" if terminal else "", "\n" if percent == 100 else "")
        sys.stderr.write(f"{start}{what}: {percent}%{end}")
        sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch and convert; print the model's directory on stdout. Exit status 1 and one sentence when it cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m worker.model.fetch", description=__doc__)
    parser.add_argument("model", nargs="?", default=EMBEDDED_MODEL, help="name, directory, .gguf file or hub id")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="instead of %(default)s")
    parser.add_argument("--verify", action="store_true", help="compare the hash of every file of the embedded model")
    options = parser.parse_args(arguments)
    progress = TerminalProgress()
    try:
        if options.verify and options.model == EMBEDDED_MODEL:
            embedded_model(ConvertedModels(cache_dir=options.cache_dir), progress, verify=True)
        files = resolve_model(options.model, cache_dir=options.cache_dir, progress=progress)
    except ModelLoadError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{files.directory}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
