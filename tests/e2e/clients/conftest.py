"""One server with the default model for all clients; what it says may be wrong, its shape not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Server

MODEL = "small"


@pytest.fixture(scope="session")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("clients") / "log"
    running = Server(log, str(smollm2_gguf), "--served-model-name", MODEL)
    yield running
    with contextlib.suppress(ProcessLookupError):
        running.stop()


@pytest.fixture
def base_url(server: Server) -> str:
    return f"{server.url}/v1"
