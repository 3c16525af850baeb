"""What holds for every protocol: keys, limits, the queue, ids, the log, disconnecting clients."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from support.echo.echo_templates import TOOLS
from support.runs.waiting import until

from appliance.server.http import access_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from appliance.tokenizer import Tokenizer
    from tests.server.conftest import Serve

MESSAGES = [{"role": "user", "content": "hello " * 20}]
# By path: a body that asks for a streamed answer.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "stream": True},
    "/v1/responses": {"input": MESSAGES, "stream": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 300, "stream": True},
    "/api/chat": {"model": "echo", "messages": MESSAGES},
    "/api/generate": {"model": "echo", "prompt": "hello " * 20},
}
EVERY = pytest.mark.parametrize("path", BODIES)
KEY = "a-key-of-ann"


def message_of(body: dict[str, Any]) -> str:
    """The text of an error, whatever its shape."""
    error = body["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.fixture(autouse=True)
def _level_as_before() -> Iterator[None]:
    yield
    logging.getLogger(access_log.__name__).setLevel(logging.NOTSET)


@EVERY
async def test_the_key_is_wanted_in_either_header(serve: Serve, path: str) -> None:
    async with serve(server={"api_key": KEY}) as running:
        refused = await running.http.post(path, json=BODIES[path])
        assert refused.status_code == 401
        assert "API key is needed" in message_of(refused.json())
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            answer = await running.http.post(path, json=BODIES[path], headers=headers)
            assert answer.status_code == 200


@EVERY
async def test_what_a_key_may_have_open_is_counted(serve: Serve, path: str) -> None:
    async with serve(
        "holds_at=200",
        server={"api_keys": {"ann": f"{KEY} parallel=1"}},
        headers={"x-api-key": KEY},
    ) as running:
        async with running.http.stream("POST", path, json=BODIES[path]) as first:
            assert first.status_code == 200
            more = await running.http.post(path, json=BODIES[path])
            assert more.status_code == 429
            assert "1 request open" in message_of(more.json())
            assert int(more.headers["retry-after"]) > 0
        await until(running.idle)


@EVERY
async def test_a_full_queue_says_when_to_come_again(serve: Serve, path: str) -> None:
    async with serve("holds_at=200", server={"max_queue": 0}, max_num_seqs=1) as running:
        async with running.http.stream("POST", path, json=BODIES[path]) as first:
            assert first.status_code == 200
            more = await running.http.post(path, json=BODIES[path])
            assert more.status_code == 429
            assert int(more.headers["retry-after"]) > 0
        await until(running.idle)


@EVERY
async def test_a_client_that_goes_away_frees_everything(serve: Serve, path: str) -> None:
    async with serve("holds_at=200") as running:
        async with running.http.stream("POST", path, json=BODIES[path]) as response:
            assert response.status_code == 200
            assert not running.idle()
        await until(running.idle)


@EVERY
async def test_the_id_of_a_request_goes_in_and_out_and_into_the_log(
    serve: Serve, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(server={"access_log": True}) as running:
        answer = await running.http.post(
            path, json=BODIES[path], headers={"x-request-id": "mine-1"}
        )
        assert answer.headers["x-request-id"] == "mine-1"
        await until(lambda: "mine-1" in caplog.text)
        assert f"POST {path} 200" in caplog.text
        assert "hello" not in caplog.text


@EVERY
async def test_the_usual_log_tells_the_id_of_what_ended_badly(
    serve: Serve, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "appliance")
    body = BODIES[path]
    async with serve("holds_at=200") as running:
        headers = {"x-request-id": "gone-1"}
        async with running.http.stream("POST", path, json=body, headers=headers):
            pass
        await until(lambda: "ended early (x-request-id gone-1)" in caplog.text)
        await until(running.idle)
        await running.state.engine.close(now=True)
        headers = {"x-request-id": "failed-1"}
        assert (await running.http.post(path, json=body, headers=headers)).status_code == 503
        assert f"x-request-id failed-1: POST {path} failed with 503" in caplog.text


@EVERY
async def test_hundreds_of_messages_are_taken_and_bytes_are_bounded(
    serve: Serve, path: str
) -> None:
    async with serve(
        "num_blocks=2048", server={"max_body_bytes": 64 * 1024}, max_model_len=16384
    ) as running:
        body = dict(BODIES[path])
        for field in ("messages", "input"):
            if field in body:
                body[field] = [
                    {"role": role, "content": "x"} for role in ("user", "assistant") * 200
                ] + [{"role": "user", "content": "x"}]
        answer = await running.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        large = await running.http.post(path, json={**body, "user": "x" * 70_000})
        assert large.status_code == 413
        assert "65536 bytes" in message_of(large.json())


@EVERY
async def test_a_body_that_is_wrong_names_the_field(serve: Serve, path: str) -> None:
    async with serve() as running:
        for field, value in (("stream", "yes"), ("model", 5)):
            answer = await running.http.post(path, json={**BODIES[path], field: value})
            assert answer.status_code == 400
            assert field in message_of(answer.json())
        broken = await running.http.post(
            path, content=b"{", headers={"content-type": "application/json"}
        )
        assert broken.status_code == 400
        assert "JSON" in message_of(broken.json())


ANY_TYPE: tuple[dict[str, str], ...] = (
    {},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "text/plain"},
)


async def test_ollamas_bodies_need_no_content_type_but_those_of_pages_do(serve: Serve) -> None:
    """Ollama's documents send JSON with curl -d, and LiteLLM sends no content type at all."""
    async with serve() as running:
        for path in ("/api/chat", "/api/generate", "/api/show", "/api/embed"):
            body = json.dumps({"model": "echo", "messages": MESSAGES, "stream": False}).encode()
            if path != "/api/chat":
                body = b'{"model": "echo"}'
            for headers in ANY_TYPE:
                answer = await running.http.post(path, content=body, headers=headers)
                assert answer.status_code == 200, (path, headers, answer.text)
                for page in ({"origin": running.url}, {"sec-fetch-site": "same-origin"}):
                    refused = await running.http.post(
                        path, content=body, headers={**headers, **page}
                    )
                    assert refused.status_code == 415, "a page can send it without a preflight"
        for headers in ANY_TYPE:
            body = json.dumps({"messages": MESSAGES}).encode()
            other = await running.http.post("/v1/chat/completions", content=body, headers=headers)
            assert other.status_code == 415


