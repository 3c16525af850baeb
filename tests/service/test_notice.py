"""Datagrams for systemd, read from a socket like systemd's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.runs.waiting import until, wait_until

from appliance.config import ServiceSocket, service_socket
from appliance.service.notice import ServiceNotice


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    address = str(tmp_path / "notify") if request.param == "file" else f"@{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + address[1:] if address.startswith("@") else address)
        sock.setblocking(False)
        yield sock, address


def received(sock: socket.socket) -> list[str]:
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(sock.recv(4096).decode())
    return found


def test_progress_is_told_once_a_second_and_asks_for_time(
    manager: tuple[socket.socket, str],
) -> None:
    sock, address = manager
    now = [100.0]
    notice = ServiceNotice(ServiceSocket(address), lambda: now[0])
    for done in (1, 2, 3):
        notice.progress("reading weights", done, 4)
    now[0] += 2
    notice.progress("reading weights", 4, 4)
    notice.progress("a\nREADY=1", 0, 0)
    more = "EXTEND_TIMEOUT_USEC=600000000"
    assert received(sock) == [
        f"STATUS=reading weights 25 %\n{more}",
        f"STATUS=reading weights 100 %\n{more}",
        f"STATUS=a READY=1\n{more}",
    ]


async def test_signs_of_life_end_where_there_are_none(manager: tuple[socket.socket, str]) -> None:
    sock, address = manager
    looks: list[bool] = []

    def is_alive() -> bool:
        looks.append(len(looks) < 2)
        return looks[-1]

    watching = asyncio.create_task(ServiceNotice(ServiceSocket(address, 0.004)).watch(is_alive))
    await until(lambda: len(looks) >= 5)
    watching.cancel()
    assert received(sock) == ["WATCHDOG=1"] * 2


def test_a_manager_that_is_behind_misses_signs_of_life_and_nothing_else(
    manager: tuple[socket.socket, str],
) -> None:
    sock, address = manager
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full:
        full.setblocking(False)
        full.connect("\0" + address[1:] if address.startswith("@") else address)
        with contextlib.suppress(BlockingIOError):
            while True:
                full.send(b"WATCHDOG=1")
    with ThreadPoolExecutor(1) as pool:
        telling = pool.submit(ServiceNotice(ServiceSocket(address)).ready, "serving")
        found: list[str] = []

        def was_told() -> bool:
            found.extend(received(sock))
            return found[-1:] == ["READY=1\nSTATUS=serving"]

        wait_until(was_told)
        telling.result()
    assert set(found[:-1]) == {"WATCHDOG=1"}


async def test_without_a_manager_nothing_is_sent(
    manager: tuple[socket.socket, str], caplog: pytest.LogCaptureFixture
) -> None:
    nobody = ServiceNotice()
    nobody.progress("a", 1, 1)
    nobody.ready("b")
    await nobody.watch(lambda: True)
    await ServiceNotice(ServiceSocket(manager[1])).watch(lambda: True)  # it wants no signs of life
    assert received(manager[0]) == []
    ServiceNotice(ServiceSocket("/nowhere")).stopping()
    assert "cannot be told: No such file" in caplog.text


def test_the_environment_tells_of_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    assert service_socket() is None
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    monkeypatch.setenv("WATCHDOG_USEC", "2500000")
    assert service_socket() == ServiceSocket("/run/x", 2.5)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))
    assert service_socket() == ServiceSocket("/run/x", None)
