"""One server with the default model for all clients; an answer may be wrong, its form may not."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.e2e.conftest import Server

MODEL = "small"


@pytest.fixture(scope="session")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("clients") / "log"
    # Without a limit, now and then only the end of the context would end an answer.
    short = ("--max-model-len", "1024")
    running = Server(log, str(smollm2_gguf), "--served-model-name", MODEL, *short)
    yield running
    with contextlib.suppress(ProcessLookupError):
        running.stop()


@pytest.fixture
def url(server: Server) -> str:
    return server.url


@pytest.fixture
def base_url(url: str) -> str:
    return f"{url}/v1"


@pytest.fixture
async def openai(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client
