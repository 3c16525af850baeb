from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from appliance.cli import app
from appliance.commands.sizes import parse_size
from appliance.errors import ConfigError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2G", 2**31),
        ("2gib", 2**31),
        ("1.5GB", 1_500_000_000),
        ("4096", 4096),
        ("64 K", 65536),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "2x", "-1G", "G", "1 000"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["serve", "--prot", "1"], 2, "--port"),
        (["serve", "--port", "70000"], 2, "between 0 and 65535"),
        (["serve", "--kv-cache-dtype", "int3"], 2, "one of auto, fp32"),
        (["serve", "--cpu-isa", "sse2"], 2, "one of auto, avx512"),
        (["serve", "--config", "/nowhere.toml"], 2, "no configuration file"),
        (["serve", "a", "--model", "b"], 2, "two models"),
        (["serve", "--min-quality", "bits<=4"], 2, "known are kld, kld-p99"),
        (["quantize"], 2, "--out DIR is needed"),
        (["card", "/nowhere"], 3, "there is nothing at /nowhere"),
        (["evaluate", "--kv", "int3"], 2, "KV cache 'int3' is not known"),
        (["serv"], 2, "serve"),
    ],
)
def test_a_wrong_command_is_one_line_that_says_what_to_do(
    arguments: list[str], code: int, expected: str
) -> None:
    result = run(*arguments)
    assert result.returncode == code
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_help_loads_nothing_heavy() -> None:
    probe = (
        "import sys; sys.argv = ['appliance', '--help']\n"
        "from appliance.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'fastapi', 'textual', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_every_command_has_help() -> None:
    for command in ("serve", "quantize", "evaluate", "card", "top", "version", "cache"):
        result = CliRunner().invoke(app, [command, "--help"])
        assert result.exit_code == 0
        assert "Usage" in result.stdout
