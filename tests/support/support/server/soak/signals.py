"""Signals in every phase of a server whose two models take turns: it ends, or it recovers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
from support.runs.waiting import until
from support.server.soak.server import Server, SoakError
from support.server.soak.start import started
from support.server.soak.wire import Connection, Reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

# Either model fits alone; both together do not.
CONFIG = """
[server]
port = 0
idle_timeout = "{idle}s"
models_memory = "300MiB"
[engine]
max_model_len = 512
kv_cache_memory = "16MiB"
kv_disk = "off"
[models.one]
model = '{model}'
[models.two]
model = '{model}'
"""
PHASES = ("awake", "answering", "asleep", "waking", "switching")
TO_THE_SERVER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TO_THE_ENGINE = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGHUP, 40)
SECONDS = 120.0  # seconds until a server ends or answers


@contextmanager
def two_models(folder: Path, model: Path, *, idle: float) -> Iterator[Server]:
    """Serve a model under two names, of which one at a time is in memory."""
    config = folder / "config.toml"
    config.write_text(CONFIG.format(model=model, idle=idle))
    command = [sys.executable, "-P", "-m", "appliance", "serve", "--config", str(config)]
    with started(command, folder, r"endpoint\s+(http://\S+)/v1", {}) as server:
        yield server


async def ask(server: Server, model: str, *, tokens: int = 2) -> Reply:
    """Complete a prompt."""
    async with Connection(server.url) as connection:
        body = {"model": model, "prompt": "Once", "max_tokens": tokens, "ignore_eos": True}
        return await connection.post("/v1/completions", body)


async def states(server: Server) -> dict[str, str]:
    """State of each model."""
    async with Connection(server.url) as connection:
        found = json.loads((await connection.ask("GET", "/health")).body)
    models: dict[str, str] = found["models"]
    return models


def engines(server: Server) -> list[psutil.Process]:
    """Processes of engines, including those that start or end."""
    found = []
    for child in server.process.children():
        try:
            if "engine.process" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


async def reach(server: Server, phase: str) -> AsyncIterator[None]:
    """Bring a server into a phase; on exit, wait for the requests that this took.

    Yields:
        Once, in the phase.
    """
    pending: asyncio.Task[Reply] | None = None
    if phase in ("awake", "answering", "switching"):
        await ask(server, "one")
    if phase == "answering":
        pending = asyncio.create_task(ask(server, "one", tokens=400))
        await asyncio.sleep(0.3)
    elif phase in ("asleep", "waking"):
        await until(lambda: not engines(server), "it does not fall asleep")
    if phase in ("waking", "switching"):
        before = {child.pid for child in engines(server)}
        pending = asyncio.create_task(ask(server, "two"))
        await until(lambda: {child.pid for child in engines(server)} - before, "no engine starts")
    yield
    if pending is not None:
        await asyncio.gather(pending, return_exceptions=True)


async def end_in(server: Server, phase: str, number: int) -> int:
    """Send a signal to a server in a phase, and return the exit status of its process.

    Raises:
        SoakError: it does not end, or leaves processes behind.
    """
    async for _ in reach(server, phase):
        family = server.process.children(recursive=True)
        os.kill(server.process.pid, number)
        code = await asyncio.to_thread(_wait, server.process)
        left = psutil.wait_procs(family, timeout=10)[1]
        if left:
            raise SoakError(f"{number} while {phase}: it left {left}")
    return code


def _wait(process: psutil.Process) -> int:
    try:
        return int(process.wait(SECONDS) or 0)
    except psutil.TimeoutExpired:
        raise SoakError("it does not end") from None


async def strike(server: Server, phase: str, number: int) -> None:
    """Send a signal to a server's engines in a phase; both models must answer afterwards.

    Raises:
        SoakError: one does not answer for too long.
    """
    async for _ in reach(server, phase):
        for child in engines(server):
            os.kill(child.pid, number)
    for model in ("one", "two"):
        end = asyncio.get_running_loop().time() + SECONDS
        while (reply := await ask(server, model)).status != 200:
            if reply.status != 503 or asyncio.get_running_loop().time() > end:
                raise SoakError(f"{number} while {phase}: {model} is {reply.status}")
            await asyncio.sleep(0.2)


def signals(folder: Path, model: Path) -> dict[str, Any]:
    """Send each signal to the server and to its engine in each phase.

    Args:
        folder: for its files.
        model: a GGUF file of about 100 MB.

    Raises:
        SoakError: as for `end_in` and `strike`, or a signal kills the server at once.
    """
    codes = {}
    for phase in PHASES:
        for number in TO_THE_SERVER:
            with two_models(
                folder, model, idle=1.0 if phase in ("asleep", "waking") else 60
            ) as one:
                code = asyncio.run(end_in(one, phase, number))
            codes[f"{phase} {number.name}"] = code
    if sudden := {name: code for name, code in codes.items() if code < 0}:
        raise SoakError(f"it was killed: {sudden}")
    with two_models(folder, model, idle=1.0) as one:
        for phase in PHASES:
            for blow in TO_THE_ENGINE:
                asyncio.run(strike(one, phase, blow))
        asyncio.run(one.rest())
    return {"codes": codes, "strikes": len(PHASES) * len(TO_THE_ENGINE)}
