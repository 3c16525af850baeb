"""Starts a server for a soak: with an engine that repeats its prompt, or with a model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from support.echo.byte_tokenizer import save_byte_tokenizer
from support.runs.waiting import wait_until
from support.server.soak.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parents[4]


@contextmanager
def echo_server(folder: Path, knobs: str = "", **environment: str) -> Iterator[Server]:
    """Start `run_server` as the command line does, with the echo engine.

    Args:
        folder: for its files and its log.
        knobs: of the engine, see echo_worker.py.
        environment: settings, and other variables of its processes.
    """
    save_byte_tokenizer(folder)
    program, worker = TESTS / "server/serve_echo.py", TESTS / "support/support/echo/echo_worker.py"
    command = [sys.executable, str(program), str(folder), str(worker), "0", knobs]
    with started(command, folder, r"^ready (\S+)", environment) as server:
        yield server


@contextmanager
def model_server(
    folder: Path, model: Path, *arguments: str, **environment: str
) -> Iterator[Server]:
    """Start `appliance serve` as a person does.

    Args:
        folder: for its log.
        model: file or folder.
        arguments: further ones.
        environment: settings, and other variables of its processes.
    """
    command = [sys.executable, "-P", "-m", "appliance", "serve", str(model), "--port", "0"]
    ready = r"endpoint\s+(http://\S+)/v1"
    environment = {"APPLIANCE_KV_DISK": "off"} | environment
    with started([*command, *arguments], folder, ready, environment) as server:
        yield server


@contextmanager
def started(
    command: list[str], folder: Path, ready: str, environment: dict[str, str]
) -> Iterator[Server]:
    """Start a server by its command; end it on exit if it has not ended before.

    Args:
        folder: for its log.
        ready: pattern of the line that says its URL.
        environment: settings, and other variables of its processes.
    """
    log = folder / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env={**os.environ, **environment}
        )

    def look() -> re.Match[str] | None:
        assert process.poll() is None, f"the server ended:\n{log.read_text()}"
        return re.search(ready, log.read_text(), re.M)

    try:
        found = wait_until(look, log.read_text)
        assert found is not None
        yield Server(found[1], process.pid)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
