"""Answers are the same whether a step adds one token or, with accepted drafts, several."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.conftest import Running, Serve

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% for t in tools or [] %}{{ t | tojson }}"
    "{% endfor %}<|im_start|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
TOOL = {"name": "weather", "parameters": {"type": "object"}}
CALLS = "".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
    for city in ("Oslo 🎈", "Rome")
)
MESSAGES = [
    {"role": "user", "content": "<think>\nHm, 🎈.\n</think>\n\nA tale of cities, in three."}
]
CALLING = [{"role": "user", "content": f"I look.\n{CALLS}"}]
TOOLS = [{"type": "function", "function": TOOL}]
CUT = {"n": 3, "max_tokens": 70, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "stop": ["cit", "of c"], "seed": 1}),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, **CUT, "stop": "thr", "logprobs": True, "top_logprobs": 2},
    ),
    ("/v1/chat/completions", {"messages": CALLING, "tools": TOOLS, "logprobs": True}),
    ("/v1/chat/completions", {"messages": CALLING, "tools": TOOLS, "max_tokens": 80}),
    (
        "/v1/completions",
        {"prompt": ["one two three", "é 🎈 é"], **CUT, "stop": "tw", "logprobs": 1},
    ),
    ("/v1/completions", {"prompt": "plain", "max_tokens": 23, "n": 2, "echo": True}),
    ("/v1/responses", {"input": MESSAGES, "include": ["message.output_text.logprobs"]}),
    ("/v1/responses", {"input": CALLING, "tools": [{"type": "function", **TOOL}]}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 90, "stop_sequences": ["three"]}),
    (
        "/v1/messages",
        {
            "messages": CALLING,
            "max_tokens": 300,
            "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        },
    ),
    ("/api/chat", {"messages": MESSAGES, "options": {"stop": ["three"]}}),
    ("/api/chat", {"messages": CALLING, "tools": TOOLS}),
    ("/api/generate", {"prompt": "one two three", "options": {"stop": ["two"]}}),
]
TEXTS = {"content", "text", "delta", "arguments", "reasoning", "partial_json", "thinking"}
TEXTS |= {"response", "reasoning_content"}
# Fields that differ between any two answers, and counts of drafts.
OWN = {"id", "item_id", "call_id", "created", "created_at", "sequence_number", "signature"}
OWN |= {"accepted_prediction_tokens", "rejected_prediction_tokens", "completed_at"}


def collect(value: Any, path: str, found: dict[str, Any]) -> None:
    """Add the fields of one frame to those of the frames before."""
    if isinstance(value, dict):
        kind = str(value.get("type", ""))
        place = f"{path}/{kind}{value.get('index', '')}"
        for key, inner in value.items():
            if key not in OWN and not key.endswith("_duration"):
                collect(inner, f"{place}/{key}", found)
    elif isinstance(value, list) and "logprobs" in path:
        found[path] = [*found.get(path, []), *value]
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            collect(inner, path if "choices" in path else f"{path}[{number}]", found)
    elif path.rpartition("/")[2] in TEXTS and isinstance(value, str):
        found[path] = found.get(path, "") + value
    else:
        found[path] = value


async def answers(running: Running) -> list[Any]:
    """All answers, whole and streamed, and their usage by the client's own count."""
    found: list[Any] = []
    for path, body in REQUESTS:
        for stream in (False, True):
            body = {"model": "echo", **body, "stream": stream}
            if stream and path in ("/v1/chat/completions", "/v1/completions"):
                body["stream_options"] = {"include_usage": True}
            answer = await running.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            told: dict[str, Any] = {}
            for line in answer.text.splitlines():
                data = line.removeprefix("data: ")
                if data.startswith("{") and '"message_start"' not in data:  # momentary counts
                    collect(json.loads(data), path, told)
            found.append(told)
    return found


@pytest.fixture
def tokenizer(tokenizer_with: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_with(TEMPLATE)


async def test_the_answers_are_the_same(serve: Serve, tokenizer: Tokenizer) -> None:
    options = {"tokenizer": tokenizer, "max_model_len": 2048}
    async with serve(**options) as running:
        expected = await answers(running)
    async with serve("tokens_per_step=7", **options) as running:
        found = await answers(running)
    for request, one, other in zip(
        [r for r in REQUESTS for _ in "ab"], found, expected, strict=True
    ):
        assert one == other, request
    texts = json.dumps(expected)
    for part in ("A tale of ", "Hm, \\ud83c\\udf88.", "Oslo", "one "):
        assert part in texts


async def test_a_stop_string_within_a_run_ends_text_tokens_and_counts(serve: Serve) -> None:
    """A step adds seven tokens, of which six were drafts."""
    async with serve("tokens_per_step=7") as running:
        body = {"prompt": "abcdefghijklmnopqrs", "max_tokens": 19, "logprobs": 0, "stop": "jk"}
        answer = (await running.complete(**body)).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abcdefghi", "stop")
        assert choice["logprobs"]["tokens"] == list("abcdefghijk"), "with those that spell the stop"
        usage = answer["usage"]
        assert usage["completion_tokens"] == 11
        assert usage["completion_tokens_details"] == {
            "accepted_prediction_tokens": 6 + 4,
            "rejected_prediction_tokens": 2,
        }
        options = {"include_usage": True, "continuous_usage_stats": True}
        frames = await running.frames("/v1/completions", stream_options=options, **body)
        chunks = [json.loads(frame) for frame in frames[:-1]]
        assert "".join(one["choices"][0]["text"] for one in chunks[:-1]) == "abcdefghi"
        usage["prompt_tokens_details"]["cached_tokens"] = 16
        assert chunks[-1]["usage"] == usage
        assert [one["usage"]["completion_tokens"] for one in chunks[-3:]] == [11, 11, 11]


async def test_usage_in_every_chunk(serve: Serve) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serve() as running:
        body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4, "n": 2}
        path = "/v1/chat/completions"
        for wish in (options, {"continuous_usage_stats": True}):
            frames = await running.frames(path, stream_options=wish, **body)
            chunks = [json.loads(frame) for frame in frames[:-1]]
            if wish is not options:
                assert not any("usage" in chunk for chunk in chunks)
                continue
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts[0] == 0
            assert counts == sorted(counts)
            assert set(counts) == set(range(9)) - {1}, "the first token is a mark"
            assert chunks[-1]["usage"]["total_tokens"] == chunks[-1]["usage"]["prompt_tokens"] + 8
            usage = chunks[3]["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        frames = await running.frames(
            "/v1/completions", prompt="abc", max_tokens=3, stream_options=options
        )
        counts = [json.loads(frame)["usage"]["completion_tokens"] for frame in frames[:-1]]
        assert counts == [1, 2, 3, 3, 3]


async def test_a_server_can_be_told_to_count_in_every_stream(serve: Serve) -> None:
    async with serve(server={"force_include_usage": True}) as running:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
            ("/v1/completions", {"prompt": "abc", "stream_options": {"include_usage": False}}),
        ):
            frames = await running.frames(path, **body)
            last = json.loads(frames[-2])
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] > 0
            assert json.loads(frames[0])["usage"] is None
