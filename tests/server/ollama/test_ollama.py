"""The `ollama` package as the client, with an engine that repeats the first message."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import ollama
import pytest
from support.echo.echo_templates import TOOLS
from support.runs.waiting import LIMIT, until

from appliance.engine.process.supervisor import EngineState
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.conftest import Running, Serve

OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo 🎈"}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHT = f"<think>\nHm, 🎈.\n</think>\n\nLet me see.\n{OSLO}{ROME}"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture
def tokenizer(tokenizer_with: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_with(TOOLS)


@asynccontextmanager
async def client_of(running: Running, **headers: str) -> AsyncIterator[ollama.AsyncClient]:
    client = ollama.AsyncClient(host=running.url, timeout=LIMIT, headers=headers)
    try:
        yield client
    finally:
        await client._client.aclose()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_whole_chat(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        answer = await client.chat(model="echo", messages=user("hello"))
        assert answer.message.role == "assistant"
        assert answer.message.content == "user\nhello"
        assert (answer.done, answer.done_reason, answer.model) == (True, "stop", "echo")
        assert answer.prompt_eval_count == len("?user\nhello?\n?assistant\n")
        assert answer.eval_count == len("?user\nhello?")
        assert answer.created_at is not None
        assert answer.created_at.endswith("Z")
        assert answer.total_duration is not None
        assert answer.prompt_eval_duration is not None
        assert answer.eval_duration is not None
        assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 0


async def test_a_chat_is_streamed_unless_a_client_says_no(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        body = {"model": "echo:latest", "messages": user("hello\u2028there")}
        response = await running.http.post("/api/chat", json=body)
        assert response.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert "".join(line["message"]["content"] for line in lines) == "user\nhello\u2028there"
        assert {line["model"] for line in lines} == {"echo:latest"}
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert lines[-1]["done_reason"] == "stop"
        assert all("eval_count" not in line for line in lines[:-1])
        text, last = "", None
        stream = await client.chat(
            model="echo", messages=user("hello"), stream=True, options={"num_predict": 7}
        )
        async for part in stream:
            text += part.message.content or ""
            last = part
        assert text == "user\nh"
        assert last is not None
        assert last.done_reason == "length"


async def test_thoughts_and_calls_whole_and_streamed(serve: Serve, tokenizer: Tokenizer) -> None:
    async with (
        serve(tokenizer=tokenizer, max_model_len=1024) as running,
        client_of(running) as client,
    ):
        asked: dict[str, Any] = {
            "model": "echo", "messages": user(THOUGHT), "tools": [WEATHER], "think": True,
        }  # fmt: skip
        whole = (await client.chat(**asked)).message
        assert whole.thinking == "Hm, 🎈."
        assert whole.content == "Let me see."
        assert whole.tool_calls is not None
        called = [(call.function.name, call.function.arguments) for call in whole.tool_calls]
        assert called == [("weather", {"city": "Oslo 🎈"}), ("weather", {"city": "Rome"})]
        thought, text = "", ""
        calls: list[Any] = []
        async for part in await client.chat(**asked, stream=True):
            thought += part.message.thinking or ""
            text += part.message.content or ""
            calls += part.message.tool_calls or []
        assert (thought, text) == (whole.thinking, whole.content)
        assert [(call.function.name, call.function.arguments) for call in calls] == called
        raw = await running.http.post("/api/chat", json={**asked, "stream": False})
        entries = raw.json()["message"]["tool_calls"]
        assert [entry["function"]["index"] for entry in entries] == [0, 1]
        assert len({entry["id"] for entry in entries}) == 2


async def test_of_a_call_that_is_cut_nothing_is_lost(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running, client_of(running) as client:
        answer = await client.chat(
            model="echo",
            messages=user(OSLO),
            tools=[WEATHER],
            options={"num_predict": len(OSLO) - 20},
        )
        assert answer.done_reason == "length"
        assert not answer.message.tool_calls
        assert answer.message.content is not None
        assert answer.message.content.startswith('weather {"city": "Os')


async def test_a_loop_with_a_tool(
    serve: Serve, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    encode_chat = Tokenizer.encode_chat

    def noted(self: Tokenizer, messages: Any, **options: Any) -> list[int]:
        seen.append((messages, options["tools"]))
        return encode_chat(self, messages, **options)

    monkeypatch.setattr(Tokenizer, "encode_chat", noted)
    async with serve(tokenizer=tokenizer) as running, client_of(running) as client:
        messages: list[Any] = user(f"{OSLO}{ROME}")
        first = await client.chat(model="echo", messages=messages, tools=[WEATHER])
        messages.append(first.message)
        messages += [
            {"role": "tool", "tool_name": "weather", "content": "7"},
            {"role": "tool", "tool_name": "weather", "content": "19"},
        ]
        await client.chat(model="echo", messages=messages, tools=[WEATHER])
    turns, tools = seen[-1]
    calls = turns[1]["tool_calls"]
    assert [call["function"]["arguments"]["city"] for call in calls] == ["Oslo 🎈", "Rome"]
    results = [(turn["tool_call_id"], turn["name"], turn["content"]) for turn in turns[2:]]
    assert results == [
        (calls[0]["id"], "weather", "7"),
        (calls[1]["id"], "weather", "19"),
    ]
    assert tools[0]["function"]["name"] == "weather"


async def test_a_text_with_and_without_the_chat_template(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        answer = await client.generate(model="echo", prompt="hello", system="Be brief.")
        assert answer.response == "system\nBe brief."
        raw = await client.generate(
            model="echo", prompt="hello", raw=True, options={"num_predict": 4}
        )
        assert raw.response == "hell"
        assert raw.prompt_eval_count == 5
        text = ""
        async for part in await client.generate(model="echo", prompt="hello", stream=True):
            text += part.response or ""
        assert text == "user\nhello"


async def test_a_request_without_a_prompt_only_asks_for_the_model(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        generated = await client.generate(model="echo", keep_alive=-1)
        assert (generated.done, generated.done_reason, generated.response) == (True, "load", "")
        chatted = await client.chat(model="echo", messages=[])
        assert (chatted.done, chatted.done_reason) == (True, "load")


async def test_options_reach_the_engine_or_are_refused_by_name(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        seen: list[Any] = []
        generate = running.state.engine.generate

        def noted(request: Any) -> Any:
            seen.append(request.sampling)
            return generate(request)

        running.state.engine.generate = noted  # type: ignore[method-assign]
        options: dict[str, Any] = {
            "temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1, "seed": 3,
            "stop": ["x"], "repeat_penalty": 1.2, "repeat_last_n": -1, "presence_penalty": 0.5,
            "frequency_penalty": 0.25, "num_predict": 9, "num_ctx": 100_000, "num_gpu": 99,
        }  # fmt: skip
        await client.chat(model="echo", messages=user("hi"), options=options)
        (sampling,) = seen
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.8)
        assert (sampling.min_p, sampling.seed, sampling.stop) == (0.1, 3, ("x",))
        assert (sampling.repetition_penalty, sampling.max_tokens) == (1.2, 9)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
        await client.chat(
            model="echo", messages=user("hi"), options={"num_predict": -1, "top_p": 0.0}
        )
        assert seen[-1].max_tokens > 400, "as many as fit"
        await client.chat(
            model="echo",
            messages=user("hi"),
            options={
                "num_ctx": 8192.0, "num_predict": 5.0, "top_k": 40.0, "seed": 7.0,
                "repeat_last_n": -1.0, "mirostat": 0.0, "num_keep": 4.5,
            },
        )  # fmt: skip
        assert (seen[-1].max_tokens, seen[-1].top_k, seen[-1].seed) == (5, 40, 7)
        for given, window in (
            ({"repeat_penalty": 1.1, "repeat_last_n": 64}, 64),
            ({"repeat_penalty": 1.1}, 64),  # Ollama's default
            ({"presence_penalty": 1.0, "repeat_last_n": 9.0}, 9),
            ({"repeat_penalty": 1.1, "repeat_last_n": -1}, None),
            ({"temperature": 0.5}, None),
        ):
            await client.chat(model="echo", messages=user("hi"), options=given)
            assert seen[-1].penalty_window == window
            assert seen[-1].has_penalties == ("temperature" not in given)
        off = {"repeat_penalty": 1.1, "presence_penalty": 1.0, "repeat_last_n": 0}
        await client.chat(model="echo", messages=user("hi"), options=off)
        assert not seen[-1].has_penalties
        # As ollama-ai-provider-v2 sends them; Ollama itself ignores these.
        beside = {"temperature": 0.5, "top_p": 0.8, "max_output_tokens": 9, "seed": 3}
        for options in ({}, {"seed": 4, "num_predict": 8}):
            body = {"model": "echo", "messages": user("hi"), "options": options, **beside}
            assert (await running.http.post("/api/chat", json=body)).status_code == 200
            sampling = seen[-1]
            assert (sampling.temperature, sampling.top_p) == (0.5, 0.8)
            own = (options.get("seed", 3), options.get("num_predict", 9))
            assert (sampling.seed, sampling.max_tokens) == own
        for name, value in (
            ("mirostat", 2),
            ("typical_p", 0.5),
        ):
            wrong = {"repeat_penalty": 1.2, name: value}
            with pytest.raises(ollama.ResponseError, match=name):
                await client.chat(model="echo", messages=user("hi"), options=wrong)


async def test_a_prompt_is_never_cut(serve: Serve) -> None:
    async with serve() as running:
        for fields in ({}, {"options": {"num_ctx": 64}}, {"truncate": True}):
            body = {"model": "echo", "messages": user("x" * 600), **fields}
            response = await running.http.post("/api/chat", json=body)
            assert response.status_code == 400
            assert "512" in response.json()["error"]


async def test_what_is_said_of_the_model(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        (model,) = (await client.list()).models
        assert model.model == "echo:latest"
        assert model.digest is not None
        assert len(model.digest) == 64
        (loaded,) = (await client.ps()).models
        assert (loaded.model, loaded.digest) == (model.model, model.digest)
        assert loaded.context_length == 512
        assert loaded.details is not None
        assert loaded.details.format == "safetensors"
        assert loaded.size_vram == 0, "`ollama ps` prints the share of a GPU from it"
        shown = await client.show("echo:latest")
        assert shown.capabilities == ["completion", "tools"]
        assert shown.modelinfo is not None
        # VS Code's Copilot shows a model with this name and this context.
        assert shown.modelinfo["general.basename"] == "echo"
        assert shown.modelinfo["general.architecture"] == "echo"
        assert shown.modelinfo["echo.context_length"] == 512
        version = (await running.http.get("/api/version")).json()["version"]
        assert [number.isdecimal() for number in version.split(".")] == [True] * 3


# Ollama's format_test.go, and what its library shows of SmolLM2 135M and Qwen2.5 7B.
SIZES = {
    0: ("", None),
    999: ("999", 999),
    1000: ("1K", 1000),
    1001: ("1K", 1001),
    1_000_000: ("1M", 1_000_000),
    125_000_000: ("125M", 125_000_000),
    500_550_000: ("500.55M", 500_550_000),
    134_515_008: ("134.52M", 134_515_008),
    2_850_000_000: ("2.9B", 2_850_000_000),
    7_615_616_512: ("7.6B", 7_615_616_512),
    1_000_000_000_000: ("1000B", 1_000_000_000_000),
}


async def test_how_many_parameters_it_has(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        supervisor = running.engine.supervisor
        assert supervisor.info is not None
        for count, expected in SIZES.items():
            supervisor.info = msgspec.structs.replace(supervisor.info, num_parameters=count)
            (listed,), (loaded,) = (await client.list()).models, (await client.ps()).models
            shown = await client.show("echo")
            for details in (listed.details, loaded.details, shown.details):
                assert details is not None
                assert details.parameter_size == expected[0]
            assert shown.modelinfo is not None
            assert shown.modelinfo.get("general.parameter_count") == expected[1]


async def test_the_root_says_that_ollama_runs_but_to_a_browser(serve: Serve) -> None:
    async with serve(server={"api_key": "secret-key"}) as running:
        plain = await running.http.get("/")
        assert plain.text == "Ollama is running"
        assert plain.headers["vary"] == "accept"
        assert (await running.http.head("/")).status_code == 200
        page = await running.http.get("/", headers={"accept": "text/html,*/*;q=0.8"})
        assert page.headers["content-type"].startswith("text/html")
        assert page.headers["vary"] == "accept"


async def test_errors_have_the_shape_of_the_protocol(serve: Serve, tokenizer: Tokenizer) -> None:
    async with (
        serve(server={"api_key": "secret-key"}) as running,
        client_of(running, Authorization="Bearer secret-key") as client,
        client_of(running) as stranger,
    ):
        for fields, status, text in (
            ({"model": "llama3"}, 404, "llama3"),
            ({"think": True}, 400, "does not support thinking"),
            (
                {"messages": [{"role": "user", "content": "?", "images": ["AAAA"]}]},
                400,
                "texts only",
            ),
            ({"messages": [{"role": "nobody", "content": "?"}]}, 400, "role"),
            ({"format": {"type": "text"}}, 400, "format.type"),
            ({"options": {"temperature": 9.0}}, 400, "temperature"),
        ):
            body: Any = {"model": "echo", "messages": user("hi"), **fields}
            with pytest.raises(ollama.ResponseError, match=text) as refused:
                await client._request_raw("POST", "/api/chat", json=body)  # type: ignore[no-untyped-call]
            assert refused.value.status_code == status
        with pytest.raises(ollama.ResponseError, match="key is needed") as denied:
            await stranger.chat(model="echo", messages=user("hi"))
        assert denied.value.status_code == 401
        for name, value in (("suffix", "x"), ("template", "x"), ("context", [1])):
            given: Any = {name: value}
            with pytest.raises(ollama.ResponseError, match=name):
                await client.generate(model="echo", prompt="hi", **given)
        missing = await running.http.post(
            "/api/pull", json={}, headers={"authorization": "Bearer secret-key"}
        )
        assert missing.status_code == 404
        assert missing.json().keys() == {"error"}


async def test_an_error_in_mid_stream_is_a_line(serve: Serve) -> None:
    async with serve("step_seconds=0.01") as running, client_of(running) as client:
        stream = await client.chat(model="echo", messages=user("hello " * 40), stream=True)
        await anext(stream)
        running.state.engine.fail_all(ValueError("not for strangers"))
        with pytest.raises(ollama.ResponseError, match="internal error"):
            async for _ in stream:
                pass


async def test_a_keep_alive_of_nothing_unloads(serve: Serve) -> None:
    """Ollama's documents: keep_alive 0 unloads, at once without a prompt, else after the answer."""
    async with serve() as running, client_of(running) as client:
        for keep_alive in (0, "0", "0s", "0m0s"):
            generated = await client.generate(model="echo", keep_alive=keep_alive)
            assert (generated.done_reason, generated.response) == ("unload", "")
            await until(lambda: running.state.engine.state is EngineState.ASLEEP)
            assert (await client.ps()).models == []
            kept = await client.chat(model="echo", messages=user("hello"), keep_alive="5m")
            assert kept.message.content == "user\nhello"
            (loaded,) = (await client.ps()).models
            assert loaded.model == "echo:latest"
        for stream in (True, False):
            body = {"model": "echo", "messages": user("hi"), "keep_alive": 0, "stream": stream}
            answer = await running.http.post("/api/chat", json=body)
            assert answer.text.count('"done":true') == 1
            await until(lambda: running.state.engine.state is EngineState.ASLEEP)
        chatted = await client.chat(model="echo", messages=[], keep_alive=0)
        assert chatted.done_reason == "unload"


