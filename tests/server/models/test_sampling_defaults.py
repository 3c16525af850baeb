"""The model's recommended sampling, which applies where a request says nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from support.runs.waiting import until

from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.model_files.sampling_defaults import SamplingDefaults

if TYPE_CHECKING:
    from tests.server.conftest import Running, Serve

RECOMMENDED = SamplingDefaults(
    {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}, "a test"
)
RANDOM = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


async def sampling_of(running: Running, path: str, **fields: Any) -> dict[str, float]:
    """The engine's sampling parameters for a request with these fields."""
    question: dict[str, Any] = {"prompt": "a" * 32}
    if "chat" in path:
        question = {"messages": [{"role": "user", "content": "a" * 32}]}
    body = {**question, "max_tokens": 300, **fields}
    asked = asyncio.create_task(running.http.post(path, json=body))
    await until(lambda: bool(running.state.engine.open_requests()))
    ((request, _),) = running.state.engine.open_requests()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until(running.idle)
    return {name: getattr(request.sampling, name) for name in RANDOM}


PLAIN = {name: getattr(SamplingParams(), name) for name in RANDOM}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_they_count_unless_the_request_says_otherwise(serve: Serve, path: str) -> None:
    async with serve("step_seconds=0.02") as running:
        assert await sampling_of(running, path) == PLAIN
        running.state.sampling = RECOMMENDED
        assert await sampling_of(running, path) == {**PLAIN, **RECOMMENDED.values}
        explicit = {"temperature": 1, "top_k": 5, "top_p": 0}
        found = await sampling_of(running, path, **explicit)
        assert found == {**PLAIN, **RECOMMENDED.values, **explicit}
        null = await sampling_of(running, path, temperature=None, top_p=None)
        assert null == {**PLAIN, **RECOMMENDED.values}


async def test_a_request_that_draws_nothing_gets_none_of_them(serve: Serve) -> None:
    async with serve("step_seconds=0.02") as running:
        running.state.sampling = RECOMMENDED
        greedy = {**PLAIN, "temperature": 0}
        assert await sampling_of(running, "/v1/completions", temperature=0) == greedy
        own = {"temperature": 0, "repetition_penalty": 1.5}
        assert await sampling_of(running, "/v1/completions", **own) == {**PLAIN, **own}
        beams = await running.complete("ab", use_beam_search=True, n=2, max_tokens=2)
        assert beams.status_code == 200
        scored = await running.complete("ab", echo=True, logprobs=0, max_tokens=1)
        assert scored.status_code == 200


async def test_whoever_asks_is_told(serve: Serve) -> None:
    async with serve() as running:
        models = (await running.http.get("/v1/models")).json()["data"]
        assert models[0]["default_parameters"] == {}
        running.state.sampling = RECOMMENDED
        for path in ("/v1/models", "/v1/models/echo"):
            card = (await running.http.get(path)).json()
            card = card["data"][0] if "data" in card else card
            assert card["default_parameters"] == RECOMMENDED.values
        async with running.http.stream("GET", "/admin/v1/events") as feed:
            async for line in feed.aiter_lines():
                if line.startswith("data: "):
                    break
        assert '"sampling":{"temperature":0.2,"top_p":0.9,"repetition_penalty":1.1}' in line
        assert '"chats":true' in line
