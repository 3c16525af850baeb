"""The server's lasting parts recover from failures that nobody foresaw."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.runs.waiting import LIMIT, until

from appliance import long_lived
from appliance.config import ServiceSocket, load_settings
from appliance.engine.process.supervisor import Supervisor
from appliance.errors import ApplianceError, EngineError
from appliance.server.api_server import opened_server
from appliance.server.http import certificate
from appliance.server.metrics.gpu import GpuProbe
from appliance.server.metrics.machine import MachineProbe
from appliance.server.models.model_state import ModelToServe
from appliance.server.web_server import WebServer
from appliance.service.notice import ServiceNotice
from tests.server.conftest import ECHO, Found

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from appliance.server.api_server import ApiServer, RunningServer

FILES = Path(__file__).parent / "certificates"


@asynccontextmanager
async def running(
    folder: Path, **options: Any
) -> AsyncIterator[tuple[ApiServer, asyncio.Task[None]]]:
    """A server as the command line opens it, without signals."""
    settings = load_settings({"port": 0, **options})
    ready: list[RunningServer] = []
    with opened_server(
        settings,
        [ModelToServe(Found(folder, "echo"), settings.engine)],
        engine_command=ECHO,
        notice=ServiceNotice(ServiceSocket("@nobody-listens-here", 0.001)),
    ) as server:
        task = asyncio.create_task(server.run(lambda *_: None, ready.append, signals=False))
        await until(lambda: ready or task.done())
        try:
            yield server, task
        finally:
            server.stop()
            await asyncio.gather(task, return_exceptions=True)


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """Make a method fail at its first call; return the outcome of each call."""
    real = getattr(owner, name)
    calls: list[str] = []

    def method(*arguments: Any, **options: Any) -> Any:
        calls.append("failed" if not calls else "went on")
        if len(calls) == 1:
            raise ValueError("nobody thought of this")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, method)
    return calls


@pytest.mark.parametrize(
    ("owner", "method"), [(certificate.Certificate, "refresh"), (ServiceNotice, "send")]
)
async def test_what_failed_goes_on(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    monkeypatch.setattr(long_lived, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(certificate, "SECONDS_BETWEEN_LOOKS", 0.001)
    if owner is ServiceNotice:  # so that only its watchdog sends
        monkeypatch.setattr(ServiceNotice, "ready", lambda *_: None)
    calls = fails_once(monkeypatch, owner, method)
    files = {"tls_cert": str(FILES / "good.pem"), "tls_key": str(FILES / "good.key")}
    async with running(tokenizer_folder, **files) as (_, task):
        await until(lambda: len(calls) > 2)
        assert not task.done()


async def test_a_reading_of_the_machine_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = fails_once(monkeypatch, GpuProbe, "read")
    probe = MachineProbe(list)
    found = [await probe.read(), await probe.read()]
    assert found[0] is None
    assert found[1] is not None
    assert calls == ["failed", "went on"]
    assert "nobody thought of this" in caplog.text


@pytest.mark.parametrize("part", ["the web server", "the supervision of echo"])
@pytest.mark.parametrize("how", ["raises", "returns"])
async def test_a_server_without_a_part_it_needs_ends_with_an_error(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, how: str
) -> None:
    fail = asyncio.Event()

    async def broken(*_: object) -> None:
        await fail.wait()
        if how == "raises":
            raise ValueError("nobody thought of this")

    if part == "the web server":
        monkeypatch.setattr(WebServer, "main_loop", broken)
    else:
        monkeypatch.setattr(Supervisor, "keep_alive", broken)
    async with running(tokenizer_folder) as (server, task):
        (model,) = server.state.models
        (engine,) = model.engine.replicas
        assert engine.pid is not None
        fail.set()
        async with asyncio.timeout(LIMIT):
            with pytest.raises(EngineError, match=part) as ended:
                await task
        assert ended.value.exit_code == 6
        assert isinstance(ended.value, ApplianceError)
        assert ("nobody thought of this" in str(ended.value)) is (how == "raises")
        assert engine.pid is None, "it has ended"