async def test_one_of_several_keys_unloads_nothing(serve: Serve) -> None:
    keys = {"api_keys": {"ann": "a-key-of-ann", "bob": "a-key-of-bob"}}
    async with (
        serve(server=keys) as running,
        client_of(running, **{"x-api-key": "a-key-of-ann"}) as ann,
    ):
        answer = await ann.generate(model="echo", keep_alive=0)
        assert answer.done_reason == "load"
        assert (await ann.ps()).models


async def test_log_probabilities_whole_and_streamed(serve: Serve, tokenizer: Tokenizer) -> None:
    """The form is that of Ollama's api/types.go, read by its client; the values are OpenAI's."""
    async with serve(tokenizer=tokenizer) as running, client_of(running) as client:
        asked: Any = {
            "model": "echo",
            "messages": user("hello"),
            "logprobs": True,
            "top_logprobs": 2,
        }
        whole = await client.chat(**asked)
        theirs = (await running.chat("hello", logprobs=True, top_logprobs=2)).json()
        wanted = theirs["choices"][0]["logprobs"]["content"]
        assert whole.logprobs is not None
        assert [one.token for one in whole.logprobs] == [one["token"] for one in wanted]
        assert [one.logprob for one in whole.logprobs] == [one["logprob"] for one in wanted]
        tops = [len(one.top_logprobs or ()) for one in whole.logprobs]
        assert tops == [len(one["top_logprobs"]) for one in wanted]
        streamed: list[Any] = []
        async for part in await client.chat(**asked, stream=True):
            streamed += part.logprobs or []
        assert [one.token for one in streamed] == [one.token for one in whole.logprobs]
        for fields in ({"prompt": "hello"}, {"prompt": "hello", "raw": True}):
            text = await client.generate(model="echo", logprobs=True, **fields)
            assert text.logprobs
        plain = await running.http.post("/api/chat", json={"model": "echo", "messages": user("x")})
        assert "logprobs" not in plain.text
        more = {**asked, "top_logprobs": 21}
        assert (await running.http.post("/api/chat", json=more)).status_code == 400


