"""`appliance doctor` beside a real server, and with a model in its own process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models.encoder_models import make, write_tokenizer
from typer.testing import CliRunner

from appliance.cli import app
from tests.e2e.conftest import Server

KEY = "0123456789abcdef"
TIMINGS = re.compile(r"first token after [\d,]+ ms, then [\d,.]+ tokens/s \((\d+)\)")


@pytest.fixture(scope="module")
def keyed(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    running = Server(log, str(smollm2_gguf), APPLIANCE_API_KEY=KEY)
    yield running
    running.stop()


Findings = dict[str, dict[str, str]]


def doctor(*arguments: str, **environment: str) -> tuple[int, Findings]:
    """Exit status, and findings by name."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments], env=environment)
    return result.exit_code, by_name(result.stdout)


def by_name(text: str) -> Findings:
    return {one["name"]: one for one in json.loads(text)["findings"]}


def test_a_server_with_the_right_key(keyed: Server, smollm2_gguf: Path) -> None:
    port = keyed.url.rpartition(":")[2]
    settings = {"APPLIANCE_PORT": port, "APPLIANCE_MODEL": str(smollm2_gguf)}
    status, found = doctor(APPLIANCE_API_KEY=KEY, **settings)
    assert status == 0, found
    assert found["port"]["found"].endswith("is held by our server")
    assert found["server"]["found"] == f"{keyed.url}: ok"
    assert found["server key"]["found"].startswith("the key is right; it serves")
    assert found["version"]["status"] == "ok"
    timings = TIMINGS.search(found["sample"]["found"])
    assert timings is not None
    assert 1 < int(timings[1]) <= 32
    assert found["model hashes"]["found"].startswith("1 of 1 right")


def test_a_server_with_a_wrong_key_or_none(keyed: Server) -> None:
    for key, words in (("another-key-0123", "refuses the key"), ("", "wants a key")):
        status, found = doctor("--quick", "--url", keyed.url, APPLIANCE_API_KEY=key)
        assert status == 1
        assert found["server"]["status"] == "ok"
        assert words in found["server key"]["found"]
        assert "APPLIANCE_API_KEY" in found["server key"]["fix"]


@pytest.mark.parametrize(("ranks", "given"), [(True, "a score"), (False, "a vector")])
def test_a_server_that_only_reads_is_sound(ranks: bool, given: str, tmp_path: Path) -> None:
    make("bert", tmp_path, ranks=ranks)
    write_tokenizer(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    kind = "sentence_transformers.models"
    modules = [{"path": "", "type": f"{kind}.Transformer"}]
    modules.append({"path": "1_Pooling", "type": f"{kind}.Pooling"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    running = Server(tmp_path / "log", str(tmp_path))
    try:
        port = running.url.rpartition(":")[2]
        settings = {"APPLIANCE_PORT": port, "APPLIANCE_MODEL": str(tmp_path)}
        status, found = doctor(**settings)
    finally:
        running.stop()
    assert status == 0, found
    assert re.search(rf"it only reads texts; {given} after [\d,]+ ms", found["sample"]["found"])
    _, alone = doctor("--model", str(tmp_path), APPLIANCE_URL="http://127.0.0.1:9")
    assert alone["sample"]["found"].startswith("this model only reads texts")
    assert alone["model"]["status"] == "ok"


def test_a_model_that_does_not_fit_with_these_settings(smollm2_gguf: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[engine]\nkv_cache_memory = '1MiB'\n")
    arguments = ("--model", str(smollm2_gguf), "--config", str(config))
    status, found = doctor(*arguments, APPLIANCE_URL="http://127.0.0.1:9", APPLIANCE_PORT="0")
    assert (status, found["sample"]["status"]) == (1, "fail")
    assert "Nearest settings" in found["sample"]["found"]


def test_a_model_in_this_process(smollm2_gguf: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "appliance", "doctor", "--json", "--model", str(smollm2_gguf)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "APPLIANCE_URL": "http://127.0.0.1:9", "APPLIANCE_PORT": "0"},
    )
    found = by_name(result.stdout)
    assert result.returncode == 0, found
    timings = TIMINGS.search(found["sample"]["found"])
    assert timings is not None, found["sample"]
    assert timings[1] == "32"
