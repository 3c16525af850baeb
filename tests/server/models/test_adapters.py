"""Adapters as models of the API: names, lists, loading and unloading, and who may do that."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from support.runs.waiting import until

from appliance.config import EngineConfig
from appliance.engine.process.supervisor import EngineState
from appliance.engine.run.adapters.adapter_names import AdapterRegistry
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.engine.nouns.request import AdapterRef


def make(folder: Path, content: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(content)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path / "loras" / "sql")
    make(tmp_path / "loras" / "broken")
    (tmp_path / "loras" / "poems.gguf").write_bytes(b"GGUF")
    make(tmp_path / "outside")
    return tmp_path / "loras"


def asked(server: Any) -> list[AdapterRef | None]:
    """The adapters of the requests that reach the engine from now on."""
    found: list[AdapterRef | None] = []
    engine = server.engine
    generate: Callable[[Any], Any] = engine.generate

    def note(request: Any) -> Any:
        found.append(request.adapter)
        return generate(request)

    engine.generate = note
    return found


async def test_a_request_names_an_adapter_as_its_model(serve: Any, folder: Path) -> None:
    other = make(folder.parent / "given")
    async with serve(lora_dir=str(folder), lora=f"mine={other}") as server:
        seen = asked(server)
        for name in ("sql", "echo:sql", "mine", "poems", "echo", "echo:poems"):
            body = {"model": name, "prompt": "x", "max_tokens": 1}
            answer = (await server.http.post("/v1/completions", json=body)).json()
            assert answer["model"] == name.removeprefix("echo:")
        names = [None if ref is None else ref.name for ref in seen]
        assert names == ["sql", "sql", "mine", "poems", None, "poems"]
        assert seen[0] is not None
        assert seen[2] is not None
        assert (seen[0].path, seen[2].path) == (str(folder / "sql"), str(other))
        for name in ("../outside", "outside", "echo:", "sql/..", ".", "", "echo:../outside"):
            body = {"model": name, "prompt": "x"}
            response = await server.http.post("/v1/completions", json=body)
            assert response.status_code == 404, name
            assert "'sql'" in response.json()["error"]["message"]
        (folder / "sql" / "adapter_config.json").write_text('{"r": 1}')
        body = {"model": "sql", "prompt": "x", "max_tokens": 1}
        await server.http.post("/v1/completions", json=body)
        assert seen[-1] is not None
        assert seen[-1].stamp != seen[0].stamp, "other files are another adapter"


PROTOCOLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 16, "store": False}),
    ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "stream": False}),
    ("/api/generate", {"prompt": "x", "raw": True, "stream": False}),
    ("/v1/completions", {"prompt": "xy", "echo": True, "logprobs": 1, "max_tokens": 0}),
    ("/v1/embeddings", {"input": "x"}),
    ("/api/embed", {"input": "x"}),
]


async def test_no_protocol_answers_with_the_base_instead(serve: Any, folder: Path) -> None:
    async with serve(lora_dir=str(folder)) as server:
        seen = asked(server)
        for path, body in PROTOCOLS:
            name = "sql:latest" if path.startswith("/api/") else "sql"
            response = await server.http.post(path, json={"model": name, **body})
            assert response.status_code == 200, (path, response.text)
            last = seen.pop()
            assert last is not None, path
            assert last.name == "sql", path
            assert not seen
            response = await server.http.post(path, json={"model": "none", **body})
            assert response.status_code == 404, path


async def test_models_lists_adapters_with_their_parent(serve: Any, folder: Path) -> None:
    async with serve(lora_dir=str(folder)) as server:
        listed = (await server.http.get("/v1/models")).json()["data"]
        assert [(one["id"], one["parent"]) for one in listed] == [
            ("echo", None),
            *((name, "echo") for name in ("broken", "poems", "sql")),
        ]
        one = (await server.http.get("/v1/models/echo:sql")).json()
        assert (one["id"], one["parent"]) == ("sql", "echo")
        make(folder / "late")
        assert (await server.http.get("/v1/models/late")).status_code == 200


async def test_load_and_unload(serve: Any, folder: Path) -> None:
    async with serve(lora_dir=str(folder)) as server:

        async def post(verb: str, **body: Any) -> tuple[int, str]:
            response = await server.http.post(f"/v1/{verb}_lora_adapter", json=body)
            return response.status_code, response.text

        assert (await post("load", lora_name="a", lora_path="sql"))[0] == 200
        assert (await post("load", lora_name="a", lora_path=str(folder / "sql")))[0] == 200
        status, text = await post("load", lora_name="a", lora_path="poems.gguf")
        assert (status, "taken" in text) == (400, True)
        again = {"lora_name": "a", "lora_path": "poems.gguf", "load_inplace": True}
        assert (await post("load", **again))[0] == 200
        status, text = await post("load", lora_name="b", lora_path="broken")
        assert (status, "it holds NaN" in text) == (400, True)
        for path in ("../outside", "..", ".", str(folder.parent / "outside")):
            assert (await post("load", lora_name="c", lora_path=path))[0] == 403, path
        assert (await post("load", lora_name="c", lora_path="nothing"))[0] == 400
        assert (await post("load", lora_name="../c", lora_path="sql"))[0] == 400
        assert (await post("load", lora_name="echo", lora_path="sql"))[0] == 400
        for name in ("a", "sql"):
            assert (await post("unload", lora_name=name))[0] == 200
            body = {"model": name, "prompt": "x"}
            assert (await server.http.post("/v1/completions", json=body)).status_code == 404
            status, text = await post("unload", lora_name=name)
            assert (status, "poems" in text) == (404, True)
        assert (await post("load", lora_name="sql", lora_path="sql"))[0] == 200
    async with serve() as server:
        status, text = await post("load", lora_name="a", lora_path="sql")
        assert (status, "--lora-dir" in text) == (403, True)


async def test_loading_wakes_an_engine_that_sleeps_and_unloading_does_not(
    serve: Any, folder: Path
) -> None:
    async with serve(server={"idle_timeout": 0.05}, lora_dir=str(folder)) as server:
        engine = server.engine
        for path, status in (("sql", 200), ("broken", 400)):
            await until(lambda: engine.state is EngineState.ASLEEP and engine.pid is None)
            body = {"lora_name": f"new-{path}", "lora_path": path}
            answers = await asyncio.gather(
                *(server.http.post("/v1/load_lora_adapter", json=body) for _ in range(2))
            )
            assert [answer.status_code for answer in answers] == [status, status]
        await until(lambda: engine.state is EngineState.ASLEEP and engine.pid is None)
        wakes = engine.wakes.number
        body = {"lora_name": "new-sql"}
        assert (await server.http.post("/v1/unload_lora_adapter", json=body)).status_code == 200
        assert (engine.state, engine.wakes.number) == (EngineState.ASLEEP, wakes)


async def test_only_the_administrator_s_key_loads(serve: Any, folder: Path) -> None:
    keys = {"api_key": "secret-of-all", "api_keys": {"ann": "secret-of-ann"}}
    async with serve(server=keys, lora_dir=str(folder)) as server:
        for key, status in (("secret-of-ann", 403), ("secret-of-all", 200)):
            response = await server.http.post(
                "/v1/load_lora_adapter",
                json={"lora_name": "a", "lora_path": "sql"},
                headers={"authorization": f"Bearer {key}"},
            )
            assert response.status_code == status


async def test_metrics_name_the_adapters_of_open_requests(serve: Any, folder: Path) -> None:
    async with serve("holds_at=3 until=/nowhere", lora_dir=str(folder)) as server:
        body = {"model": "sql", "prompt": "x", "max_tokens": 9}
        task = asyncio.create_task(server.http.post("/v1/completions", json=body))
        await until(lambda: server.engine.num_running)
        text = (await server.http.get("/metrics")).text
        start = "vllm:lora_requests_info{"
        (line,) = [line for line in text.splitlines() if line.startswith(start)]
        assert 'running_lora_adapters="sql"' in line
        assert 'waiting_lora_adapters=""' in line
        task.cancel()


def test_names(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    with pytest.raises(ConfigError, match="own name"):
        AdapterRegistry(EngineConfig(lora=f"echo={folder}"), "echo")
    registry = AdapterRegistry(EngineConfig(lora=f"a={folder}"), "echo")
    assert registry.names() == ["a"]
    shutil.rmtree(folder)
    assert registry.find("a") is None, "its files are gone"
