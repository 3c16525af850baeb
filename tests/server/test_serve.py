"""The API process as a whole: start, signals, end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from support.runs.waiting import LIMIT, has_ended, wait_until
from support.server.free_ports import free_port

from appliance.config import ServerConfig
from appliance.errors import ConfigError
from appliance.server.http.listener import bind, url_of

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
ECHO = HERE.parent / "support" / "support" / "echo" / "echo_worker.py"


class Server:
    """A server process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.seen: list[str] = []
        self.url = ""

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        while not self.url:
            line = self.process.stdout.readline()
            assert line, f"the server ended after {self.seen}"
            self.seen.append(line.strip())
            if line.startswith("ready"):
                self.url = line.split()[1]

    @property
    def engine(self) -> psutil.Process:
        api = psutil.Process(self.process.pid)

        def alone() -> list[psutil.Process]:
            """Only the engine, once other children no longer have their parent's command line."""
            found = [child for child in api.children() if str(ECHO) in child.cmdline()]
            return found if len(found) == 1 else []

        (child,) = wait_until(alone)
        return child


@contextmanager
def server(folder: Path, knobs: str = "", port: int = 0) -> Iterator[Server]:
    program = str(HERE / "serve_echo.py")
    with subprocess.Popen(
        [sys.executable, program, str(folder), str(ECHO), str(port), knobs],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Server(process)
        finally:
            process.kill()
            process.communicate()


def test_from_start_to_end(tokenizer_folder: Path) -> None:
    with server(tokenizer_folder) as running:
        running.wait_until_ready()
        assert running.seen[0] == "progress reading weights 1 2"
        assert running.seen[-1] == f"ready {running.url} echo 256"
        engine = running.engine
        api = psutil.Process(running.process.pid)
        listening = [c.laddr for c in api.net_connections("inet") if c.status == "LISTEN"]
        assert [address.ip for address in listening] == ["127.0.0.1"]
        assert engine.net_connections("inet") == []
        with httpx.Client(base_url=running.url, timeout=LIMIT) as http:
            assert http.get("/health").json() == {"status": "ok"}
            body = {"messages": [{"role": "user", "content": "hi"}]}
            answer = http.post("/v1/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"] == "user\nhi"
        running.process.terminate()
        assert running.process.wait(timeout=LIMIT) == 0
        wait_until(lambda: has_ended(engine))


def test_the_service_manager_is_told(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))

        def listen() -> None:
            while said := manager.recv(4096).decode():
                told.append(said)

        listening = Thread(target=listen)
        listening.start()
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "40000")
        try:
            with server(tokenizer_folder) as running:
                running.wait_until_ready()
                ready = f"READY=1\nSTATUS=serving echo at {running.url}"
                wait_until(lambda: ready in told and told[-1] == "WATCHDOG=1")
                running.process.terminate()
                assert running.process.wait(timeout=LIMIT) == 0
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
                last.sendto(b"", str(tmp_path / "notify"))
            listening.join()
    events = [said.splitlines()[0] for said in told if said != "WATCHDOG=1"]
    assert events == ["READY=1", "STOPPING=1"]


