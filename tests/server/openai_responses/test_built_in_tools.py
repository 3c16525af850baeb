"""Custom tools, the local shell and patches, as coding agents offer and answer them.

The shapes are those of the `openai` package's types, which check every event and item.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.responses import Response, ResponseInputItemParam
from pydantic import TypeAdapter
from support.echo.echoed_responses import events_of

if TYPE_CHECKING:
    from appliance.tokenizer import Tokenizer
    from tests.server.conftest import Serve

GRAMMAR = 'start: "*** Begin Patch" LF\nLF: /\\n/'
FREEFORM: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
DIGITS: dict[str, Any] = {
    "type": "custom",
    "name": "digits",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"},
}
PLAIN: dict[str, Any] = {"type": "custom", "name": "say"}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PATCH = '*** Begin Patch\n"x" \\ 🎈\n'
CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (FREEFORM, call("apply_patch", input=PATCH), {"type": "custom_tool_call", "input": PATCH}),
    (PLAIN, call("say", input="hi"), {"type": "custom_tool_call", "name": "say", "input": "hi"}),
    (
        {"type": "local_shell"},
        call("local_shell", command=["ls", "-l"], timeout_ms=9, working_directory="/tmp"),
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 9, "user": None,
                "working_directory": "/tmp",
            },
        },
    ),
    (
        {"type": "shell", "environment": {"type": "local"}},
        call("shell", commands=["ls -l", "echo 🎈"], timeout_ms=9, max_output_length=99),
        {
            "type": "shell_call",
            "action": {
                "commands": ["ls -l", "echo 🎈"], "timeout_ms": 9, "max_output_length": 99,
            },
            "environment": {"type": "local"},
        },
    ),
    (
        {"type": "apply_patch"},
        call("apply_patch", type="update_file", path="a.py", diff="-a\n+b"),
        {
            "type": "apply_patch_call",
            "operation": {"type": "update_file", "path": "a.py", "diff": "-a\n+b"},
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "text", "expected"), CASES)
async def test_calls_whole_and_streamed(
    serve: Serve, tokenizer: Tokenizer, tool: dict[str, Any], text: str, expected: dict[str, Any]
) -> None:
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        body = {"input": text, "tools": [tool]}
        whole = (await running.http.post("/v1/responses", json=body)).json()
        Response.model_validate(whole)
        events = await events_of(running, **body)
        assert events[-1]["type"] == "response.completed"
        (streamed,) = events[-1]["response"]["output"]
        done = [event["item"] for event in events if event["type"].endswith("output_item.done")]
        assert done == [streamed]
        for item in (*whole["output"], streamed):
            assert item == {**item, **expected}
            assert item["status"] == "completed"
        if expected["type"] == "custom_tool_call":
            deltas = [e["delta"] for e in events if e["type"].endswith("call_input.delta")]
            assert "".join(deltas) == expected["input"]
        if expected["type"] == "shell_call":
            ends = [event for event in events if event["type"].endswith("shell_call_command.done")]
            assert [event["command"] for event in ends] == expected["action"]["commands"]
            assert [event["command_index"] for event in ends] == [0, 1]


async def test_a_cut_call_is_incomplete(serve: Serve, tokenizer: Tokenizer) -> None:
    for tool, text, _ in CASES:
        async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
            body = {"input": text, "tools": [tool], "max_output_tokens": len(text) - 20}
            events = await events_of(running, **body)
            response = events[-1]["response"]
            assert response["status"] == "incomplete"
            (item,) = response["output"]
            cut = "in_progress" if tool == {"type": "apply_patch"} else "incomplete"
            assert item["status"] == cut
            if tool is FREEFORM:
                assert PATCH.startswith(item["input"])
                assert item["input"]


async def test_the_history_of_such_calls(
    serve: Serve, tokenizer: Tokenizer, seen: list[Any]
) -> None:
    """Codex sends calls back without ids and statuses, OpenAI's clients with them."""
    action: dict[str, Any] = {"type": "exec", "command": ["ls"], "timeout_ms": None, "env": {}}
    operation = {"type": "delete_file", "path": "a.py"}
    history: Any = [
        {"role": "user", "content": "Do it."},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "local_shell_call", "id": "l", "call_id": "c2", "status": "completed",
         "action": action},
        {"type": "function_call_output", "call_id": "c2", "output": "a.py"},
        {"type": "apply_patch_call", "call_id": "c3", "status": "completed",
         "operation": operation},
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "completed",
         "output": "gone"},
        {"type": "shell_call", "call_id": "c4", "status": "completed",
         "action": {"commands": ["ls", "rm b"], "timeout_ms": None}},
        {"type": "shell_call_output", "call_id": "c4", "max_output_length": 99, "output": [
            {"stdout": "a.py\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
            {"stdout": "", "stderr": "rm: no b\n", "outcome": {"type": "exit", "exit_code": 1}},
            {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}}]},
        {"type": "web_search_call", "id": "w", "status": "completed",
         "action": {"type": "search", "query": "x", "queries": []}},
    ]  # fmt: skip
    TypeAdapter(list[ResponseInputItemParam]).validate_python(history)
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        tools = [FREEFORM, {"type": "local_shell"}]
        body = {"input": history, "tools": tools, "max_output_tokens": 16}
        response = await running.http.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
    turns, listed, _ = seen[-1]
    assert [turn["role"] for turn in turns] == ["user", *["assistant", "tool"] * 4]
    called = [turn["tool_calls"][0]["function"] for turn in turns[1::2]]
    assert called == [
        {"name": "apply_patch", "arguments": {"input": PATCH}},
        {"name": "local_shell", "arguments": {"command": ["ls"]}},
        {"name": "apply_patch", "arguments": operation},
        {"name": "shell", "arguments": {"commands": ["ls", "rm b"]}},
    ]
    printed = "a.py\nrm: no b\n[exit code 1]\n[timed out]"
    assert [turn["content"] for turn in turns[2::2]] == ["done", "a.py", "gone", printed]
    assert GRAMMAR in listed[0]["function"]["description"]


