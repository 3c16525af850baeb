"""One server with the default model for all clients; an answer may be wrong, its form may not."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from support.runs.fetched import node_packages
from support.runs.waiting import LIMIT

from tests.e2e.conftest import Server

MODEL = "small"
PROGRAMS = Path(__file__).parent / "programs"


def output_of_node(name: str, folder: Path, *arguments: str) -> Any:
    """Return a program's output; it is copied beside the packages, where alone Node finds them."""
    (folder / "node_modules").symlink_to(node_packages() / "node_modules")
    program = shutil.copy(PROGRAMS / name, folder)
    finished = subprocess.run(
        ["node", program, *arguments], capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


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