def is_refused(http: httpx.Client) -> bool:
    """Whether a request is refused; one before the signal arrives is accepted, and waits."""
    body = {"prompt": "x", "max_tokens": 1}
    try:
        return http.post("/v1/completions", json=body, timeout=1.0).status_code == 503
    except httpx.ReadTimeout:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_streams_finish(
    tokenizer_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    refused = tmp_path / "refused"
    with server(tokenizer_folder, f"holds_at=50 until={refused}") as running:
        running.wait_until_ready()
        body = {"prompt": "ab", "max_tokens": 100, "stream": True}
        with (
            httpx.Client(base_url=running.url, timeout=LIMIT) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            running.process.send_signal(number)
            with httpx.Client(base_url=running.url, timeout=LIMIT) as other:
                wait_until(lambda: is_refused(other))
                said = other.post("/v1/completions", json={"prompt": "x"}).json()
                assert "draining" in said["error"]["message"]
            refused.touch()
            data = [line for line in lines if line]
        assert data[-1] == "data: [DONE]"
        assert len(data) >= 100
        assert running.process.wait(timeout=LIMIT) == 0


def test_sighup_is_ignored_under_nohup(tokenizer_folder: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which a child inherits
    try:
        with server(tokenizer_folder) as running:
            running.wait_until_ready()
            running.process.send_signal(signal.SIGHUP)
            with httpx.Client(base_url=running.url, timeout=LIMIT) as http:
                for _ in range(2):
                    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
                    assert answer.status_code == 200
            status = Path(f"/proc/{running.process.pid}/status").read_text()
            ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
            assert ignored >> (signal.SIGHUP - 1) & 1
            running.process.terminate()
            assert running.process.wait(timeout=LIMIT) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_ends_a_stream_that_would_never_end(tokenizer_folder: Path) -> None:
    with server(tokenizer_folder, "holds_at=50") as running:
        running.wait_until_ready()
        engine = running.engine
        body = {"prompt": "ab", "max_tokens": 400, "stream": True}
        with (
            httpx.Client(base_url=running.url, timeout=LIMIT) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            running.process.terminate()
            with httpx.Client(base_url=running.url, timeout=LIMIT) as other:
                wait_until(lambda: is_refused(other))
            running.process.terminate()
            data = [line for line in lines if line]
        assert "shutting down" in json.loads(data[-1].removeprefix("data: "))["error"]["message"]
        assert running.process.wait(timeout=LIMIT) == 0
        wait_until(lambda: has_ended(engine))


def test_a_stream_has_so_much_time_to_finish_and_no_more(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_DRAIN_TIMEOUT", "0")
    with server(tokenizer_folder, "holds_at=50") as running:
        running.wait_until_ready()
        body = {"prompt": "ab", "max_tokens": 400, "stream": True}
        with (
            httpx.Client(base_url=running.url, timeout=LIMIT) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            running.process.terminate()
            data = [line for line in lines if line]
        assert "shutting down" in json.loads(data[-1].removeprefix("data: "))["error"]["message"]
        assert running.process.wait(timeout=LIMIT) == 0


def test_the_engine_ends_when_the_server_is_killed(tokenizer_folder: Path) -> None:
    with server(tokenizer_folder, "step_seconds=0.01") as running:
        running.wait_until_ready()
        engine = running.engine
        running.process.kill()
        wait_until(lambda: has_ended(engine))


def test_while_it_loads_it_says_so_and_can_be_ended(tokenizer_folder: Path) -> None:
    port = free_port()
    with server(tokenizer_folder, "slow_load", port) as running:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT) as http:

            def ask() -> httpx.Response | None:
                try:
                    return http.get("/health")
                except httpx.TransportError:
                    return None

            health = wait_until(ask)
            assert health is not None
            assert health.status_code == 503
            assert "loading" in health.json()["error"]["message"]
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        engine = running.engine
        running.process.terminate()
        assert running.process.wait(timeout=LIMIT) == 0
        wait_until(lambda: has_ended(engine))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"host": "0.0.0.0"}, "APPLIANCE_API_KEY"),
        ({"host": "::"}, "APPLIANCE_API_KEY"),
        ({"host": "0.0.0.0", "api_key": ""}, "APPLIANCE_API_KEY"),
        ({"host": "no-such-host.invalid", "api_key": "key-of-mine"}, "no address"),
        ({"host": "192.0.2.1", "api_key": "key-of-mine"}, "cannot listen"),
    ],
)
def test_addresses_that_are_refused(config: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        bind(ServerConfig(port=0, **config))  # type: ignore[arg-type]


def test_addresses_that_are_accepted() -> None:
    with bind(ServerConfig(port=0, host="0.0.0.0", api_keys={"anna": "key-of-anna"})):
        pass
    with bind(ServerConfig(port=0, host="0.0.0.0", api_key="key-of-mine")) as sock:
        assert sock.proto == socket.IPPROTO_TCP, "without it asyncio leaves Nagle's delay on"
        assert url_of(ServerConfig(host="0.0.0.0"), sock).startswith("http://127.0.0.1:")
    try:
        with bind(ServerConfig(port=0, host="::1")) as sock:
            assert url_of(ServerConfig(host="::1"), sock).startswith("http://[::1]:")
    except ConfigError:
        assert not Path("/proc/net/if_inet6").exists() or not Path("/proc/net/if_inet6").read_text()


def test_strangers_do_not_fill_the_log(tokenizer_folder: Path) -> None:
    with server(tokenizer_folder) as running:
        running.wait_until_ready()
        host, _, port = running.url.removeprefix("http://").partition(":")
        for sent in (b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n") * 20:
            with socket.create_connection((host, int(port)), timeout=LIMIT) as stranger:
                stranger.sendall(sent)
                assert stranger.recv(1000).startswith(b"HTTP/1.1 400")
        running.process.terminate()
        _, errors = running.process.communicate(timeout=LIMIT)
        assert errors.count("Invalid HTTP request") == 1, errors
