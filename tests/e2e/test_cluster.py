"""`appliance cluster` on a local Ray cluster, as a person uses it, with the real default model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from support.runs.waiting import wait_until
from support.server.ray_cluster import KEY, RayCluster, ray_cluster_running

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    with ray_cluster_running() as cluster:
        yield cluster


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


def serve(cluster: RayCluster, model: Path, replicas: int = 2, **settings: Any) -> list[str]:
    port = settings.get("port", cluster.port)
    return [
        "serve", str(model), "--served-model-name", "small", "--device", "cpu",
        "--replicas", str(replicas), "--port", str(port), "--max-model-len", "1024",
        "--kv-disk", "off",
    ]  # fmt: skip


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
    assert [one["state"] for one in ray_cluster.replicas()] == ["ready"] * 2


def test_one_that_is_killed_under_load_takes_no_request_with_it(
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


def test_slow_and_wrong_clients_leave_the_others_and_the_replicas_alone(
    client: httpx.Client, ray_cluster: RayCluster
) -> None:
    expected = ask(client, "Name a colour.")
    address = (client.base_url.host, client.base_url.port)
    whole = json.dumps(body("Count to a million.", stream=True, max_tokens=900)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address[0]}\r\nAuthorization: Bearer {KEY}"
        f"\r\nContent-Type: application/json\r\nContent-Length: {len(whole)}\r\n\r\n"
    ).encode()
    # Sent twice each: nothing, half a head, half a body, a request whose answer nobody reads.
    sent = (b"", head[:30], head + whole[:20], head + whole) * 2
    with ExitStack() as rude:
        sockets = [rude.enter_context(socket.create_connection(address)) for _ in sent]
        for one, data in zip(sockets, sent, strict=True):
            one.sendall(data)
        assert ask(client, "Name a colour.") == expected
        for content, status in (
            (b"{", 400),
            (b"[]", 400),
            (b'{"messages": 3}', 400),
            (b"\xff\xfe", 400),
            (b" " * (3 << 20), 413),
        ):
            answer = client.post(
                "/v1/chat/completions",
                content=content,
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == status, (content[:20], answer.text)
            assert answer.json()["error"]["message"]
        wrong = {"authorization": "Bearer wrong"}
        assert client.post("/v1/completions", json={}, headers=wrong).status_code == 401
        assert client.get("/v1/nowhere").status_code == 404
        assert ask(client, "Name a colour.") == expected
    urls = [one["url"] for one in ray_cluster.replicas()]
    wait_until(lambda: not any(map(num_running, urls)))
    assert ask(client, "Name a colour.") == expected


def test_changed_settings_reach_one_replica_after_the_other_while_requests_go_on(
    client: httpx.Client, ray_cluster: RayCluster, smollm2_gguf: Path
) -> None:
    before = {one["url"] for one in ray_cluster.replicas()}
    expected = ask(client, "Name a colour.")
    over = Event()

    def ask_on() -> list[str]:
        found = []
        while not over.is_set():
            found.append(ask(client, "Name a colour."))
        return found

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask_on) for _ in range(2)]
        try:
            done = ray_cluster.run(*serve(ray_cluster, smollm2_gguf), "--max-num-seqs", "8")
        finally:
            over.set()
    assert done.returncode == 0, done.stderr
    assert {one["url"] for one in ray_cluster.replicas()}.isdisjoint(before)
    for answers in (one.result() for one in asked):
        assert set(answers) == {expected}, "none failed, whichever replica answered"


def num_running(url: str) -> float:
    """Return the number of sequences that a replica computes."""
    headers = {"authorization": f"Bearer {KEY}"}
    text = httpx.get(f"{url}/metrics", headers=headers, timeout=300).text
    found = re.search(r"^vllm:num_requests_running\S* (\S+)$", text, re.M)
    assert found is not None, text
    return float(found[1])


def test_what_does_not_fit_is_refused_with_what_does(
    client: httpx.Client, ray_cluster: RayCluster, smollm2_gguf: Path
) -> None:
    """tests/cluster covers the refusals that need no cluster."""
    for words, told in (
        (serve(ray_cluster, smollm2_gguf, replicas=4), "use --replicas 3 or less"),
        (
            serve(ray_cluster, smollm2_gguf, port=1),
            f"use --host 127.0.0.1 --port {ray_cluster.port}",
        ),
    ):
        done = ray_cluster.run(*words)
        assert done.returncode == 2, done.stderr
        assert told in done.stderr, done.stderr
    assert ask(client, "Are you still there?"), "and what runs goes on"