async def test_a_regex_holds_and_a_wrong_format_is_refused(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        grammars: list[Any] = []
        generate = running.state.engine.generate

        def noted(request: Any) -> Any:
            grammars.append(request.sampling.grammar)
            return generate(request)

        running.state.engine.generate = noted  # type: ignore[method-assign]
        choice = {"type": "custom", "name": "digits"}
        for tool, status in (
            (DIGITS, 200),
            ({**DIGITS, "format": {**DIGITS["format"], "definition": "(["}}, 400),
            ({**DIGITS, "format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}, 400),
            ({**DIGITS, "format": {"type": "grammar", "syntax": "lark"}}, 400),
            ({**DIGITS, "format": {"type": "xml"}}, 400),
        ):
            body = {"input": "x", "tools": [tool], "tool_choice": choice, "max_output_tokens": 16}
            response = await running.http.post("/v1/responses", json=body)
            assert response.status_code == status, response.text
        assert "[0-9]{3}" in grammars[0].text


async def test_a_grammar_holds_where_it_constrains_no_other_tool(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    """A coding agent's other tools have schemas that are not meant to be enforced."""
    schema = {"type": "object", "properties": {"a": {"not": {"type": "array", "contains": {}}}}}
    other = {"type": "function", "name": "other", "parameters": schema}
    named = {"type": "custom", "name": "apply_patch"}
    nests = {**FREEFORM["format"], "definition": 'start: "(" start ")" | "x"'}
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        grammars: list[Any] = []
        generate = running.state.engine.generate

        def noted(request: Any) -> Any:
            grammars.append(request.sampling.grammar)
            return generate(request)

        running.state.engine.generate = noted  # type: ignore[method-assign]
        for tools, choice, held in (
            ([FREEFORM], "auto", True),
            ([FREEFORM], named, True),
            ([FREEFORM, other], "auto", False),
            ([FREEFORM, other], named, True),
        ):
            body = {"input": "x", "tools": tools, "tool_choice": choice, "max_output_tokens": 16}
            response = await running.http.post("/v1/responses", json=body)
            assert response.status_code == 200, response.text
            assert (grammars[-1] is not None) is held
            assert not held or r"\\*\\*\\* Begin" in grammars[-1].text
        body = {"input": "x", "tools": [{**FREEFORM, "format": nests}, other]}
        refused = await running.http.post("/v1/responses", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tools[0].format.definition"
        assert "start nests in itself" in refused.text


async def test_a_shell_runs_at_the_client_alone(serve: Serve, tokenizer: Tokenizer) -> None:
    local: dict[str, Any] = {"type": "shell"}
    async with serve(tokenizer=tokenizer, max_model_len=2048) as running:
        for tool, status in (
            (local, 200),
            ({**local, "environment": None}, 200),
            ({**local, "environment": {"type": "container_auto"}}, 400),
            ({**local, "environment": {"type": "container_reference", "container_id": "c"}}, 400),
        ):
            body = {"input": "x", "tools": [tool], "tool_choice": local, "max_output_tokens": 16}
            response = await running.http.post("/v1/responses", json=body)
            assert response.status_code == status, response.text
