from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import pytest
from support.runs.waiting import LIMIT, until

from appliance.config import ServerConfig
from appliance.config.api_keys import ApiKey, check_keys
from appliance.errors import AuthError
from appliance.server.dashboard.web_page import DOCUMENTS, FILES, OPEN_PATHS
from appliance.server.http.errors import ForbiddenError, TooManyWrongKeysError
from appliance.server.http.keys import BURST, SECONDS_PER_GUESS, KeyCheck, WrongKeyLimit
from appliance.server.http.origins import Origins, is_loopback

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Running, Serve


async def raw(running: Running, request: bytes) -> bytes:
    """Send raw bytes; return the status line."""
    _, _, address = running.url.partition("//")
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        async with asyncio.timeout(LIMIT):
            return await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_names_of_this_machine_are_served(serve: Serve) -> None:
    async with serve() as running:
        for host in ("127.0.0.1", "localhost", "LOCALHOST:1", "[::1]", "[::1]:8080"):
            response = await running.http.get("/v1/models", headers={"host": host})
            assert response.status_code == 200, host


FOREIGN_HOSTS = [
    "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "localhost.", "x@localhost",
    "localhost/?", "localhost#", "127.0.0.2", "[::2]", "", "localhost:99999999",
]  # fmt: skip


async def test_other_names_are_refused(serve: Serve) -> None:
    async with serve() as running:
        for host in FOREIGN_HOSTS:
            for path in ("/v1/models", "/health"):
                line = await raw(running, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                assert line.split()[1] in (b"403", b"400"), (host, line)


FOREIGN_ORIGINS = [
    "null", "http://evil.example", "http://localhost.evil", "http://127.0.0.1:1", "file://",
]  # fmt: skip


async def test_web_pages_of_other_origins_are_refused(serve: Serve) -> None:
    async with serve() as running:
        for origin in FOREIGN_ORIGINS:
            for method in ("POST", "OPTIONS"):
                response = await running.http.request(
                    method, "/v1/chat/completions", headers={"origin": origin}
                )
                assert response.status_code == 403
                assert response.json()["error"]["code"] == "origin_not_allowed"
                assert not any("access-control" in name for name in response.headers)
        same = await running.http.get("/v1/models", headers={"origin": running.url})
        assert same.status_code == 200


KEY = "s3cret-key"
RIGHT: list[dict[str, str]] = [
    {"authorization": f"Bearer {KEY}"},
    {"authorization": f"bearer {KEY}"},
    {"x-api-key": KEY},
    {"authorization": f"Bearer {KEY}", "x-api-key": KEY},
]
WRONG: list[dict[str, str]] = [
    {},
    {"authorization": KEY},
    {"authorization": f"Basic {KEY}"},
    {"authorization": "Bearer"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"x-api-key": KEY.upper()},
    {"authorization": f"Bearer {KEY}", "x-api-key": "other"},
]


async def test_keys(serve: Serve) -> None:
    async with serve(server={"api_key": KEY}) as running:
        for headers in RIGHT:
            assert (await running.http.get("/v1/models", headers=headers)).status_code == 200
        for headers in WRONG:
            response = await running.http.get("/v1/models", headers=headers)
            assert response.status_code == 401, headers
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        two = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
        two += b"Authorization: Bearer other\r\nAuthorization: Bearer s3cret\r\n\r\n"
        assert b"401" in await raw(running, two)
        strange = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: \xff\xfe\r\n\r\n"
        assert b"401" in await raw(running, strange)


HOLDERS = {"anna": "key-of-anna", "codex": "key-of-codex", "tim": "key-of-tim"}


async def test_each_holder_comes_in_with_a_key_of_its_own_and_is_known_by_name(
    serve: Serve, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    server = {"api_key": KEY, "api_keys": HOLDERS}
    async with serve(f"holds_at=30 until={seen}", server=server) as running:
        both = {"authorization": "Bearer key-of-anna", "x-api-key": "key-of-codex"}
        for wrong in (both, {"x-api-key": "anna"}, {"x-api-key": ""}):
            assert (await running.http.get("/v1/models", headers=wrong)).status_code == 401
        body = {"prompt": "hi", "max_tokens": 200, "stream": True}
        async with contextlib.AsyncExitStack() as stack:
            for key in ("key-of-anna", "key-of-codex", KEY):
                headers = {"authorization": f"Bearer {key}"}
                response = await stack.enter_async_context(
                    running.http.stream("POST", "/v1/completions", json=body, headers=headers)
                )
                assert response.status_code == 200
            owners = [request.owner for request, _ in running.engine.open_requests()]
            assert owners == ["anna", "codex", "key"]
            await until(lambda: running.engine.num_running == 3)
            metrics = (await running.http.get("/metrics", headers={"x-api-key": KEY})).text
            scored = {"prompt": "hi" * 20, "echo": True, "logprobs": 0, "max_tokens": 1}
            headers = {"x-api-key": "key-of-tim"}
            asking = asyncio.create_task(
                running.http.post("/v1/completions", json=scored, headers=headers)
            )
            engine = running.engine
            await until(lambda: "tim" in {one.owner for one, _ in engine.open_requests()})
            seen.touch()
            answer = await asking
            assert answer.status_code == 200, answer.text
    for name in ("anna", "codex", "key"):
        assert (
            f'appliance_requests{{key="{name}",model_name="echo",state="running"}} 1.0' in metrics
        )
        assert (
            f'appliance_requests{{key="{name}",model_name="echo",state="waiting"}} 0.0' in metrics
        )
    assert "key-of" not in metrics


async def test_every_route_needs_the_key_but_those_that_are_open_to_all(serve: Serve) -> None:
    async with serve(server={"api_key": KEY}) as running:
        document = await running.http.get("/openapi.json", headers=RIGHT[0])
        paths = [*document.json()["paths"], *FILES, *DOCUMENTS]
        paths += ["/openapi.json", "/nothing", "/health/"]
        assert "/admin/v1/events" in paths
        for path in paths:
            for method in ("GET", "POST", "OPTIONS"):
                response = await running.http.request(method, path)
                assert (response.status_code == 401) == (path not in OPEN_PATHS), (method, path)
        odd = (
            b"//health",
            b"//",
            b"/v1/models?/health",
            b"/health/../v1/models",
            b"/%2e/v1/models",
        )
        for target in odd:
            request = b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
            assert b"401" in await raw(running, request)


async def test_request_ids_go_in_and_out(serve: Serve) -> None:
    async with serve() as running:
        given = await running.http.get("/health", headers={"x-request-id": "abc-1"})
        assert given.headers["x-request-id"] == "abc-1"
        made = await running.http.get("/health", headers={"x-request-id": "a b\tc"})
        assert len(made.headers["x-request-id"]) == 16


async def test_the_document_describes_what_is_there(serve: Serve) -> None:
    async with serve() as running:
        document = (await running.http.get("/openapi.json")).json()
        schemas = document["components"]["schemas"]
        post = document["paths"]["/v1/chat/completions"]["post"]
        body = post["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/ChatRequest"}
        n = schemas["ChatRequest"]["properties"]["n"]["anyOf"][0]
        assert (n["minimum"], n["maximum"]) == (1, 8)
        assert "422" not in str(document)
        assert "HTTPValidationError" not in schemas

        def references(node: object) -> list[str]:
            if isinstance(node, dict):
                own = [node["$ref"]] if "$ref" in node else []
                return own + [one for value in node.values() for one in references(value)]
            if isinstance(node, list):
                return [one for value in node for one in references(value)]
            return []

        for reference in references(document):
            assert reference.rpartition("/")[2] in schemas, reference


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.9.9.9", True),
     ("0.0.0.0", False), ("::", False), ("192.168.1.2", False), ("box.lan", False), ("", False)],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


async def test_a_server_answers_to_the_address_that_it_listens_on(serve: Serve) -> None:
    async with serve(server={"host": "127.0.0.2"}) as running:
        assert running.url.startswith("http://127.0.0.2:")
        assert (await running.http.get("/v1/models")).status_code == 200
        other = await running.http.get("/v1/models", headers={"host": "127.0.0.3"})
        assert other.status_code == 403
        assert "127.0.0.2" in other.json()["error"]["message"]


PROXY = {"allowed_hosts": "llm.example, other.example", "allowed_origins": "app://obsidian.md"}


async def test_names_of_a_reverse_proxy_are_allowed_by_configuration(serve: Serve) -> None:
    async with serve(server=PROXY) as running:
        for host, status in (
            ("llm.example", 200), ("LLM.example:443", 200), ("other.example", 200),
            ("localhost", 200), ("evil.example", 403), ("llm.example.evil.example", 403),
        ):  # fmt: skip
            answer = await running.http.get("/v1/models", headers={"host": host})
            assert answer.status_code == status, host
        page = {"host": "llm.example", "origin": "https://llm.example"}
        assert (await running.http.get("/v1/models", headers=page)).status_code == 200


@pytest.mark.parametrize(
    ("config", "host", "expected"),
    [
        ({"host": "0.0.0.0"}, "anything.example", True),
        ({"host": "0.0.0.0", "allowed_hosts": "llm.example"}, "anything.example", False),
        ({"host": "0.0.0.0", "allowed_hosts": "llm.example"}, "localhost", True),
        ({"host": "::1"}, "[::1]:8080", True),
        ({"host": "::1"}, "[::2]", False),
        ({"allowed_hosts": "*"}, "anything.example", True),
        ({"allowed_hosts": " , "}, "anything.example", False),
    ],
)
def test_which_hosts_are_known(config: dict[str, str], host: str, expected: bool) -> None:
    origins = Origins(ServerConfig(**config))  # type: ignore[arg-type]
    if expected:
        assert origins.check(host, []) is None
    else:
        with pytest.raises(ForbiddenError, match="allowed_hosts"):
            origins.check(host, [])


async def test_an_app_of_an_allowed_origin_may_call_and_read(serve: Serve) -> None:
    app = {"origin": "app://obsidian.md", "sec-fetch-site": "cross-site"}
    async with serve(server={**PROXY, "api_key": KEY}) as running:
        asks = await running.http.options(
            "/v1/chat/completions",
            headers=app
            | {
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization, content-type",
                "access-control-request-private-network": "true",
            },
        )
        assert asks.status_code == 204
        assert asks.headers["access-control-allow-origin"] == "app://obsidian.md"
        assert asks.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "POST" in asks.headers["access-control-allow-methods"]
        assert asks.headers["access-control-allow-private-network"] == "true"
        for headers, status in (({}, 401), (RIGHT[0], 200)):
            answer = await running.http.get("/v1/models", headers=app | headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "app://obsidian.md"
            assert "origin" in answer.headers["vary"].lower()
        body = {"prompt": "hi", "stream": True}
        streamed = await running.http.post("/v1/completions", json=body, headers=app | RIGHT[0])
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert streamed.headers["access-control-allow-origin"] == "app://obsidian.md"
        two = [("origin", "app://obsidian.md"), ("origin", "http://evil.example")]
        assert (await running.http.get("/v1/models", headers=two)).status_code == 403
        own = await running.http.get("/v1/models", headers=RIGHT[0])
        assert not any("access-control" in name for name in own.headers)


async def test_images_of_foreign_pages_take_no_watchers(serve: Serve) -> None:
    """A no-cors GET has no Origin; sixteen of them used to occupy all watchers."""
    async with serve() as running:
        for site in ("cross-site", "same-site", "nonsense"):
            image = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
            for path in ("/admin/v1/events", "/v1/models", "/metrics"):
                answer = await running.http.get(path, headers=image)
                assert answer.status_code == 403
                assert answer.json()["error"]["code"] == "site_not_allowed"
            link = await running.http.get("/", headers={"sec-fetch-site": site})
            assert link.status_code == 200, "a link to the page may stand anywhere"
        for site in ("same-origin", "none"):
            answer = await running.http.get("/v1/models", headers={"sec-fetch-site": site})
            assert answer.status_code == 200


async def test_a_body_of_two_lengths_ends_the_connection(serve: Serve) -> None:
    async with serve() as running:
        _, _, address = running.url.partition("//")
        host, _, port = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
            b"\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        async with asyncio.timeout(LIMIT):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1
        assert b"Transfer-Encoding" in answer


async def test_who_tries_keys_has_to_wait(serve: Serve) -> None:
    async with serve(server={"api_key": KEY}) as running:
        for number in range(BURST):
            wrong = {"authorization": f"Bearer guess-{number}"}
            assert (await running.http.get("/v1/models", headers=wrong)).status_code == 401
        for number in range(2):
            wrong = {"x-api-key": f"guess-x{number}"}
            begin = time.monotonic()
            answer = await running.http.get("/v1/models", headers=wrong)
            assert time.monotonic() - begin >= 1.0, "each guess holds a connection"
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "too_many_wrong_keys"
            assert 0 < int(answer.headers["retry-after"]) <= 6
            # Behind a proxy the owner has the same address.
            assert (await running.http.get("/v1/models", headers=RIGHT[0])).status_code == 200
        assert (await running.http.get("/v1/models")).status_code == 401, "no key is no guess"
        assert (await running.http.get("/health")).status_code == 200


def anna() -> dict[str, ApiKey]:
    return check_keys(None, {"anna": "key-of-anna"})


def guess(keys: KeyCheck, key: str, address: str) -> str:
    try:
        return keys.check([], [key], address) or "nobody"
    except TooManyWrongKeysError:
        return "wait"
    except AuthError:
        return "wrong"


def test_a_program_with_a_wrong_key_shuts_nobody_out() -> None:
    now = 0.0
    keys = KeyCheck(
        lambda: check_keys(None, {"anna": "key-of-anna"}), WrongKeyLimit(clock=lambda: now)
    )
    for _ in range(1000):
        assert guess(keys, "an old key", "10.0.0.1") == "wrong"
    assert guess(keys, "key-of-anna", "10.0.0.1") == "anna"

    tried = [guess(keys, f"guess {number}", "10.0.0.1") for number in range(100)]
    assert tried == ["wrong"] * (BURST - 1) + ["wait"] * (101 - BURST)
    assert guess(keys, "key-of-anna", "10.0.0.1") == "anna"
    assert keys.pause([], ["key-of-anna"], "10.0.0.1") == 0, "it is known from there now"
    assert keys.pause([], ["one more"], "10.0.0.1") > 0
    assert keys.pause([], ["one more"], "10.0.0.2") == 0
    assert guess(keys, "key-of-anna", "10.0.0.2") == "anna", "another address is not concerned"
    now += SECONDS_PER_GUESS
    assert guess(keys, "key-of-anna", "10.0.0.1") == "anna"
    assert guess(keys, "one more", "10.0.0.1") == "wrong"
    assert guess(keys, "two more", "10.0.0.1") == "wait"
    now += 3600
    assert guess(keys, "key-of-anna", "10.0.0.1") == "anna"


def test_an_address_of_ipv6_is_as_good_as_its_neighbours() -> None:
    keys = KeyCheck(
        lambda: check_keys(None, {"anna": "key-of-anna"}), WrongKeyLimit(clock=lambda: 0.0)
    )
    for number in range(BURST):
        assert guess(keys, f"guess {number}", f"2001:db8::{number:x}") == "wrong"
    assert guess(keys, "one more", "2001:db8::ffff") == "wait"
    assert guess(keys, "one more", "2001:db8:0:1::1") == "wrong"
    assert guess(keys, "one more", "::1") == "wrong"
    for address in ("::ffff:10.0.0.1", "", "unix"):
        assert guess(keys, "key-of-anna", address) == "anna"


def test_addresses_are_not_remembered_without_end() -> None:
    limit = WrongKeyLimit(clock=lambda: 0.0)
    for number in range(10_000):
        limit.note(str(number), b"digest")
    for number in range(1000):
        limit.note("9999", str(number).encode())
    assert len(limit.guessers) == 4096
    assert len(limit.guessers["9999"].wrong) == 64
