"""A truncated answer says so: with every reason, on every protocol, wherever the cut is.

The right values come from the protocols' documents. OpenAI: `length` is the token limit, `stop` a
stop string, `tool_calls` a finished call; a response is `incomplete`. Anthropic: `max_tokens`,
`model_context_window_exceeded`, `stop_sequence`. Ollama: `length` and `stop`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest
from pydantic import BaseModel
from support.echo.echo_templates import TOOLS

from appliance.engine.nouns.messages import SequenceDelta
from appliance.engine.nouns.request import FinishReason
from appliance.server.requests.pieces import AnswerChoice
from appliance.server.requests.terms import Terms
from appliance.text import ChoiceText

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.tokenizer import Tokenizer
    from tests.server.conftest import Running, Serve

TEXT = (
    "<think>\nHm, well.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
)
STOPS = {"thought": "well", "content": "see", "arguments": "slo"}
PLACES = {"thought": "thinking", "content": "text", "arguments": "tool_use"}  # Anthropic's blocks
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "ollama": "/api/chat",
}
CUT = {  # by reason
    "limit": {
        "chat": "length",
        "responses": "incomplete",
        "messages": "max_tokens",
        "ollama": "length",
    },
    "context": {
        "chat": "length",
        "responses": "incomplete",
        "messages": "model_context_window_exceeded",
        "ollama": "length",
    },
    "stop": {"chat": "stop", "messages": "stop_sequence", "ollama": "stop"},
    # The same values as for a limit: no protocol but our own field knows a time limit.
    "timeout": {
        "chat": "timeout",
        "responses": "incomplete",
        "messages": "max_tokens",
        "ollama": "length",
    },
    "": {"chat": "tool_calls", "responses": "completed", "messages": "tool_use", "ollama": "stop"},
}
# The choice of a tool, and whether several calls are allowed.
CHOICES = [
    (choice, several) for choice, several in product(("auto", "required", "named"), (True, False))
]


@pytest.fixture
def tokenizer(tokenizer_with: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_with(TOOLS)


def body_of(protocol: str, choice: str, several: bool, stop: str, **fields: Any) -> dict[str, Any]:
    turn = {"role": "user", "content": TEXT}
    function = {"name": "weather", "description": "Now.", "parameters": SCHEMA}
    if protocol == "chat":
        named = {"type": "function", "function": {"name": "weather"}}
        return {
            "messages": [turn],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": named if choice == "named" else choice,
            "parallel_tool_calls": several,
            **({"stop": stop} if stop else {}),
            **fields,
        }
    if protocol == "responses":
        return {
            "input": TEXT,
            "tools": [{"type": "function", **function}],
            "tool_choice": {"type": "function", "name": "weather"} if choice == "named" else choice,
            "parallel_tool_calls": several,
            **fields,
        }
    if protocol == "messages":
        kind = {"auto": "auto", "required": "any", "named": "tool"}[choice]
        asked = {"type": kind, "disable_parallel_tool_use": not several}
        return {
            "model": "echo",
            "max_tokens": 400,
            "messages": [turn],
            "tools": [{"name": "weather", "description": "Now.", "input_schema": SCHEMA}],
            "tool_choice": {**asked, "name": "weather"} if choice == "named" else asked,
            **({"stop_sequences": [stop]} if stop else {}),
            **fields,
        }
    return {
        "model": "echo",
        "messages": [turn],
        "tools": [{"type": "function", "function": function}],
        "options": {**({"stop": [stop]} if stop else {}), **fields.pop("options", {})},
        **fields,
    }


def limited(protocol: str, tokens: int) -> dict[str, Any]:
    if protocol == "ollama":
        return {"options": {"num_predict": tokens}}
    return {"max_output_tokens" if protocol == "responses" else "max_tokens": tokens}


def is_half(item: dict[str, Any]) -> bool:
    """Return True if an item of a response is a call whose arguments end too early."""
    try:
        json.loads(item.get("arguments", "{}"))
    except ValueError:
        return True
    return False


async def end_of(running: Running, protocol: str, body: dict[str, Any], *, stream: bool) -> str:
    """Send a request, and return the reason that its answer ends with."""
    response = await running.http.post(PATHS[protocol], json={**body, "stream": stream})
    assert response.status_code == 200, response.text
    data = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith(("data: {", "{"))
    ]
    if protocol == "chat":
        reasons = [choice["finish_reason"] for one in data for choice in one["choices"]]
        return str(next(filter(None, reasons)))
    if protocol == "responses":
        whole = data[-1]["response"] if stream else data[-1]
        done = [one["item"] for one in data if one.get("type") == "response.output_item.done"]
        for item in (*done, *whole["output"]):
            assert item["status"] == "incomplete" or not is_half(item), item
        if whole["status"] == "incomplete":
            assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
            assert whole["output"][-1]["status"] == "incomplete"
        return str(whole["status"])
    if protocol == "messages":
        deltas = [one["delta"]["stop_reason"] for one in data if one["type"] == "message_delta"]
        return str(deltas[0] if stream else data[-1]["stop_reason"])
    return str(data[-1]["done_reason"])


async def test_a_cut_stays_a_cut(serve: Serve, tokenizer: Tokenizer) -> None:
    wrong = []
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        supervisor = running.engine.supervisor
        info = supervisor.info
        assert info is not None
        for protocol, (choice, several) in product(PATHS, CHOICES):
            first = body_of(protocol, choice, several, "")
            whole = await running.http.post(PATHS[protocol], json={**first, "stream": False})
            of = whole.json()
            usage = of.get("usage", of)
            names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
            prompt = next(usage[name] for name in names if name in usage)
            if protocol == "messages":
                prompt += usage["cache_read_input_tokens"]
            for place, stop in STOPS.items():
                tokens = TEXT.index(stop) + 1
                for reason in ("limit", "context", "stop", ""):
                    if protocol not in CUT[reason]:
                        continue
                    fields = limited(protocol, tokens) if reason == "limit" else {}
                    body = body_of(
                        protocol, choice, several, stop if reason == "stop" else "", **fields
                    )
                    length = prompt + tokens if reason == "context" else info.context_length
                    supervisor.info = msgspec.structs.replace(info, context_length=length)
                    for stream in (False, True):
                        found = await end_of(running, protocol, body, stream=stream)
                        if found != CUT[reason][protocol]:
                            case = (protocol, choice, several, reason, place, stream)
                            wrong.append((*case, found))
                    supervisor.info = info
    assert not wrong, wrong


@pytest.mark.parametrize("place", STOPS)
async def test_an_answer_whose_time_is_over_is_cut(
    serve: Serve, tokenizer: Tokenizer, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms_of = Terms.of

    def limited(*given: Any) -> Terms:  # the protocols without a field have no limit of their own
        return replace(terms_of(*given), timeout=2.0)

    monkeypatch.setattr(Terms, "of", limited)
    cases = list(product(PATHS, CHOICES, (False, True)))
    async with serve(
        f"holds_behind={STOPS[place]} num_blocks=9000",
        tokenizer=tokenizer,
        max_model_len=2048,
        max_num_seqs=64,
    ) as running:
        found = await asyncio.gather(*(
            end_of(running, protocol, body_of(protocol, *choice, ""), stream=stream)
            for protocol, choice, stream in cases
        ))  # fmt: skip
        texts = await asyncio.gather(*(
            running.complete(TEXT, max_tokens=999, stream=stream) for stream in (False, True)
        ))  # fmt: skip
    wrong = [
        (*case, end)
        for case, end in zip(cases, found, strict=True)
        if end != CUT["timeout"][case[0]]
    ]
    assert not wrong, wrong
    assert all('"finish_reason":"timeout"' in one.text for one in texts)


@pytest.mark.parametrize("reason", [FinishReason.TIMEOUT, FinishReason.LENGTH])
def test_the_engine_s_reason_stays(tokenizer: Tokenizer, reason: FinishReason) -> None:
    """Running out of time cuts like a limit, with any choice of a tool and number of calls."""
    before, _ = TEXT.encode().split(b"slo")
    for one_call, must_call in product((False, True), repeat=2):
        reader = tokenizer.dialect.reader(
            {"weather": SCHEMA}, one_call=one_call, must_call=must_call
        )
        choice = AnswerChoice(0, ChoiceText(tokenizer, ()), reader, ())
        choice.push(SequenceDelta(request_id="r", token_ids=tuple(before)), 1)
        piece = choice.push(SequenceDelta(request_id="r", finish_reason=reason), 1)
        assert piece is not None
        assert piece.finish_reason is reason


@pytest.mark.parametrize("place", ["well", "see", "name", "argu", "city", "slo", "days"])
async def test_a_stop_token_inside_a_call_makes_no_call(
    serve: Serve, tokenizer: Tokenizer, place: str
) -> None:
    """`stop_token_ids` are vLLM's; they end an answer as a stop string does."""
    text = TEXT.replace(place, f"{place}\x01", 1)
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        for (choice, several), stream in product(CHOICES, (False, True)):
            body = body_of("chat", choice, several, "", stop_token_ids=[1])
            body["messages"] = [{"role": "user", "content": text}]
            found = await end_of(running, "chat", body, stream=stream)
            assert found == "stop", (choice, several, stream)


