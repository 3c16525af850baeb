"""schemathesis checks the server against the document at /openapi.json: neither says too much."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.runs.fetched import python_clients
from support.runs.waiting import until

if TYPE_CHECKING:
    from tests.server.conftest import Serve

CONFIG = Path(__file__).with_name("schemathesis.toml")
# scripts/soak sends more of each kind.
EXAMPLES = ("--phases", "fuzzing", "--max-examples", "2", "--no-shrink", "--seed", "17")


@pytest.mark.model  # it is fetched as well
async def test_the_document_and_the_server_agree(serve: Serve, tmp_path: Path) -> None:
    program = await asyncio.to_thread(python_clients)
    async with serve("num_blocks=2048") as running:
        pid = running.engine.pid
        judge = await asyncio.create_subprocess_exec(
            program / "python", "-m", "schemathesis.cli", "--config-file", CONFIG,
            "run", f"{running.url}/openapi.json", *EXAMPLES,
            cwd=tmp_path, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, _ = await judge.communicate()
        assert judge.returncode == 0, said.decode()
        assert "passed" in said.decode()
        assert running.engine.pid == pid
        await until(running.idle)