async def test_a_served_model_is_pulled_and_nothing_else_is_managed(serve: Serve) -> None:
    async with serve() as running, client_of(running) as client:
        assert (await client.pull("echo")).status == "success"
        stream = await client.pull("echo:latest", stream=True)
        assert [part.status async for part in stream] == ["success"]
        for refused in (
            client.pull("llama3"), client.create("x", from_="echo"), client.copy("echo", "x"),
            client.delete("echo"), client.push("echo"),
        ):  # fmt: skip
            with pytest.raises(ollama.ResponseError, match="appliance models") as error:
                await refused
            assert error.value.status_code == 404


async def test_a_choice_among_the_tools(serve: Serve, tokenizer: Tokenizer) -> None:
    """The words are OpenAI's, which ollama-ai-provider-v2 sends."""
    grammars: list[Any] = []
    named = {"type": "function", "function": {"name": "weather"}}
    async with serve(tokenizer=tokenizer, max_model_len=1024) as running:
        generate = running.state.engine.generate

        def noted(request: Any) -> Any:
            grammars.append(request.sampling.grammar)
            return generate(request)

        running.state.engine.generate = noted  # type: ignore[method-assign]
        body = {"model": "echo", "messages": user("hi"), "tools": [WEATHER], "stream": False}
        for choice in ("auto", "none", "required", named):
            asked = {**body, "tool_choice": choice}
            assert (await running.http.post("/api/chat", json=asked)).status_code == 200
        wrong = {**body, "tool_choice": {"type": "function", "function": {"name": "x"}}}
        assert (await running.http.post("/api/chat", json=wrong)).status_code == 400
    assert [grammar is not None for grammar in grammars] == [False, False, True, True]