HALVES = ["<tool_call>", "name", "weather", "arguments", "city", "slo", "days", "3"]


async def test_a_model_that_ends_inside_a_call_makes_no_call(
    serve: Serve, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The model ends with its own token: no protocol may then ask for a tool's result."""
    says = [TEXT[: TEXT.rindex(half) + len(half)] for half in HALVES]
    rules = [{"contains": [f"case {n}."], "says": text} for n, text in enumerate(says)]
    (tmp_path / "script.json").write_text(json.dumps(rules))
    ends = CUT[""] | {"chat": "stop", "messages": "end_turn"}
    wrong = []
    async with serve(
        f"script={tmp_path / 'script.json'}", tokenizer=tokenizer, max_model_len=2048
    ) as running:
        for n, protocol, choice in product(range(len(says)), PATHS, CHOICES):
            body = body_of(protocol, *choice, "")
            asked = f"case {n}."
            turns = [{"role": "user", "content": asked}]
            body |= {"input": asked} if protocol == "responses" else {"messages": turns}
            for stream in (False, True):
                found = await end_of(running, protocol, body, stream=stream)
                if found != ends[protocol]:
                    wrong.append((HALVES[n], protocol, *choice, stream, found))
    assert not wrong, wrong


async def test_a_stop_string_behind_the_arguments_leaves_the_call_whole(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        for (choice, several), stream in product(CHOICES, (False, True)):
            body = body_of("chat", choice, several, "</tool_call>")
            assert await end_of(running, "chat", body, stream=stream) == "tool_calls"


class Weather(BaseModel):
    """Arguments, as openai's parser reads them."""

    city: str


async def test_openai_names_a_cut_call_by_its_own_error(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        with pytest.raises(openai.LengthFinishReasonError):
            await running.openai.chat.completions.parse(
                model="echo",
                messages=[{"role": "user", "content": TEXT}],
                tools=[openai.pydantic_function_tool(Weather, name="weather")],
                tool_choice={"type": "function", "function": {"name": "weather"}},
                max_tokens=TEXT.index("slo"),
            )


async def test_anthropic_s_client_reads_each_cut(serve: Serve, tokenizer: Tokenizer) -> None:
    """Its stream helper assembles partial arguments, and its models accept each stop reason."""
    import anthropic  # takes seconds; few processes run its tests

    async with (
        serve(tokenizer=tokenizer, max_model_len=2048) as running,
        anthropic.AsyncAnthropic(
            api_key="unused",
            base_url=running.url,
            max_retries=0,
            http_client=anthropic.DefaultAsyncHttpxClient(verify=False),
        ) as client,
    ):
        supervisor = running.engine.supervisor
        info = supervisor.info
        assert info is not None
        for choice, (place, stop) in product(CHOICES, STOPS.items()):
            for reason in ("limit", "context", "stop"):
                tokens = TEXT.index(stop) + 1
                fields: dict[str, Any] = {"max_tokens": tokens} if reason == "limit" else {}
                body = body_of("messages", *choice, stop if reason == "stop" else "", **fields)
                count = await client.messages.count_tokens(
                    **{k: v for k, v in body.items() if k not in ("max_tokens", "stop_sequences")}
                )
                if reason == "context":
                    supervisor.info = msgspec.structs.replace(
                        info, context_length=count.input_tokens + tokens
                    )
                whole = await client.messages.create(**body)
                async with client.messages.stream(**body) as stream:
                    streamed = await stream.get_final_message()
                supervisor.info = info
                case = (choice, place, reason)
                for message in (whole, streamed):
                    assert message.stop_reason == CUT[reason]["messages"], case
                    assert message.stop_sequence == (stop if reason == "stop" else None), case
                    kinds = [block.type for block in message.content]
                    assert kinds[-1] == PLACES[place], (*case, kinds)
                ends = [one.content[-1].model_dump(exclude={"id"}) for one in (whole, streamed)]
                assert ends[0] == ends[1], case
