"""A server of several models: names, loading on demand, and the information about each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import ollama
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.runs.waiting import until

from appliance.engine.process.supervisor import EngineState
from appliance.errors import ConfigError
from appliance.events import Info
from appliance.server.dashboard.watcher import Watcher
from appliance.server.http import stream

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Running, Serve

MIB = 2**20
ROOM = {"models_memory": 25 * MIB}
HALF = f"needs={10 * MIB}"


def states(running: Running) -> dict[str, str]:
    return {one.model_id: one.engine.state.value for one in running.server.models}


async def say(running: Running, model: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": "abc", "max_tokens": 3, **fields}
    found: dict[str, Any] = (await running.http.post("/v1/completions", json=body)).json()
    return found


async def test_a_request_loads_its_model_and_the_one_idle_longest_makes_room(serve: Serve) -> None:
    others, aliases = {"b": HALF, "c": HALF}, {"gpt": "c"}
    async with serve(HALF, server=ROOM, others=others, aliases=aliases) as running:
        assert states(running) == {"echo": "ready", "b": "asleep", "c": "asleep"}
        listed = (await running.http.get("/v1/models")).json()["data"]
        assert [(one["id"], one["state"], one["aliases"]) for one in listed] == [
            ("echo", "ready", []),
            ("b", "asleep", []),
            ("c", "asleep", ["gpt"]),
        ]
        assert (listed[0]["max_model_len"], listed[1]["max_model_len"]) == (512, None)
        texts = {"input_modalities": ["text"], "output_modalities": ["text"]}
        assert [one["architecture"] for one in listed] == [texts, None, None]
        answer = await say(running, "b")
        assert (answer["model"], answer["choices"][0]["text"]) == ("b", "abc")
        assert states(running) == {"echo": "ready", "b": "ready", "c": "asleep"}, "both fit"
        assert (await say(running, "gpt"))["model"] == "c", "by its alias"
        assert states(running) == {"echo": "asleep", "b": "ready", "c": "ready"}
        assert (await running.complete("x", max_tokens=1)).json()["model"] == "echo", "unnamed"
        assert states(running) == {"echo": "ready", "b": "asleep", "c": "ready"}

        health = await running.http.get("/health")
        assert (health.status_code, health.json()) == (
            200,
            {"status": "ok", "models": states(running)},
        )
        resident = (await running.http.get("/api/ps")).json()["models"]
        assert [one["name"] for one in resident] == ["echo:latest", "c:latest"]
        text = (await running.http.get("/metrics")).text
        families = [one.name for one in text_string_to_metric_families(text)]
        assert len(families) == len(set(families)), "each family once"
        up = {
            sample.labels["model_name"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "appliance_engine_up"
        }
        assert up == {"echo": 1, "b": 0, "c": 1}


HI = [{"role": "user", "content": "hi"}]
STREAMS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": HI}, "[DONE]"),
    ("/v1/completions", {"prompt": "hi"}, "[DONE]"),
    ("/v1/responses", {"input": "hi"}, "response.completed"),
    ("/v1/messages", {"messages": HI, "max_tokens": 2}, "message_stop"),
    ("/api/generate", {"prompt": "hi", "raw": True}, '"done":true'),
    ("/api/chat", {"messages": HI}, '"done":true'),
]


async def test_the_client_of_a_stream_is_kept_while_its_model_loads(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.2)
    gate = tmp_path / "gate"
    gate.touch()

    async def read(path: str, fields: dict[str, Any], end: str) -> None:
        body = {"model": "late", "stream": True, **fields}
        async with running.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, path
            chunks = response.aiter_bytes()
            await anext(chunks)  # no model has sent it
            waiting.discard(path)
            text = b"".join([chunk async for chunk in chunks]).decode()
        assert "late" in text, path
        assert end in text, path

    waiting = {path for path, _, _ in STREAMS}
    async with serve(others={"late": f"loads_after={gate}"}) as running:
        reading = asyncio.gather(*(read(*one) for one in STREAMS))
        await until(lambda: not waiting or reading.done(), lambda: str(waiting))
        gate.unlink()
        await reading


async def test_requests_that_come_while_a_model_loads_load_it_once(
    serve: Serve, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    async with serve(others={"late": f"loads_after={gate}"}) as running:
        asked = [asyncio.create_task(say(running, "late")) for _ in range(3)]
        late = running.server.models[1].engine
        await until(lambda: late.state is EngineState.LOADING)
        assert (await say(running, "echo"))["choices"][0]["text"] == "abc", "the others go on"
        gate.unlink()
        assert {one["model"] for one in await asyncio.gather(*asked)} == {"late"}
        assert (late.restarts, late.wakes.number) == (0, 0)


async def test_a_model_that_cannot_load_says_why_and_the_others_go_on(
    serve: Serve, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    others = {"large": f"needs={30 * MIB}", "broken": f"refuses_while={flag}"}
    async with serve(HALF, server=ROOM, others=others) as running:
        for name, why in (("large", "this does not fit"), ("broken", "is not free yet")):
            for fields in ({}, {"stream": True}):
                refused = await running.http.post(
                    "/v1/completions", json={"model": name, "prompt": "a", **fields}
                )
                assert refused.status_code == 503
                message = refused.json()["error"]["message"]
                assert f"the model '{name}' cannot be loaded: " in message
                assert why in message
        assert states(running) == {"echo": "ready", "large": "failed", "broken": "failed"}
        assert (await running.http.get("/health")).status_code == 200
        assert (await say(running, "echo"))["choices"][0]["text"] == "abc"
        flag.unlink()
        assert (await say(running, "broken"))["choices"][0]["text"] == "abc", "it is tried again"


async def test_an_unknown_name_is_told_all_that_are_served(serve: Serve) -> None:
    async with serve(others={"b": ""}) as running:
        refused = await running.http.post("/v1/completions", json={"model": "x", "prompt": "a"})
        assert refused.status_code == 404
        assert "those that are: 'echo'; 'b'" in refused.json()["error"]["message"]
        assert (await running.http.get("/v1/models/b")).json()["state"] == "asleep"
        shown = await running.http.post("/api/show", json={"model": "b:latest"})
        assert shown.status_code == 200
        assert states(running)["b"] == "ready", "what is asked about a model loads it"


async def test_a_name_of_ollama_s_list_is_known_on_every_route(serve: Serve) -> None:
    """VS Code's Copilot and goose list the models below /api and then use OpenAI's route."""
    aliases = {"gpt-x": "b"}
    async with serve(others={"b": ""}, aliases=aliases, max_model_len=2048) as running:
        async with ollama.AsyncClient(running.url) as client:
            names = [one.model for one in (await client.list()).models]
        assert names == ["echo:latest", "b:latest"]
        text: dict[str, Any] = {"role": "user", "content": "hi"}
        for name in (*names, "gpt-x:latest"):
            assert name is not None
            own = "echo" if name == names[0] else "b"
            for path, body in (
                ("/v1/chat/completions", {"messages": [text]}),
                ("/v1/completions", {"prompt": "hi"}),
                ("/v1/responses", {"input": "hi"}),
                ("/v1/messages", {"messages": [text], "max_tokens": 4}),
            ):
                answer = await running.http.post(path, json={"model": name, **body})
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == own
            assert (await running.openai.models.retrieve(name)).id == own
        unknown = {"model": "c:latest", "prompt": "hi"}
        assert (await running.http.post("/v1/completions", json=unknown)).status_code == 404


async def test_a_dashboard_follows_the_model_at_work_and_lists_all(serve: Serve) -> None:
    from appliance.server.dashboard.block_feed import BlockFeed

    async with serve(others={"b": "holds_at=4"}) as running:
        watcher = Watcher(running.server, BlockFeed(), "")
        info = watcher.poll()[0]
        assert isinstance(info, Info)
        assert {one.name: one.state for one in info.models} == states(running)
        held = asyncio.create_task(say(running, "b"))
        await until(lambda: running.server.models[1].engine.num_running == 1)
        events = watcher.poll()
        assert isinstance(events[0], Info)
        assert events[0].model == "b"
        request_id = running.server.models[1].engine.open_requests()[0][0].request_id
        await running.http.post(f"/admin/v1/requests/{request_id}/abort")
        assert "error" in await held
        assert not any(isinstance(one, Info) for one in watcher.poll()), (
            "it stays until another works"
        )


async def test_names_that_stand_for_two_things_are_refused(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names 'c', which is no model"):
        async with serve(others={"b": ""}, aliases={"x": "c"}):
            pass
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match="adapter 'a' of 'b' has a name that stands for 'echo'"):
        async with serve(others={"b": ""}, lora=f"a={tmp_path / 'b'}"):
            pass
