"""Bodies as real clients send them, copied from the sources that the comments name.

Clients that tests can install send theirs themselves, in `tests/e2e/clients` and
`tests/server/agents`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from support.echo.echo_templates import TOOLS

from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.server.conftest import Serve

OPENAI, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/api/chat"
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS},
}
CALL: dict[str, Any] = {"name": "weather", "arguments": "{}"}
OLLAMAS_CALL: Any = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SYSTEM, HI = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
MANY = [f"choice {number}" for number in range(4)]

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    # zed-industries/zed: crates/open_ai; no text is an empty list
    "zed": (OPENAI, {
        **STREAM, "max_completion_tokens": 100, "temperature": 1.0, "prompt_cache_key": "thread",
        "parallel_tool_calls": False, "tools": [TOOL], "tool_choice": "auto", "messages": [
            SYSTEM, HI,
            {"role": "assistant", "content": [],
             "tool_calls": [{"id": "c", "type": "function", "function": CALL}]},
            {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "c"},
            {"role": "user", "content": []},
        ],
    }),
    # zed-industries/zed: crates/ollama
    "zed, ollama": (OLLAMA, {
        "model": "echo:latest", "stream": True, "keep_alive": -1, "tools": [TOOL], "think": False,
        "options": {"num_ctx": 16384, "num_predict": None, "stop": [], "temperature": 1.0,
                    "top_p": None},
        "messages": [
            HI,
            {"role": "assistant", "content": "", "thinking": None, "tool_calls": [OLLAMAS_CALL]},
            {"role": "tool", "tool_name": "weather", "content": "x"},
        ],
    }),
    # microsoft/vscode-copilot-chat: byok/vscode-node, whose names are those of /api/tags
    "copilot, ollama": (OPENAI, {
        "model": "echo:latest", **STREAM, "temperature": 0.1, "top_p": 1, "n": 1,
        "max_tokens": 4096, "tools": [TOOL], "tool_choice": "auto", "messages": [
            SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ""}}]},
            {"role": "tool", "content": "x", "tool_call_id": "c"},
        ],
    }),
    # block/goose: crates/goose/src/providers/ollama.rs
    "goose, ollama": (OPENAI, {
        "model": "echo:latest", **STREAM, "tools": [TOOL], "options": {"num_ctx": 8192},
        "messages": [SYSTEM, HI],
    }),
    # lobehub/lobe-chat: packages/model-runtime, which does not say which call a result belongs to
    "lobechat, ollama": (OLLAMA, {
        "model": "echo:latest", "stream": True, "tools": [TOOL],
        "options": {"frequency_penalty": 0, "presence_penalty": 0, "temperature": 0.5, "top_p": 1},
        "messages": [SYSTEM, HI, {"role": "assistant", "content": ""},
                     {"role": "tool", "content": "x"}],
    }),
    # home-assistant/core: components/ollama/entity.py; a number box gives a float
    "home assistant, ollama": (OLLAMA, {
        "model": "echo:latest", "stream": True, "keep_alive": -1, "options": {"num_ctx": 8192.0},
        "think": False, "tools": [TOOL], "messages": [
            SYSTEM, HI, {"role": "assistant", "tool_calls": [OLLAMAS_CALL]},
            {"role": "tool", "content": "{}"}, HI,
        ],
    }),
    # home-assistant/core: helpers/llm.py, of a selector of several
    "home assistant, task": (OLLAMA, {
        "model": "echo:latest", "stream": True, "keep_alive": "300s",
        "options": {"num_ctx": 8192.0}, "messages": [HI],
        "format": {"type": "object", "required": ["moods"], "properties": {
            "moods": {"type": "array", "items": {"type": "string", "enum": MANY},
                      "uniqueItems": True},
            "lamp": {"type": "string", "format": "entity_id"},
            "level": {"type": "number", "minimum": 1.0, "maximum": 5.0},
        }},
    }),
    # home-assistant/core: components/openai_conversation/entity.py
    "home assistant, responses": (RESPONSES, {
        "stream": True, "store": False, "max_output_tokens": 300, "user": "c", "top_p": 1.0,
        "temperature": 1.0, "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"}, "service_tier": "auto",
        "text": {"verbosity": "medium", "format": {
            "type": "json_schema", "name": "x", "strict": True, "schema": {
                "type": "object", "strict": True, "additionalProperties": False,
                "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]}}},
        "tools": [
            {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False,
             "description": None},
            {"type": "web_search", "search_context_size": "low"},
        ],
        "input": [
            {"type": "message", "role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "c", **CALL},
            {"type": "function_call_output", "call_id": "c", "output": "{}"},
            {"type": "web_search_call", "id": "w", "status": "completed",
             "action": {"type": "search", "query": "x"}},
            {"type": "reasoning", "id": "rs_1", "encrypted_content": None,
             "summary": [{"type": "summary_text", "text": "So."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        ],
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
async def test_they_are_answered(
    serve: Serve, tokenizer_with: Callable[[str], Tokenizer], name: str
) -> None:
    path, body = BODIES[name]
    async with serve(tokenizer=tokenizer_with(TOOLS), max_model_len=8192) as running:
        answer = await running.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert '{"error"' not in answer.text
        assert "response.failed" not in answer.text
