"""`appliance serve` with a model or a machine that cannot work: it prints one line and exits."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.runs.forked_commands import ForkedCommands, forked_commands


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommands]:
    with forked_commands(tmp_path_factory.mktemp("commands")) as running:
        yield running


Check = Callable[..., None]


@pytest.fixture
def check(commands: ForkedCommands) -> Check:
    """Serve with arguments; expect an exit code, and words in the only line of the error."""

    def check(arguments: list[str | Path], code: int, *words: str) -> None:
        result = commands.run("serve", "--port", "0", *arguments)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        error = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(error) == 1, result.stderr
        for word in words:
            assert word in error[0]

    return check


def test_no_such_model(check: Check, tmp_path: Path) -> None:
    check([tmp_path / "absent"], 3, "absent")


def test_an_empty_gguf(check: Check, tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    check([path], 3, "empty.gguf")


def test_a_folder_without_a_tokenizer(check: Check, tiny_llama: Path) -> None:
    check([tiny_llama], 3, "tokenizer.json")


def test_a_folder_of_pickles(check: Check, tmp_path: Path, tiny_llama: Path) -> None:
    shutil.copy(tiny_llama / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    check([tmp_path], 3, "safetensors")


def test_a_port_in_use_is_found_before_anything_is_loaded(check: Check, tiny_llama: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check([tiny_llama, "--port", str(port)], 2, str(port), "--port")


def test_another_address_needs_a_key(check: Check, tiny_llama: Path) -> None:
    check([tiny_llama, "--host", "0.0.0.0"], 2, "APPLIANCE_API_KEY")


@pytest.mark.model
def test_a_truncated_gguf(check: Check, smollm2_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as whole:
        path.write_bytes(whole.read(30_000_000))
    check([path], 3, "cut.gguf")


@pytest.mark.model
def test_a_model_that_does_not_fit_names_settings_that_would(
    check: Check, smollm2_gguf: Path
) -> None:
    check([smollm2_gguf, "--kv-cache-memory", "32MiB"], 4, "8,192", "--max-model-len")


@pytest.mark.model
def test_a_context_beyond_the_models(check: Check, smollm2_gguf: Path) -> None:
    check([smollm2_gguf, "--max-model-len", "9000"], 2, "8,192")


def tokenizer_json() -> str:
    """A byte-level tokenizer without merges."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def test_a_chat_template_that_eats_memory(check: Check, tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "greedy"
    shutil.copytree(tiny_llama, folder)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "chat_template.jinja").write_text("{{ 'a'.center(3 * 10**9) }}")
    check([folder], 3, "chat template", "MiB")
