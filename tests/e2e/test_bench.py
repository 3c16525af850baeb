"""`appliance bench MODEL` starts a server with the configured engine, and ends it."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from appliance.cli import app

pytestmark = pytest.mark.model


def test_a_server_of_its_own(smollm2_gguf: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        "[server]\napi_key = '0123456789abcdef'\nport = 1\n"
        "[engine]\nkv_cache_dtype = 'fp16'\nmax_model_len = 512\nprefix_caching = false\n"
    )
    config.chmod(0o600)
    sizes = ("--streams", "2", "--repeats", "1", "--max-tokens", "4")
    before = set(psutil.Process().children(recursive=True))
    result = CliRunner().invoke(
        app, ["bench", str(smollm2_gguf), "--config", str(config), "--json", *sizes]
    )
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    assert found["model"]["about"]["KV cache"] == "fp16"
    assert found["prefill"]["prompt_tokens"] < 512
    assert found["started"]["memory"]["processes"] == 2
    assert set(psutil.Process().children(recursive=True)) <= before
