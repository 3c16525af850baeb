"""`appliance cluster` on a local Ray cluster, as a person uses it, with the real default model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from waiting import wait_until

pytestmark = [pytest.mark.model, pytest.mark.slow]

KEY = "key-of-the-test"
STARTS = 4  # Ray gives its own processes 15 s to import; a busy machine may need another try


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class RayCluster:
    """`ray start --head` with ports and a folder of its own, and the commands on it."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.port = free_port()
        self._environment = {
            **os.environ,
            "APPLIANCE_API_KEY": KEY,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # Ray gives its workers the last turn else
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        }
        for number in range(STARTS):
            if self._start(folder / str(number)):
                return
        raise AssertionError(f"Ray did not start {STARTS} times:\n{self._log.read_text()[-2000:]}")

    def _start(self, folder: Path) -> bool:
        folder.mkdir()
        self._log = folder / "log"
        with self._log.open("w") as stream:
            self._ray = psutil.Popen(
                [
                    *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
                    *("--port", self.address.partition(":")[2], "--num-cpus", "3"),
                    *("--include-dashboard", "false", "--temp-dir", str(folder)),
                ],
                stdout=stream,
                stderr=stream,
                env=self._environment,
            )
        while self._ray.poll() is None:
            if "--block" in self._log.read_text():
                return True
            time.sleep(0.1)
        self.end()
        return False

    def end(self) -> None:
        """End all of it, by process ids."""
        processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = [self._ray, *self._ray.children(recursive=True)]
            self._ray.terminate()
            with contextlib.suppress(psutil.TimeoutExpired):
                self._ray.wait(10)
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(processes)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `appliance cluster` on it."""
        command = [sys.executable, "-m", "appliance", "cluster", *words, "--address", self.address]
        return subprocess.run(command, capture_output=True, text=True, env=self._environment)

    def replicas(self) -> list[dict[str, Any]]:
        done = self.run("status", "--json")
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    # Sockets in the folder have names of at most 107 characters, which pytest's would use up.
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    cluster = RayCluster(folder)
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def client(ray_cluster: RayCluster, smollm2_gguf: Path) -> Iterator[httpx.Client]:
    done = ray_cluster.run(*serve(ray_cluster, smollm2_gguf))
    assert done.returncode == 0, done.stderr
    url = re.search(r"endpoint\s+(http://\S+)/v1", done.stderr)
    assert url is not None, done.stderr
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url[1], headers=headers, timeout=120) as client:
        yield client
    assert "have ended" in ray_cluster.run("stop").stdout


def serve(cluster: RayCluster, model: Path, replicas: int = 3, **settings: Any) -> list[str]:
    port = settings.get("port", cluster.port)
    return [
        *("serve", str(model), "--served-model-name", "small", "--device", "cpu"),
        *("--replicas", str(replicas), "--port", str(port), "--max-model-len", "1024"),
        *("--kv-disk", "off"),
    ]


def body(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "small", "messages": messages, "temperature": 0, "max_tokens": 48} | more


def ask(client: httpx.Client, text: str) -> str:
    answer = client.post("/v1/chat/completions", json=body(text))
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


def test_tokens_come_while_the_next_ones_are_computed(
    client: httpx.Client, ray_cluster: RayCluster
) -> None:
    replicas = ray_cluster.replicas()
    asked = body("Count to a thousand.", stream=True, max_tokens=800, min_tokens=800)
    with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
        assert answer.status_code == 200
        pieces = (piece for piece in answer.iter_raw() if b'"content":"' in piece)
        assert next(pieces).count(b"data: ") < 400
        assert sum(num_running(one["url"]) for one in replicas) == 1, "there is more to come"


def test_the_key_is_needed_and_routes_of_one_replica_say_so(client: httpx.Client) -> None:
    bare = httpx.post(f"{client.base_url}/v1/chat/completions", json=body("hello"))
    assert bare.status_code == 401
    assert client.get("/health").json()["status"] == "ok"
    assert "cluster status" in client.get("/metrics").json()["error"]["message"]


def test_a_conversation_is_found_again_where_it_was(
    client: httpx.Client, ray_cluster: RayCluster
) -> None:
    talk = body("What is the capital of Japan, and what is it known for?")
    for _ in range(3):
        answer = client.post("/v1/chat/completions", json=talk).json()
        seen = answer["usage"]["prompt_tokens"]
        talk["messages"] += [
            answer["choices"][0]["message"],
            {"role": "user", "content": "And which river flows there?"},
        ]
        usage = client.post("/v1/chat/completions", json=talk).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= seen - 16
    assert [one["state"] for one in ray_cluster.replicas()] == ["ready"] * 3


def test_one_of_three_that_is_killed_under_load_takes_no_request_with_it(
    client: httpx.Client, ray_cluster: RayCluster
) -> None:
    texts = [f"Tell a story about {number} cats." for number in range(9)]
    expected = [ask(client, text) for text in texts]
    before = ray_cluster.replicas()
    victim = before[0]
    with ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(ask, client, text) for text in texts]
        wait_until(lambda: num_running(victim["url"]))
        os.kill(victim["pid"], signal.SIGKILL)
        assert [one.result() for one in asked] == expected
    others = {one["url"] for one in before} - {victim["url"]}
    wait_until(lambda: len({one["url"] for one in ray_cluster.replicas()} - others) == 1)


def num_running(url: str) -> float:
    """Return the number of sequences that one replica computes."""
    headers = {"authorization": f"Bearer {KEY}"}
    text = httpx.get(f"{url}/metrics", headers=headers, timeout=300).text
    found = re.search(r"^vllm:num_requests_running\S* (\S+)$", text, re.M)
    assert found is not None, text
    return float(found[1])


def test_what_does_not_fit_is_refused_with_what_does(
    client: httpx.Client, ray_cluster: RayCluster, smollm2_gguf: Path
) -> None:
    for words, told in (
        (serve(ray_cluster, smollm2_gguf, replicas=4), "use --replicas 3 or less"),
        (
            serve(ray_cluster, smollm2_gguf, port=1),
            f"use --host 127.0.0.1 --port {ray_cluster.port}",
        ),
        (serve(ray_cluster, Path("no-such.gguf")), "cannot serve the model"),
        (
            [*serve(ray_cluster, smollm2_gguf, 1), "--tensor-parallel", "4"],
            "use --tensor-parallel 3",
        ),
    ):
        done = ray_cluster.run(*words)
        assert done.returncode == 2, done.stderr
        assert told in done.stderr, done.stderr
    assert ask(client, "Are you still there?"), "and what runs goes on"
