"""A real server in this process, with an engine that repeats its prompt.

The tokenizer is byte-level: token n < 256 is byte n, so that tests can predict answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import pytest_asyncio
import uvicorn
import uvloop
from support.echo.byte_tokenizer import save_byte_tokenizer
from support.echo.echo_forks import Forks, echo_forks
from support.runs.waiting import LIMIT

from appliance.config import EngineConfig, ServerConfig
from appliance.engine.process import launch
from appliance.engine.process.client import EngineClient
from appliance.engine.process.residency import Residency
from appliance.engine.process.supervisor import SupervisionLimits
from appliance.model_files.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults
from appliance.server.app import create_app
from appliance.server.http.connection import protocol_of
from appliance.server.http.listener import bind, url_of
from appliance.server.models.model_state import ModelState
from appliance.server.models.replicas import Memories, make_engine
from appliance.server.models.state import ServerState
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from fastapi import FastAPI
    from playwright.async_api import Browser

    from appliance.engine.process.client import Replica

NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # reading theirs takes each client 40 ms
ECHO = (
    sys.executable,
    str(Path(__file__).parent.parent / "support" / "support" / "echo" / "echo_worker.py"),
)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Use the loop of the real server."""
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """One browser for all files, whose tests run on its loop; each opens a context of its own."""
    from support.server.browser import chromium

    async with chromium() as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_path(tokenizer_folder)


@pytest.fixture
def tokenizer_with(tmp_path: Path) -> Callable[..., Tokenizer]:
    """The byte tokenizer with another template and further control tokens."""

    def make(template: str, *special: str) -> Tokenizer:
        save_byte_tokenizer(tmp_path, template, special=special)
        return Tokenizer.from_path(tmp_path)

    return make


@dataclass
class Found:
    """A model's files, of which a server reads only the tokenizer."""

    path: Path
    name: str
    sampling: SamplingDefaults = NOTHING_RECOMMENDED


@dataclass
class Running:
    """A running server, and ways to talk to it."""

    url: str
    state: ModelState  # of the first model
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    app: FastAPI

    @property
    def engine(self) -> EngineClient:
        """The only engine process of the first model."""
        (engine,) = self.state.engine.replicas
        return engine

    @property
    def server(self) -> ServerState:
        return self.state.server

    async def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    async def frames(self, path: str, **fields: Any) -> list[str]:
        """The data of every frame of a stream."""
        async with self.http.stream("POST", path, json={"stream": True, **fields}) as response:
            assert response.status_code == 200, await response.aread()
            return [
                line.removeprefix("data: ")
                async for line in response.aiter_lines()
                if line.startswith("data: ")
            ]

    def idle(self) -> bool:
        """Whether the engine holds nothing for any request."""
        engine, stats = self.state.engine, self.state.engine.stats
        return (
            engine.num_running + engine.num_waiting == 0
            and stats.running + stats.waiting + stats.blocks_active == 0
            and not any(any(one.metadata or [1]) for one in engine.replicas)
        )


Serve = Callable[..., AbstractAsyncContextManager[Running]]


class QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with echo_forks(ECHO) as running:
        yield running


@pytest.fixture
def serve(
    byte_tokenizer: Tokenizer,
    tokenizer_folder: Path,
    forks: Forks,
    monkeypatch: pytest.MonkeyPatch,
) -> Serve:
    monkeypatch.setattr(launch, "subprocess", forks)

    @asynccontextmanager
    async def start(
        model: str = "",
        *,
        command: Sequence[str] = ECHO,
        tokenizer: Tokenizer = byte_tokenizer,
        limits: SupervisionLimits | None = None,
        server: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        others: Mapping[str, str] = MappingProxyType({}),
        aliases: dict[str, str] | None = None,
        **engine_options: Any,
    ) -> AsyncIterator[Running]:
        config = ServerConfig(port=0, **(server or {}))
        limits = limits or SupervisionLimits(step_timeout=LIMIT, backoff=0.01)
        whole = ServerState(config, aliases or {})
        memories = Memories(config.models_memory, is_shared=bool(others))

        def make(
            engine: EngineConfig, memory: Residency, place: int, replica: Replica | None
        ) -> EngineClient:
            return EngineClient(
                engine,
                command=command,
                limits=limits,
                idle_timeout=config.idle_timeout,
                residency=memory,
                name=engine.model,
                replica=replica,
            )

        for name, knobs in {"echo": model, **others}.items():
            settings = EngineConfig(model=knobs, **engine_options)
            engine = make_engine(settings, memories, make, gpus=())
            whole.models.append(ModelState(whole, engine, Found(tokenizer_folder, name), name))
        whole.check_names()
        state = whole.default
        sock = bind(config)
        app = create_app(whole)
        web = QuietServer(
            uvicorn.Config(
                app,
                http=protocol_of(config.max_connections),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                timeout_graceful_shutdown=1,
            )
        )
        url = url_of(config, sock)

        async def end_tokens() -> tuple[int, ...]:
            return tokenizer.eos_token_ids

        serving = asyncio.create_task(web.serve(sockets=[sock]))
        try:
            await state.engine.start(end_tokens, lambda stage, done, total: None)
            state.tokenizer, whole.is_up = tokenizer, True
            async with (
                httpx.AsyncClient(
                    base_url=url, timeout=LIMIT, headers=headers, verify=NO_AUTHORITIES
                ) as http,
                openai.AsyncOpenAI(
                    base_url=f"{url}/v1",
                    api_key=config.api_key or "unused",
                    max_retries=0,
                    timeout=LIMIT,
                    http_client=openai.DefaultAsyncHttpxClient(verify=NO_AUTHORITIES),
                ) as client,
            ):
                yield Running(url, state, http, client, app)
        finally:
            whole.closing = True
            await state.engine.close(now=True)
            for other in whole.models[1:]:
                await other.close(now=True)
            web.should_exit = True
            await serving
            whole.texts.close()

    return start
