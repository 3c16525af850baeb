"""`appliance bench` with an engine that repeats its prompt."""

from __future__ import annotations

import asyncio
import json
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
    assert found["prefill"]["prompt_tokens"] > 1000  # bytes are tokens here
    text = as_text(found)
    assert "| 3 |" in text
    assert f"prompt of {found['prefill']['prompt_tokens']} tokens" in text
    for fact in (found["machine"]["cpu"], found["machine"]["time"], "weights none"):
        assert fact in text


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
