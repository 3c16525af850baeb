"""What `appliance serve` says to a model or a machine that cannot work: one line, and it exits."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def serve(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance", "serve", "--port", "0", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)


def check(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    error = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(error) == 1, result.stderr
    for word in words:
        assert word in error[0]


def test_no_such_model(tmp_path: Path) -> None:
    check(serve(tmp_path / "absent"), 3, "absent")


def test_an_empty_gguf(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    check(serve(path), 3, "empty.gguf")


def test_a_folder_without_a_tokenizer(tiny_llama: Path) -> None:
    check(serve(tiny_llama), 3, "tokenizer.json")


def test_a_folder_of_pickles(tmp_path: Path, tiny_llama: Path) -> None:
    shutil.copy(tiny_llama / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    check(serve(tmp_path), 3, "safetensors")


def test_a_port_in_use_is_found_before_anything_is_loaded(tiny_llama: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check(serve(tiny_llama, "--port", str(port)), 2, str(port), "--port")


def test_another_address_needs_a_key(tiny_llama: Path) -> None:
    check(serve(tiny_llama, "--host", "0.0.0.0"), 2, "APPLIANCE_API_KEY")


@pytest.mark.model
def test_a_truncated_gguf(smollm2_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as whole:
        path.write_bytes(whole.read(30_000_000))
    check(serve(path), 3, "cut.gguf")


@pytest.mark.model
def test_a_model_that_does_not_fit_names_settings_that_would(smollm2_gguf: Path) -> None:
    check(serve(smollm2_gguf, "--kv-cache-memory", "32MiB"), 4, "8,192", "--max-model-len")


@pytest.mark.model
def test_a_context_beyond_the_models(smollm2_gguf: Path) -> None:
    check(serve(smollm2_gguf, "--max-model-len", "9000"), 2, "8,192")


@pytest.mark.model
def test_an_unknown_architecture_names_those_that_are_known(
    smollm2_gguf: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    check(serve(folder), 3, "MambaForCausalLM", "Llama", "Gemma3")


def tokenizer_json() -> str:
    """A byte-level tokenizer without merges."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def test_a_chat_template_that_eats_memory(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "greedy"
    shutil.copytree(tiny_llama, folder)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "chat_template.jinja").write_text("{{ 'a'.center(3 * 10**9) }}")
    check(serve(folder), 3, "chat template", "MiB")
