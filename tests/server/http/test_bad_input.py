"""Every mistake of a client gets a 4xx in OpenAI's shape, and the server continues."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from appliance.errors import RequestError
from appliance.server.http import body

if TYPE_CHECKING:
    import httpx

    from tests.server.conftest import Serve

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "hi"}


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    return error  # type: ignore[no-any-return]


BAD_BODIES = [
    b"",
    b"[]",
    b"null",
    b'"x"',
    b"{",
    b'{"prompt": "x"} {}',
    b'{"prompt": "x", "seed": NaN}',
    b'{"prompt": "x", "other": NaN}',
    b'{"prompt": "x", "other": Infinity}',
    b'{"prompt": "x", "other": 1e400}',
    b'{"prompt": "x", "temperature": 1e400}',
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "other": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "n": 1, "n": 2}',
    b'{"prompt": "x", "other": {"a": 1, "a": 2}}',
    b'\xef\xbb\xbf{"prompt": "x"}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\ud800 and more"}',
    b'{"prompt": "a\x00b"}',
    b'{"prompt": "x", "other": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"[" * 100_000,
    '{"prompt": "x"}'.encode("utf-16"),
]


async def test_what_is_not_strict_json(serve: Serve) -> None:
    async with serve() as running:
        for body in BAD_BODIES:
            response = await running.http.post(COMPLETIONS, content=body, headers=JSON)
            check_error(response, 400)
        assert (await running.complete("\x00\x01", max_tokens=2)).json()["choices"][0][
            "text"
        ] == "\x00\x01"


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


CHAT_FIELDS: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", "hi"),
    ("messages", [{"content": "hi"}]),
    ("messages", [{"role": "robot", "content": "hi"}]),
    ("messages", [{"role": "tool", "content": "hi"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("n", 0),
    ("n", -1),
    ("n", 9),
    ("n", 10**9),
    ("n", True),
    ("n", "2"),
    ("max_tokens", 0),
    ("max_tokens", -2),
    ("max_tokens", 2**63),
    ("max_tokens", 1.5),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_completion_tokens", 0),
    ("min_tokens", -1),
    ("temperature", -1),
    ("temperature", 2.01),
    ("temperature", "hot"),
    ("top_p", -0.1),
    ("top_p", 1.01),
    ("top_k", -2),
    ("min_p", -0.1),
    ("seed", 1.5),
    ("seed", 2**64),
    ("stop", list("abcdefghijklmnopq")),
    ("stop", ["x" * 257]),
    ("stop", [1]),
    ("stop_token_ids", [272]),
    ("stop_token_ids", [-1]),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"²": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"272": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {str(n): 1 for n in range(301)}),
    ("logprobs", 5),
    ("top_logprobs", 21),
    ("top_logprobs", 5),  # without logprobs
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),  # without stream
    ("ignore_eos", 1),
    ("tools", {}),
    ("tools", [{}]),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "function", "function": {}}]),
    ("tools", [{"type": "web_search", "function": {"name": "f"}}]),
    ("tools", [tool("")]),
    ("tools", [tool("a b")]),
    ("tools", [tool("f\n")]),
    ("tools", [tool("x" * 65)]),
    ("tools", [tool("f"), tool("f")]),
    ("tools", [tool(f"f{n}") for n in range(129)]),
    ("tools", [tool("f", {"type": "string"})]),
    ("tools", [tool("f", {"type": ["object"]})]),
    ("tools", [tool("f", {"properties": []})]),
    ("tools", [tool("f", [])]),
    ("tools", [tool("f", {"description": "x" * 600_000})]),
    ("tools", [tool("f", {"properties": {"a": nested(70)}})]),
    ("tools", [{"type": "function", "function": {"name": "f", "strict": "yes"}}]),
    ("tool_choice", "required"),  # without tools
    ("tool_choice", "any"),
    ("tool_choice", 5),
    ("tool_choice", {"type": "function"}),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tool_choice", {"type": "allowed_tools", "function": {"name": "f"}}),
    ("parallel_tool_calls", "no"),
    ("messages", [{"role": "assistant", "tool_calls": "f()"}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]),
    ("messages", [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}]),
    ("messages", [{"role": "assistant", "function_call": {"arguments": "{}"}}]),
    ("messages", [{"role": "user", "function_call": {"name": "f"}}]),
    ("messages", [{"role": "function", "content": "hi"}]),
    ("tools", [{"type": "custom"}]),
    ("tools", [{"type": "custom", "custom": {"name": "a b"}}]),
    ("functions", [{"name": "f"}, {"name": "f"}]),
    ("functions", [{"name": "a b"}]),
    ("functions", [{"name": "f", "parameters": {"type": "array"}}]),
    ("functions", [{"description": "nameless"}]),
    ("function_call", "required"),
    ("function_call", {"name": "f"}),  # without functions
    ("messages", [{"role": "assistant", "reasoning_content": 5}]),
    ("reasoning_effort", "enormous"),
    ("reasoning_effort", 3),
    ("thinking_token_budget", -1),
    ("thinking_token_budget", 1.5),
    ("chat_template_kwargs", []),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"add_generation_prompt": False}),
    ("chat_template_kwargs", {"a": "x" * 17_000}),
    ("chat_template_kwargs", {f"a{n}": 1 for n in range(65)}),
    ("chat_template_kwargs", {"a": nested(70)}),
    # Unsupported fields are refused by name, never ignored.
    ("audio", {"voice": "alloy"}),
    ("modalities", ["text", "audio"]),
    ("chat_template", "{{ 1 }}"),
    ("continue_final_message", True),
    ("skip_special_tokens", False),
]


async def test_wrong_fields_are_named(serve: Serve) -> None:
    async with serve() as running:
        for name, value in CHAT_FIELDS:
            body = {"messages": [USER], name: value}
            error = check_error(await running.http.post(CHAT, json=body), 400)
            assert error["param"] == name, (name, value, error)
        assert running.state.engine.stats.steps_total == 0, "none of it reached the engine"
        for seed in (-(2**53), 2**63 - 1):
            assert (await running.chat(seed=seed, max_tokens=1)).status_code == 200
        assert (await running.chat(temperature=1e-320, max_tokens=1)).status_code == 200
        assert (await running.chat(top_k=10**6, max_tokens=1)).status_code == 200


PROMPTS: list[Any] = [
    [], [-1], [272], [10**9], [[]], [[1], []], ["a", 1], [["a"]], {}, None, 5, ["a"] * 65, "",
]  # fmt: skip


async def test_wrong_prompts(serve: Serve) -> None:
    async with serve() as running:
        for prompt in PROMPTS:
            error = check_error(await running.complete(prompt), 400)
            assert error["param"] == "prompt", prompt
        assert (await running.http.post(COMPLETIONS, json={})).json()["error"]["param"] == "prompt"


async def test_min_tokens_above_max_tokens_on_every_route(serve: Serve) -> None:
    async with serve() as running:
        for response in (
            await running.chat(min_tokens=9, max_tokens=8),
            await running.chat(min_tokens=9, max_tokens=8, stream=True),
            await running.complete(min_tokens=9, max_tokens=8),
        ):
            assert check_error(response, 400)["param"] == "min_tokens"


async def test_echo_with_logprobs_scores_and_no_more(serve: Serve) -> None:
    async with serve() as running:
        for field, value in (
            ("max_tokens", 2),
            ("n", 2),
            ("best_of", 2),
            ("stream", True),
            ("use_beam_search", True),
        ):
            asked = {"echo": True, "logprobs": 1, "max_tokens": 1} | {field: value}
            error = check_error(await running.complete(**asked), 400)
            assert error["param"] == field
            assert "echo together with logprobs" in error["message"]


async def test_what_completions_cannot_do_is_refused_by_name(serve: Serve) -> None:
    async with serve() as running:
        assert check_error(await running.complete(suffix="x"), 400)["param"] == "suffix"


SEARCH = {"use_beam_search": True, "n": 2}
WRONG_CHOICES: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 9}, "n", "8"),
    ({"best_of": 17}, "best_of", "16"),
    ({"best_of": 0}, "best_of", "1"),
    ({"best_of": 2, "n": 3}, "best_of", "at least n"),
    ({"best_of": 3, "stream": True}, "stream", "leave stream out"),
    ({"best_of": "3"}, "best_of", "int"),
    ({"length_penalty": 1.5}, "length_penalty", "use_beam_search"),
    ({"early_stopping": True}, "early_stopping", "use_beam_search"),
    ({"use_beam_search": True}, "best_of", "at least 2 beams"),
    ({**SEARCH, "best_of": 17}, "best_of", "16"),
    ({**SEARCH, "best_of": 6}, "best_of", "at most 4"),
    ({**SEARCH, "stream": True}, "stream", "leave stream out"),
    ({**SEARCH, "temperature": 1.0}, "temperature", "leave temperature out"),
    ({**SEARCH, "top_p": 0.9}, "top_p", "leave top_p out"),
    ({**SEARCH, "top_k": 5}, "top_k", "leave top_k out"),
    ({**SEARCH, "min_p": 0.1}, "min_p", "leave min_p out"),
    ({**SEARCH, "presence_penalty": 0.1}, "presence_penalty", "leave presence_penalty out"),
    ({**SEARCH, "length_penalty": 11}, "length_penalty", "10"),
    ({**SEARCH, "early_stopping": "sometimes"}, "early_stopping", "sometimes"),
]


async def test_choices_and_beams_beyond_a_limit_are_refused_with_the_limit(serve: Serve) -> None:
    async with serve("num_blocks=20", max_num_seqs=4) as running:
        for fields, param, words in WRONG_CHOICES:
            for response in (await running.complete(**fields), await running.chat(**fields)):
                error = check_error(response, 400)
                assert error["param"] == param, fields
                assert words in error["message"], fields
        # The beams share the prompt's 17 full blocks, and each of the four needs one more.
        error = check_error(await running.complete("x" * 280, n=4, use_beam_search=True), 400)
        assert "4 beams after a prompt of 280 tokens need at least 21" in error["message"]
        assert "there are 20" in error["message"]


async def test_a_prompt_longer_than_the_context_is_never_cut(serve: Serve) -> None:
    async with serve(max_model_len=64) as running:
        assert (await running.complete("x" * 63)).json()["usage"]["completion_tokens"] == 1
        for length in (64, 65, 5000):
            error = check_error(await running.complete("x" * length), 400)
            assert error["code"] == "context_length_exceeded"
            assert str(length) in error["message"]
            assert "64" in error["message"]
        longer = (await running.complete("x" * 60, max_tokens=5)).json()
        assert longer["choices"][0]["finish_reason"] == "length", "the answer is cut instead"
        assert longer["usage"]["completion_tokens"] == 4
        streamed = await running.chat("x" * 100, stream=True)
        assert check_error(streamed, 400)["param"] == "messages"


async def test_a_prompt_that_the_cache_cannot_hold(serve: Serve) -> None:
    async with serve("num_blocks=2", max_model_len=64) as running:
        assert (await running.complete("x" * 31, max_tokens=1)).status_code == 200
        error = check_error(await running.complete("x" * 32, max_tokens=1), 400)
        assert error["code"] == "context_length_exceeded"
        assert "32" in error["message"]


async def test_unknown_models_and_paths(serve: Serve) -> None:
    async with serve() as running:
        for name in ("gpt-4o", "../../etc/passwd", "echo\0", "x" * 10_000, ""):
            error = check_error(await running.chat(model=name), 404)
            assert error["code"] == "model_not_found"
        for path in ("/v1/models/x", "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2f"):
            check_error(await running.http.get(path), 404)
        for path in ("/v1", "/v1/", "//v1/models", "/redoc", "/v1/chat/completions/"):
            check_error(await running.http.get(path), 404)


async def test_wrong_methods(serve: Serve) -> None:
    async with serve() as running:
        for method in ("GET", "PUT", "DELETE", "TRACE", "BREW"):
            response = await running.http.request(method, CHAT)
            check_error(response, 405)
            assert response.headers["allow"] == "POST"
        check_error(await running.http.post("/v1/models"), 405)
        several = await running.http.request("OPTIONS", "/v1/responses/resp_1")
        assert several.headers["allow"] == "DELETE, GET, HEAD", "two routes of one path"


async def test_only_json_is_accepted(serve: Serve) -> None:
    form = "application/x-www-form-urlencoded"
    body = json.dumps({"prompt": "x"}).encode()
    async with serve() as running:
        for media_type in ("", "text/plain", form, "text/json", "application/x+json"):
            headers = {"content-type": media_type} if media_type else {}
            response = await running.http.post(COMPLETIONS, content=body, headers=headers)
            check_error(response, 415)
        zipped = await running.http.post(
            COMPLETIONS, content=body, headers={**JSON, "content-encoding": "gzip"}
        )
        check_error(zipped, 415)
        charset = {"content-type": "application/json; charset=utf-8"}
        fine = await running.http.post(COMPLETIONS, content=body, headers=charset)
        assert fine.status_code == 200


async def test_large_bodies(serve: Serve) -> None:
    async with serve(server={"max_body_bytes": 10_000}) as running:
        check_error(await running.complete("x" * 10_000), 413)

        async def chunks() -> Any:
            for _ in range(1000):
                yield b" " * 1000

        check_error(await running.http.post(COMPLETIONS, content=chunks(), headers=JSON), 413)
        assert (await running.complete("x")).status_code == 200


async def test_a_model_without_a_chat_template(serve: Serve) -> None:
    async with serve() as running:
        tokenizer = running.state.tokenizer
        assert tokenizer is not None
        template, tokenizer.chat_template = tokenizer.chat_template, None
        try:
            assert check_error(await running.chat(), 400)["code"] == "no_chat_template"
        finally:
            tokenizer.chat_template = template
        assert (await running.complete("x")).status_code == 200


class Compared(str):
    """A field's name that counts its comparisons with others."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_key_that_stands_twice_is_found_in_one_pass() -> None:
    """This took eight minutes for a body of 2 MiB: each name was compared with every other."""
    count = 3000
    pairs: list[tuple[str, Any]] = [(Compared(f"k{number}"), 0) for number in range(count)]
    pairs.insert(count - 1, (Compared(f"k{count - 1}"), 0))
    with pytest.raises(RequestError, match=f"k{count - 1}' stands twice"):
        body.refuse_duplicates(pairs)
    assert Compared.times < 4 * count
    assert body.refuse_duplicates(pairs[: count - 1]) == dict(pairs[: count - 1])
