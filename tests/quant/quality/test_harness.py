"""lm-evaluation-harness as a program: how we call it, and how we read its results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from appliance.errors import ConfigError, EngineUnavailableError, QuantizeError
from appliance.quant.quality.card import TaskScore
from appliance.quant.quality.harness import run_tasks, scores_of

RESULTS = {
    "results": {
        "arc": {
            "alias": "arc",
            "acc,none": 0.5,
            "acc_stderr,none": 0.1,
            "acc_norm,none": 0.25,
            "acc_norm_stderr,none": "N/A",
        },
        "gsm8k": {"exact_match,strict-match": 1, "exact_match_stderr,strict-match": 0.0},
    },
    "n-samples": {"arc": {"original": 100, "effective": 20}},
}
# Replaces the program: stores its arguments, and writes the results to the given place.
PROGRAM = """
import json, pathlib, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if options["--tasks"] == "broken":
    sys.exit(3)
out = pathlib.Path(options["--output_path"], "model")
out.mkdir(parents=True)
arguments = dict(pair.split("=", 1) for pair in options["--model_args"].split(","))
assert pathlib.Path(arguments["tokenizer"], "tokenizer.json").is_file()
results = json.loads(RESULTS)
results["results"]["called"] = {"acc,none": float(options.get("--limit", 0))}
results["n-samples"]["called"] = {"effective": len(arguments["base_url"])}
(out / "results_2026.json").write_text(json.dumps(results))
"""


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a server with one model."""

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "tiny"}]}).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Models) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(f"RESULTS = {json.dumps(RESULTS)!r}\n{PROGRAM}")
    return [sys.executable, str(program)]


def test_every_score_is_taken_with_its_error() -> None:
    assert scores_of(RESULTS) == (
        TaskScore("arc", "acc", 0.5, 0.1, 20),
        TaskScore("arc", "acc_norm", 0.25, None, 20),
        TaskScore("gsm8k", "exact_match (strict-match)", 1.0, 0.0, 0),
    )


def test_the_harness_is_told_where_to_ask(url: str, tokenizer: Path, command: list[str]) -> None:
    for written in (url, f"{url}/", f"{url}/v1"):
        scores = run_tasks(written, "arc", tokenizer, limit=7, command=command)
        assert scores[-1] == TaskScore("called", "acc", 7.0, None, len(f"{url}/v1/completions"))


def test_a_harness_that_fails_is_said(url: str, tokenizer: Path, command: list[str]) -> None:
    with pytest.raises(QuantizeError, match="lm_eval ended with 3"):
        run_tasks(url, "broken", tokenizer, command=command)


def test_without_a_server_there_is_one_line(tokenizer: Path, command: list[str]) -> None:
    with pytest.raises(EngineUnavailableError, match=r"no OpenAI-compatible server answers"):
        run_tasks("http://127.0.0.1:9", "arc", tokenizer, command=command)


def test_without_the_harness_it_says_how_to_install_it(
    url: str, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"appliance\[lm-eval\]"):
        run_tasks(url, "arc", tokenizer)
