"""The same server with the real engine and the default model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from support.runs.waiting import has_ended, until

from appliance.engine.process.launch import ENGINE_COMMAND
from appliance.engine.process.supervisor import EngineState, SupervisionLimits
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.server.conftest import Running, Serve

pytestmark = pytest.mark.model

QUESTION = "What is the capital of Japan? Answer in one word."


async def ask(running: Running) -> str:
    answer = await running.chat(QUESTION, temperature=0, max_tokens=20)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def check_scores(running: Running) -> None:
    """Check that generated tokens score the same as the same tokens in a prompt."""
    prompt = "The capital of Japan is"
    said = (await running.complete(prompt, temperature=0, max_tokens=5, logprobs=2)).json()
    made = said["choices"][0]
    text = prompt + made["text"]
    again = (await running.complete(text, echo=True, logprobs=2)).json()
    scores = again["choices"][0]["logprobs"]
    assert scores["tokens"][-5:] == made["logprobs"]["tokens"]
    assert scores["token_logprobs"][0] is None
    assert scores["token_logprobs"][-5:] == pytest.approx(
        made["logprobs"]["token_logprobs"], abs=0.02
    )


async def check_beams(running: Running) -> None:
    search = {"use_beam_search": True, "n": 2, "best_of": 4, "max_tokens": 12, "temperature": 0}
    answer = (await running.complete("The capital of Japan is", **search, logprobs=1)).json()
    first, second = answer["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert "Tokyo" in first["text"]
    for choice in (first, second):
        # A token that only marks the end is not in the list.
        said = sum(choice["logprobs"]["token_logprobs"])
        assert choice["cumulative_logprob"] <= said + 1e-6
    shown = len(first["logprobs"]["tokens"]) + len(second["logprobs"]["tokens"])
    assert answer["usage"]["completion_tokens"] in (shown, shown + 1, shown + 2)
    assert answer["usage"]["prompt_tokens"] == 5
    stopped = (await running.complete("One, two, three,", **search, stop=[","])).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert not any("," in choice["text"] for choice in stopped["choices"])
    chat = (await running.chat(QUESTION, **search)).json()
    assert "Tokyo" in chat["choices"][0]["message"]["content"]
    await until(lambda: running.engine.stats.blocks_active == 0)


def real(serve: Serve, model: Path, **options: Any) -> AbstractAsyncContextManager[Running]:
    """A server with a real engine in a process of its own."""
    return serve(
        str(model),
        command=ENGINE_COMMAND,
        tokenizer=Tokenizer.from_path(model),
        limits=SupervisionLimits(),
        device="cpu",
        threads=2,
        **options,
    )


async def test_chat_scores_beams_kill_and_disconnect(serve: Serve, smollm2_gguf: Path) -> None:
    async with real(
        serve,
        smollm2_gguf,
        max_model_len=2048,
        kv_cache_memory=2**28,
    ) as running:
        engine = running.engine
        assert "Tokyo" in await ask(running)
        await check_scores(running)
        await check_beams(running)

        async def stream(begun: asyncio.Event) -> list[str]:
            body = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True}
            found = []
            async with running.http.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        found.append(line.removeprefix("data: "))
                        begun.set()
            return found

        begun = [asyncio.Event() for _ in range(8)]
        streams = [asyncio.create_task(stream(event)) for event in begun]
        for event in begun:
            await event.wait()
        assert engine.num_running == 8
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        for lines in await asyncio.gather(*streams):
            assert "[DONE]" not in lines
            assert json.loads(lines[-1])["error"]["code"] == "engine_unavailable"
        await until(lambda: engine.state is EngineState.READY)
        assert engine.restarts == 1
        assert "Tokyo" in await ask(running)

        late = asyncio.create_task(stream(asyncio.Event()))
        await until(lambda: engine.num_running == 1)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        await until(lambda: engine.stats.aborted_total == 1)
        await until(lambda: engine.stats.running == engine.stats.blocks_active == 0)


async def test_sleep_parks_prompts_on_the_disk(
    serve: Serve, smollm2_gguf: Path, tmp_path: Path
) -> None:
    async with real(
        serve, smollm2_gguf, max_model_len=2048, kv_cache_memory=2**26, kv_disk=str(tmp_path)
    ) as running:
        engine, length = running.engine, 400
        prompt = [100 + index % 300 for index in range(length)]

        async def complete() -> tuple[str, int]:
            answer = (await running.complete(prompt, temperature=0, max_tokens=8)).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer["choices"][0]["text"], cached

        first, _ = await complete()
        again, cached = await complete()
        assert (again, cached > length - 32) == (first, True)
        process = psutil.Process(engine.pid)
        engine.sleep()
        await until(lambda: engine.pid is None)
        assert has_ended(process)
        assert (await running.http.get("/health")).json()["status"] == "asleep"
        assert await complete() == (first, cached // 16 * 16), "read from the disk"
        assert (engine.wakes.number, engine.restarts) == (1, 0)
