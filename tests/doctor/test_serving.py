"""Ports and servers that are not ours; tests/e2e/test_doctor.py tests ours."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from appliance.config import ServerConfig
from appliance.doctor.finding import Check, Finding, Grade, Scope
from appliance.doctor.serving import check_port, check_sample, check_server

Look = Callable[[Check, Scope], dict[str, Finding]]


class Foreign(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *arguments: object) -> None: ...


class Divided(Foreign):
    """A server of ours whose model is divided between two processes."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("x-request-id", "1")
        self.end_headers()
        ranks = ["share 2", "share 1, through host memory, since peer to peer changes data"]
        self.wfile.write(json.dumps({"status": "ok", "ranks": {"tiny": ranks}}).encode())


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which another program listens."""
    with listening(Foreign) as port:
        yield port


def test_a_port_that_another_program_has(
    look: Look, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_PORT", str(port))
    scope = Scope(server=ServerConfig(port=port))
    found = look(check_port, scope)["port"]
    own = psutil.Process().name()  # python or pytest, depending on how the tests were started
    assert (found.grade, f"port {port} is in use by {own}" in found.found) == (Grade.FAIL, True)
    assert "--port" in found.fix
    server = look(check_server, scope)["server"]
    assert (server.grade, "is no appliance" in server.found) == (Grade.FAIL, True)


def test_ranks_of_a_server_are_told_and_a_slower_link_is_warned_of() -> None:
    with listening(Divided) as port:
        findings = list(check_server(Scope(url=f"127.0.0.1:{port}")))
    ranks = [(one.grade, one.found) for one in findings if one.name == "rank"]
    assert [grade for grade, _ in ranks] == [Grade.OK, Grade.WARN]
    assert [found.split(",")[:2] for _, found in ranks] == [
        ["tiny", " rank 0: share 2"],
        ["tiny", " rank 1: share 1"],
    ]


def test_an_address_that_cannot_be_listened_on(look: Look) -> None:
    assert look(check_port, Scope(server=ServerConfig(port=0)))["port"].grade is Grade.OK
    found = look(check_port, Scope(server=ServerConfig(host="0.0.0.0", port=0)))["port"]
    assert (found.grade, "an API key is needed" in found.found) == (Grade.FAIL, True)


def test_a_server_that_is_not_there(look: Look) -> None:
    """Port 9 of loopback: no program listens there."""
    assert look(check_server, Scope(url="127.0.0.1:9"))["server"].grade is Grade.FAIL
    found = look(check_sample, Scope(url="127.0.0.1:9"))["sample"]
    assert (found.grade, "--model" in found.found) == (Grade.UNKNOWN, True)
