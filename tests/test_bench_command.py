"""`appliance bench` with an engine that repeats its prompt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.runs.waiting import until
from typer.testing import CliRunner, Result

from appliance.bench.report import as_text
from appliance.cli import app
from tests.server.conftest import byte_tokenizer, forks, serve, tokenizer_folder

if TYPE_CHECKING:
    from tests.server.conftest import Serve

__all__ = ["byte_tokenizer", "forks", "serve", "tokenizer_folder"]
KEY = "0123456789abcdef"
DOCS = Path(__file__).parents[1] / "appliance" / "docs"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


async def test_each_number_of_streams_is_measured(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_API_KEY", KEY)
    async with serve(server={"api_key": KEY}, max_model_len=4096) as running:
        sizes = ("--streams", "1,3", "--repeats", "2", "--max-tokens", "9")
        result = await asyncio.to_thread(call, "--url", running.url, "--json", *sizes)
        assert result.exit_code == 0, result.exception
        await until(running.idle)
        answered = running.state.metrics.finished
    found = json.loads(result.stdout)
    assert answered == 3 + 2 * (1 + 3) + 2  # the warm-up, the bursts, the long prompts
    assert [level["streams"] for level in found["levels"]] == [1, 3]
    for level in found["levels"]:
        rate = level["output_tokens_per_second"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
    assert found["model"]["id"] == "echo"
    assert found["load"]["accepted_tokens"] == 0
    assert found["prefill"]["prompt_tokens"] > 1000  # bytes are tokens here
    text = as_text(found)
    assert "| 3 |" in text
    assert f"prompt of {found['prefill']['prompt_tokens']} tokens" in text
    for fact in (found["machine"]["cpu"], found["machine"]["time"], "weights none"):
        assert fact in text


def test_a_card_has_a_row_to_post() -> None:
    spread = {"median": 215.31, "min": 213.0, "max": 216.0}
    level = {
        "streams": 1,
        "prompt_tokens_mean": 20,
        "output_tokens_per_second": spread,
        "decode_tokens_per_second_each": spread,
        "first_token_ms": {"p50": 20, "p99": 21},
        "between_tokens_ms": {"p50": 4.6, "p99": 4.7},
    }
    result = {
        "version": "1.2",
        "machine": {
            "time": "2026-11-30T02:00:00Z", "cpu": "a CPU", "cores": 16, "load_average": [0.0],
            "python": "3.12",
            "packages": {"torch": "2.13.0", "triton": "3.7.1"}, "gpu_driver": "580.65.06",
        },
        "model": {
            "id": "llama-8b", "about": {
                "weights": "4 bits", "on": "NVIDIA GeForce RTX 4090", "KV cache": "int8",
            },
        },
        "load": {"repeats": 3, "max_tokens": 128, "accepted_tokens": 7},
        "levels": [level],
        "prefill": {
            "prompt_tokens": 512, "tokens_per_second": spread, "first_token_ms": {"p50": 90},
        },
    }  # fmt: skip
    row = "| RTX 4090 | llama-8b | 4 bits; KV int8 | 215.3 (213.0 to 216.0) |"
    row += " prompts of 20, answers of 128 tokens, 3 bursts, 7 tokens from drafts |"
    row += " appliance 1.2, driver 580.65.06, torch 2.13.0, triton 3.7.1, 2026-11-30 |  |"
    lines = as_text(result).splitlines()
    assert lines[-1] == row
    assert "GPU         RTX 4090, driver 580.65.06" in lines
    page = (DOCS / "benchmarks.md").read_text()
    assert "\n".join(lines[-3:-1]) in page, "the row fits the table"
    on_cpu = result | {"machine": {**result["machine"], "gpu_driver": "unknown"}}  # type: ignore[dict-item]
    assert "To post" not in as_text(on_cpu)


async def test_a_refusal_is_one_line(serve: Serve) -> None:
    async with serve(server={"api_key": KEY}) as running:
        result = await asyncio.to_thread(call, "--url", running.url)
    assert "refuses the key (401)" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--streams", "0"), "no list of numbers"),
        (("--streams", "1,x"), "no list of numbers"),
        (("model", "--url", "x"), "leave one out"),
        (("--url", "http://127.0.0.1:9"), "start a server with"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], says: str) -> None:
    assert says in str(call(*arguments).exception)
