from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors as hub

from tests.fakes.checkpoints import config_dict, write_checkpoint, write_config
from worker.errors import ModelLoadError, UnsafeCheckpoint
from worker.model.source import resolve_model


def resolve(name: object, **options: Any) -> Any:
    return resolve_model(str(name), **options)


def test_a_directory_gives_its_config_defaults_and_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))

    files = resolve(tmp_path)

    assert files.name == str(tmp_path)
    assert files.directory == tmp_path
    assert files.config["model_type"] == "llama"
    assert files.generation_config == {"temperature": 0.6}
    assert files.safetensors == (tmp_path / "model.safetensors",)
    assert not files.has_tokenizer


def test_a_tokenizer_is_noticed(tmp_path: Path) -> None:
    write_config(tmp_path, config_dict("llama"))
    (tmp_path / "tokenizer.json").write_text("{}")

    assert resolve(tmp_path, load_format="dummy").has_tokenizer


def test_dummy_weights_need_a_config_alone(tmp_path: Path) -> None:
    write_config(tmp_path, config_dict("llama"))

    assert resolve(tmp_path, load_format="dummy").safetensors == ()
    assert resolve(tmp_path / "config.json", load_format="dummy").config["hidden_size"] == 32


def test_a_config_without_weights_cannot_be_served_for_real(tmp_path: Path) -> None:
    write_config(tmp_path, config_dict("llama"))

    with pytest.raises(ModelLoadError, match="load_format=dummy"):
        resolve(tmp_path / "config.json")
    with pytest.raises(ModelLoadError, match="has no weights"):
        resolve(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "weights.pkl"])
def test_a_checkpoint_of_pickles_is_refused_with_a_way_out(tmp_path: Path, name: str) -> None:
    write_config(tmp_path, config_dict("llama"))
    (tmp_path / name).write_bytes(b"\x80\x04.")

    with pytest.raises(UnsafeCheckpoint, match=rf"{name}.*safetensors"):
        resolve(tmp_path)


def test_pickles_beside_safetensors_are_never_opened(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")

    assert resolve(tmp_path).safetensors == (tmp_path / "model.safetensors",)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_that_brings_its_own_code_is_refused(tmp_path: Path, file: str, load_format: str) -> None:
    write_checkpoint(tmp_path, "llama")
    content = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps({**content, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))

    with pytest.raises(UnsafeCheckpoint, match=rf"{file}.*auto_map"):
        resolve(tmp_path, load_format=load_format)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "model.bin", 7])
def test_an_index_may_only_name_safetensors_of_its_own_directory(tmp_path: Path, name: object) -> None:
    write_config(tmp_path, config_dict("llama"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))

    with pytest.raises(UnsafeCheckpoint):
        resolve(tmp_path)


def test_an_incomplete_download_names_the_missing_file(tmp_path: Path) -> None:
    write_config(tmp_path, config_dict("llama"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))

    with pytest.raises(ModelLoadError, match=r"has no model-1\.safetensors"):
        resolve(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_config_that_is_not_a_json_object_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)

    with pytest.raises(ModelLoadError, match=r"config\.json"):
        resolve(tmp_path)


def test_gguf_files_in_a_directory_are_pointed_out(tmp_path: Path) -> None:
    write_config(tmp_path, config_dict("llama"))
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")

    with pytest.raises(ModelLoadError, match=r"tiny\.gguf"):
        resolve(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/directory", "./nowhere", "a/b/c", "missing.gguf", "", "~no-such-user/x/y"])
def test_a_path_that_is_not_there_is_one_clear_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no"):
        resolve(name, cache_dir=tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")

    with pytest.raises(ModelLoadError, match="neither a directory nor"):
        resolve(tmp_path / "model.onnx")


def test_a_file_that_only_looks_like_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"PK\x03\x04")

    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        resolve(tmp_path / "fake.gguf", cache_dir=tmp_path / "cache")


def test_unknown_load_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="load_format"):
        resolve("smollm2-135m", load_format="pickle")


def test_a_hub_id_without_network_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)

    with pytest.raises(ModelLoadError, match=r"neither a local directory nor smollm2-135m.*the hub cannot be reached"):
        resolve("graphpool-tests/there-is-no-such-model")


@pytest.mark.parametrize(("load_format", "safetensors"), [("auto", ("model.safetensors",)), ("dummy", ())])
def test_a_hub_id_fetches_nothing_but_json_templates_and_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_format: str, safetensors: tuple[str, ...]
) -> None:
    write_checkpoint(tmp_path, "llama")
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)

    files = resolve("some-team/some-model", load_format=load_format)

    assert asked["name"] == files.name == "some-team/some-model"
    assert tuple(path.name for path in files.safetensors) == safetensors
    assert set(asked["allow_patterns"]) <= {"*.json", "*.jinja", "*.safetensors"}
    assert ("*.safetensors" in asked["allow_patterns"]) is (load_format == "auto")


def test_resolving_loads_no_tensor_library() -> None:
    check = (
        "import sys; from worker.model.source import resolve_model; "
        "resolve_model('/none') if 0 else None; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (hub.LocalEntryNotFoundError("x\n\nhttps://example.com"), "the hub cannot be reached"),
        (hub.RepositoryNotFoundError.__new__(hub.RepositoryNotFoundError), "there is no such model, or HF_TOKEN"),
        (hub.GatedRepoError.__new__(hub.GatedRepoError), "its licence must be accepted"),
        (PermissionError(13, "Permission denied", "/cache"), "Permission denied"),
        (RuntimeError("a secret"), "RuntimeError"),
    ],
)
def test_a_hub_that_does_not_give_a_model_has_a_reason(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(
        ModelLoadError, match="a/b is neither a local directory nor smollm2-135m, .*: " + reason
    ) as caught:
        resolve_model("a/b", cache_dir=tmp_path)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
