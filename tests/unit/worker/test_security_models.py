"""S6 and S7: files of models that were made to do harm, and code that comes with a model."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from worker.errors import ModelLoadError, UnsafeCheckpoint
from worker.model.source import resolve_model
from worker.model.weights import list_tensors


def tensor(start: int, end: int, shape: tuple[int, ...] = (4,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def safetensors(header: object, body: bytes = bytes(16), length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


FILES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "seven bytes": lambda: b"1234567",
    "no header": lambda: struct.pack("<Q", 100),
    "truncated header": lambda: safetensors(b'{"x"', length=1000),
    "truncated data": lambda: safetensors({"x": tensor(0, 16)}, bytes(15)),
    "no data": lambda: safetensors({"x": tensor(0, 16)}, b""),
    "header of 2^62 bytes": lambda: safetensors({"x": tensor(0, 16)}, length=2**62),
    "header of 2^64-1 bytes": lambda: safetensors({"x": tensor(0, 16)}, length=2**64 - 1),
    "header of 101 MiB": lambda: safetensors(b"{" + b" " * (101 << 20) + b"}"),
    "overlapping tensors": lambda: safetensors({"x": tensor(0, 16), "y": tensor(8, 24)}, bytes(24)),
    "the same bytes twice": lambda: safetensors({"x": tensor(0, 16), "y": tensor(0, 16)}),
    "a hole": lambda: safetensors({"x": tensor(0, 16), "y": tensor(32, 48)}, bytes(48)),
    "bytes at the end": lambda: safetensors({"x": tensor(0, 16)}, bytes(17)),
    "an offset past the end": lambda: safetensors({"x": tensor(2**40, 2**40 + 16)}),
    "a negative offset": lambda: safetensors({"x": tensor(-16, 0)}),
    "an offset over 64 bits": lambda: safetensors({"x": tensor(2**64, 2**64 + 16)}),
    "reversed offsets": lambda: safetensors({"x": tensor(16, 0)}),
    "a shape of another size": lambda: safetensors({"x": tensor(0, 16, (5,))}),
    "a shape that overflows": lambda: safetensors({"x": tensor(0, 16, (2**62, 2**62))}),
    "a negative shape": lambda: safetensors({"x": tensor(0, 16, (-4,))}),
    "a type that is none": lambda: safetensors({"x": tensor(0, 16, dtype="NAN")}),
    "a type in the wrong case": lambda: safetensors({"x": tensor(0, 16, dtype="f32")}),
    "no JSON": lambda: safetensors(b"hello"),
    "a list": lambda: safetensors([1, 2]),
    "deep nesting": lambda: safetensors(b"[" * 100_000),
    "a number for a tensor": lambda: safetensors({"x": 7}),
    "JSON that is not UTF-8": lambda: safetensors(b'{"\xff": 1}'),
    "a pickle": lambda: pickle.dumps({"x": [1.0] * 1000}),
    "a zip": lambda: b"PK\x03\x04" + bytes(1000),
}


@pytest.mark.parametrize("name", FILES)
def test_s6_a_file_of_weights_that_is_wrong_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(FILES[name]())
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read: ") as caught:
        list_tensors([path])
    assert len(str(caught.value)) < 1000


def test_s6_a_file_that_is_right_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"x": tensor(0, 16), "y": tensor(16, 24, (4,), "F16")}, bytes(24)))
    assert {name: (found.shape, found.dtype) for name, found in list_tensors([path]).items()} == {
        "x": ((4,), "F32"),
        "y": ((4,), "F16"),
    }


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    "file", ["pytorch_model.bin", "model.pt", "weights.pth", "x.ckpt", "a.pkl", "b.pickle", "model.safetensors"]
)
def test_s6_pickled_weights_are_never_opened_whatever_their_name(tmp_path: Path, file: str) -> None:
    model, sign = tmp_path / "model", tmp_path / "ran"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / file).write_bytes(pickle.dumps(Bomb(sign)))
    with pytest.raises(ModelLoadError) as caught:
        list_tensors(resolve_model(str(model)).safetensors)
    assert isinstance(caught.value, UnsafeCheckpoint) == (file != "model.safetensors")
    assert not sign.exists()


@pytest.mark.parametrize("shard", ["../../etc/passwd", "/etc/passwd", "model.bin", "a/b.safetensors", 7])
def test_s6_an_index_names_safetensors_of_its_own_folder_alone(tmp_path: Path, shard: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises((UnsafeCheckpoint, ModelLoadError)):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_s7_a_model_that_brings_code_is_refused_and_none_of_it_runs(tmp_path: Path, file: str) -> None:
    sign = tmp_path / "ran"
    code = f"import pathlib; pathlib.Path({str(sign)!r}).touch()\n"
    model = tmp_path / "model"
    model.mkdir()
    (model / "evil.py").write_text(code)
    (model / "model.safetensors").write_bytes(safetensors({"x": tensor(0, 16)}))
    contents: dict[str, dict[str, Any]] = {"config.json": {"model_type": "evil"}, "tokenizer_config.json": {}}
    contents[file]["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    for name, content in contents.items():
        (model / name).write_text(json.dumps(content))
    with pytest.raises(UnsafeCheckpoint, match=rf"{file} asks to run code of its own \(auto_map\)"):
        resolve_model(str(model))
    assert not sign.exists()
