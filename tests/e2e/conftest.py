from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.server_process import Server


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    running = Server(log, str(smollm2_gguf), "--served-model-name", "small", "--max-queue", "4")
    yield running
    with contextlib.suppress(ProcessLookupError):
        running.stop()