@EVERY
async def test_a_seed_of_minus_one_is_random(serve: Serve, path: str) -> None:
    """Ollama's default options have Seed: -1, and vLLM reads -1 as no seed."""
    if path in ("/v1/responses", "/v1/messages"):
        return  # without a seed
    seeds: list[int | None] = []
    async with serve() as running:
        generate = running.state.engine.generate

        def noted(request: Any) -> Any:
            seeds.append(request.sampling.seed)
            return generate(request)

        running.state.engine.generate = noted  # type: ignore[method-assign]
        for seed in (-1, -2):
            options = {"seed": seed, "stop": ["", "zzz"]}
            fields = {"options": options} if path.startswith("/api") else options
            body = {**BODIES[path], **fields}
            assert (await running.http.post(path, json=body)).status_code == 200
        assert seeds == [None, -2]


async def test_head_is_a_get_without_its_body(serve: Serve) -> None:
    """RFC 9110, 9.3.2: the same header fields, and no content."""
    async with serve() as running:
        document = running.app.openapi()["paths"]
        paths = ["/openapi.json", *(path for path, methods in document.items() if "get" in methods)]
        assert len(paths) > 15
        for path in paths:
            path = path.replace("{model_id}", "echo")
            async with running.http.stream("GET", path) as got:
                pass
            head = await running.http.head(path)
            assert head.status_code == got.status_code, path
            assert head.content == b""
            kept = ("content-type", "content-length", "etag", "cache-control")
            for name in kept if path != "/metrics" else kept[:1]:
                assert head.headers.get(name) == got.headers.get(name), (path, name)
        posts = await running.http.head("/v1/chat/completions")
        assert (posts.status_code, posts.headers["allow"]) == (405, "POST")
        await until(running.idle)


TOOL_OF: dict[str, Any] = {
    "/v1/chat/completions": lambda name, schema: {
        "type": "function",
        "function": {"name": name, "parameters": schema},
    },
    "/v1/responses": lambda name, schema: {"type": "function", "name": name, "parameters": schema},
    "/v1/messages": lambda name, schema: {"name": name, "input_schema": schema},
    "/api/chat": lambda name, schema: {
        "type": "function",
        "function": {"name": name, "parameters": schema},
    },
}


@pytest.mark.parametrize("path", TOOL_OF)
async def test_tools_as_their_clients_define_them(serve: Serve, path: str) -> None:
    """Null for an absent keyword (Anthropic's ToolParam), and the longest names of a protocol."""
    empty = {"type": "object", "properties": None, "required": None}
    # 64 at OpenAI, 128 at Anthropic, no limit at Ollama.
    longest = 64 if path.startswith(("/v1/chat", "/v1/resp")) else 128
    async with serve(max_model_len=2048) as running:
        for name, status in (("f" * longest, 200), ("f" * (longest + 1), 400)):
            tool = TOOL_OF[path](name, empty)
            answer = await running.http.post(path, json={**BODIES[path], "tools": [tool]})
            assert answer.status_code == status, answer.text


async def test_refusals_of_a_history_are_text(serve: Serve) -> None:
    """OpenAI's schema allows them among an assistant's parts."""
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    async with serve() as running:
        for path, name in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
            body = {**BODIES[path], name: [*MESSAGES, refusal, *MESSAGES], "stream": False}
            answer = await running.http.post(path, json=body)
            assert answer.status_code == 200, answer.text


async def test_input_tokens_are_those_of_the_response(serve: Serve) -> None:
    async with serve() as running:
        counted = await running.openai.responses.input_tokens.count(input="hello there")
        answer = await running.openai.responses.create(model="echo", input="hello there")
        assert answer.usage is not None
        assert counted.input_tokens == answer.usage.input_tokens
        compact = await running.http.post("/v1/responses/compact", json={"input": "x"})
        assert compact.status_code == 404


HALF = '<tool_call>\n{"name": "f", "arguments": {"text": "\\ud83c"}}\n</tool_call>'


@pytest.mark.parametrize("path", TOOL_OF)
@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_character_in_arguments_fails_nothing(
    serve: Serve, tokenizer_with: Callable[[str], Tokenizer], path: str, *, stream: bool
) -> None:
    """JSON can escape a lone surrogate, for which UTF-8 has no bytes."""
    tool = TOOL_OF[path]("f", {"type": "object"})
    body = {**BODIES[path], "tools": [tool], "stream": stream}
    body["input" if path == "/v1/responses" else "messages"] = [{"role": "user", "content": HALF}]
    async with serve(tokenizer=tokenizer_with(TOOLS), max_model_len=2048) as running:
        answer = await running.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.text.replace('"error":null', "")
