"""Compile the `.proto` files into the committed, typed stubs.

    python protos/generate.py           # write them
    python protos/generate.py --check   # exit 1 when the committed ones differ

Needs the `codegen` dependency group in an environment of its own: its pinned, old protobuf generator is what
sets the runtime floor in `pyproject.toml`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos").glob("*.proto"))
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def compile_into(out: Path) -> None:
    """Run protoc over every `.proto` file, writing under `out`."""
    from grpc_tools import protoc  # only the codegen environment has it

    options = [f"--{kind}_out={out}" for kind in ("python", "mypy", "grpc_python", "mypy_grpc")]
    code = protoc.main(["protoc", f"-I{ROOT}", *options, *PROTOS])
    if code:
        sys.exit(code)


def stubs(root: Path) -> dict[str, bytes]:
    """Every generated file below `root/protos`, by name."""
    return {path.name: path.read_bytes() for pattern in PATTERNS for path in (root / "protos").glob(pattern)}


def main() -> None:
    if "--check" not in sys.argv[1:]:
        compile_into(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        compile_into(Path(folder))
        fresh, committed = stubs(Path(folder)), stubs(ROOT)
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    if stale:
        sys.exit(f"stale stubs, run `make protos`: {', '.join(stale)}")
    print(f"{len(fresh)} stubs are up to date")


if __name__ == "__main__":
    main()
