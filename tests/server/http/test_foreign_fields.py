"""Fields of other protocols: refused with the right name, honoured, or without effect.

The names are those of the official clients' methods.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import httpx
import ollama
import openai
import pytest
from support.echo.echo_templates import TOOLS

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.tokenizer import Tokenizer
    from tests.server.conftest import Serve

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/api/chat": {"model": "echo", "messages": MESSAGES, "stream": False},
    "/api/generate": {"model": "echo", "prompt": "hi", "stream": False},
}
# These request nothing that shows in an answer: accounts, caches, storage, hardware.
HARMLESS = {
    "metadata", "user", "store", "service_tier", "safety_identifier", "moderation", "speed",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "prediction",
    "truncation", "max_tool_calls", "include", "stream_options", "stream", "model", "verbosity",
    "cache_control", "diagnostics", "inference_geo", "user_profile_id", "workspace_id",
    "keep_alive", "access_programs", "background", "background_options", "context_management",
    "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa", "main_gpu", "f16_kv",
    "low_vram", "logits_all", "use_mlock", "use_mmap", "vocab_only", "embedding_only",
    "penalize_newline", "mirostat_eta", "mirostat_tau", "text", "prompt",
    # of other kinds of model
    "audio", "modalities", "image", "images", "height", "width", "steps", "web_search_options",
    # of tools that the maker runs
    "container", "mcp_servers", "raw", "template", "context", "typical_p", "tfs_z", "mirostat",
}  # fmt: skip
LIMITS = {"max_tokens", "max_output_tokens", "max_completion_tokens"}
VALUES: dict[str, Any] = {
    "stop": ["x"], "stop_sequences": ["x"], "format": "json", "options": {"temperature": 0.5},
    "response_format": {"type": "json_object"}, "output_config": {"effort": "low"},
    "logit_bias": {"5": 1}, "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required", "parallel_tool_calls": False, "logprobs": True, "echo": True,
    "thinking": {"type": "enabled"}, "reasoning": {"effort": "low"}, "think": True,
    "reasoning_effort": "low", "input": "ho", "messages": MESSAGES, "functions": [{"name": "f"}],
    "function_call": {"name": "f"}, "repeat_penalty": 1.5, "repetition_penalty": 1.5,
    "top_p": 0.5, "temperature": 0.5, "min_p": 0.5, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "suffix": "x", "system": "x", "instructions": "x",
    "previous_response_id": "resp_1", "conversation": "conv_1", "chat_template_kwargs": {"a": 1},
}  # fmt: skip


def names_of(call: Callable[..., Any]) -> set[str]:
    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout", "betas"}
    return {*inspect.signature(call).parameters} - own


def clients_fields() -> dict[str, set[str]]:
    import anthropic

    client, other = openai.OpenAI(api_key="x"), anthropic.Anthropic(api_key="x")
    return {
        "/v1/chat/completions": names_of(client.chat.completions.create),
        "/v1/completions": names_of(client.completions.create),
        "/v1/responses": names_of(client.responses.create),
        "/v1/messages": names_of(other.messages.create) | {"temperature", "top_p", "top_k"},
        "/api/chat": names_of(ollama.Client(trust_env=False).chat),
        "/api/generate": names_of(ollama.Client(trust_env=False).generate),
        "options": {*ollama.Options.model_fields},
    }


def param_of(response: httpx.Response) -> str:
    """The field that an error names; the other protocols' errors begin with it."""
    error = response.json()["error"]
    if isinstance(error, dict) and "param" in error:
        return str(error["param"])
    return (error if isinstance(error, str) else error["message"]).split()[0].rstrip(":")


async def test_no_field_of_another_protocol_is_lost(serve: Serve) -> None:
    fields = clients_fields()
    # Fields that our document adds to the protocol, and those without effect there.
    more = {
        "/v1/chat/completions": {
            "repeat_last_n",
            "top_k", "min_p", "best_of", "repeat_penalty", "think", "reasoning", "thinking",
        },
        "/v1/completions": {
            "repeat_last_n",
            "top_k", "min_p", "repeat_penalty", "response_format",
            "reasoning_effort", "think", "reasoning", "thinking",
        },
        **dict.fromkeys(("/api/chat", "/api/generate"), fields["options"] | LIMITS),
    }  # fmt: skip
    more["/api/chat"] = more["/api/chat"] | {"tool_choice"}
    asked, wrong = 0, []
    async with serve() as running:
        for path, body in BODIES.items():
            others = set().union(*fields.values()) - fields[path] - HARMLESS
            for name in sorted(others - more.get(path, set()) - body.keys()):
                sent = {**body, name: VALUES.get(name, 3)}
                response = await running.http.post(path, json=sent)
                named = param_of(response) if response.status_code == 400 else response.text
                wrong += [(path, name, named)] * (named.removesuffix(".temperature") != name)
                asked += 1
    assert not wrong
    assert asked > 100


RIGHT: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"max_tokens": 3}, "max_output_tokens"),
    ("/v1/responses", {"response_format": {"type": "json_object"}}, "text.format"),
    ("/v1/responses", {"messages": MESSAGES}, "input"),
    ("/v1/responses", {"logprobs": True}, "include"),
    ("/v1/messages", {"stop": ["x"]}, "stop_sequences"),
    ("/v1/messages", {"response_format": {"type": "json_object"}}, "output_config.format"),
    ("/v1/messages", {"max_completion_tokens": 3}, "max_tokens"),
    ("/v1/messages", {"seed": 0}, "leave it out"),
    ("/v1/messages", {"n": 2}, "leave it out"),
    ("/v1/chat/completions", {"stop_sequences": ["x"]}, "stop"),
    ("/v1/chat/completions", {"max_output_tokens": 3}, "max_completion_tokens"),
    ("/v1/chat/completions", {"xtc_probability": 0.5}, "leave it out"),
    (
        "/v1/chat/completions",
        {"options": {"num_ctx": 9, "num_predict": 3}},
        "max_completion_tokens",
    ),
    ("/v1/chat/completions", {"options": {"temperature": 0.5}}, "the field here is temperature"),
    ("/v1/chat/completions", {"options": {"mirostat": 2}}, "options.mirostat"),
    ("/v1/responses", {"options": {"top_k": 5}}, "leave it out"),
    ("/v1/completions", {"max_new_tokens": 3}, "max_tokens"),
    ("/api/generate", {"tool_choice": "required"}, "tools"),
    ("/api/chat", {"response_format": {"type": "json_object"}}, "format"),
    ("/api/chat", {"options": {"max_tokens": 5}}, "options.num_predict"),
    ("/api/chat", {"options": {"repetition_penalty": 1.5}}, "options.repeat_penalty"),
    ("/api/generate", {"reasoning_effort": "low"}, "think"),
]


async def test_the_right_name_is_told_and_neutral_values_pass(serve: Serve) -> None:
    neutral: dict[str, Any] = {
        "n": 1, "seed": None, "stop_sequences": [], "frequency_penalty": 0, "suffix": "",
        "parallel_tool_calls": True, "top_k": 0, "an_invention": 5,
    }  # fmt: skip
    machine = {"num_ctx": 8192, "num_thread": 2, "num_gpu": 1, "use_mmap": True, "num_batch": 9}
    assert machine.keys() <= ollama.Options.model_fields.keys()
    async with serve() as running:
        for path, fields, right in RIGHT:
            response = await running.http.post(path, json={**BODIES[path], **fields})
            assert response.status_code == 400, (path, fields)
            assert right in response.text, (path, fields, response.text)
        for path, body in BODIES.items():
            response = await running.http.post(path, json={**neutral, **body})
            assert response.status_code == 200, (path, response.text)
            limits = dict.fromkeys(("max_tokens", "max_new_tokens", "num_predict"), 3)
            if "max_tokens" in body or path == "/v1/completions":
                # SillyTavern sends one limit under every name that it knows
                response = await running.http.post(path, json={**body, **limits})
                assert response.status_code == 200, (path, response.text)
            # goose's provider for Ollama sends this to the OpenAI route, from GOOSE_INPUT_LIMIT
            response = await running.http.post(path, json={**body, "options": machine})
            assert response.status_code == 200, (path, response.text)


THINKS: list[tuple[dict[str, Any], bool]] = [
    ({"enable_thinking": True}, True),
    ({"enable_thinking": False}, False),
    ({"think": "low"}, True),
    ({"think": False}, False),
    ({"thinking": {"type": "enabled", "budget_tokens": 7}}, True),
    ({"thinking": {"type": "disabled"}}, False),
    ({"reasoning": {"effort": "high"}}, True),
    ({"reasoning": {"enabled": False}}, False),
    ({"reasoning": {"max_tokens": 7}}, True),
    ({"reasoning_effort": "none", "enable_thinking": True}, False),
]
SWITCH = TOOLS + "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"


async def test_other_names_of_thinking_and_of_limits_are_honoured(
    serve: Serve, tokenizer_with: Callable[[str], Tokenizer]
) -> None:
    """The names of OpenRouter, DeepSeek, Qwen, Ollama and llama.cpp."""
    async with serve(tokenizer=tokenizer_with(SWITCH)) as running:
        for fields, expected in THINKS:
            answer = (await running.chat("hi", max_tokens=999, **fields)).json()
            assert answer["choices"][0]["message"], answer
            prompt = answer["usage"]["prompt_tokens"]
            plain = (await running.chat("hi")).json()["usage"]["prompt_tokens"]
            assert prompt - plain == len(f"[{expected}]"), fields
        for name in ("max_tokens", "max_completion_tokens", "n_predict"):
            three = (await running.chat("hello", **{name: 3})).json()
            assert three["usage"]["completion_tokens"] == 3
            all_of_it = (await running.chat("hello", **{name: -1})).json()
            assert all_of_it["choices"][0]["finish_reason"] == "stop"
        more = (await running.complete("abc" * 9, max_tokens=-1, ignore_eos=True)).json()
        assert more["usage"]["total_tokens"] == 512, "as many as fit, not OpenAI's 16"


@pytest.mark.parametrize("name", ["repeat_penalty", "repetition_penalty"])
async def test_either_name_of_the_repetition_penalty(serve: Serve, name: str) -> None:
    seen: list[float] = []
    async with serve() as running:
        generate = running.state.engine.generate

        def noted(request: Any) -> Any:
            seen.append(request.sampling.repetition_penalty)
            return generate(request)

        running.state.engine.generate = noted  # type: ignore[method-assign]
        assert (await running.chat("hi", **{name: 1.25})).status_code == 200
    assert seen == [1.25]


async def test_an_ollama_penalty_of_0_is_off(serve: Serve) -> None:
    """LiteLLM 1.108 sends OpenAI's `frequency_penalty` as `repeat_penalty`, by default 0."""
    seen: list[float] = []
    async with serve() as running:
        generate = running.state.engine.generate

        def noted(request: Any) -> Any:
            seen.append(request.sampling.repetition_penalty)
            return generate(request)

        running.state.engine.generate = noted  # type: ignore[method-assign]
        for value in (0, 0.0, 1.25):
            body = {**BODIES["/api/chat"], "options": {"repeat_penalty": value}}
            assert (await running.http.post("/api/chat", json=body)).status_code == 200
        body = {**BODIES["/api/chat"], "options": {"repeat_penalty": 0.001}}
        assert (await running.http.post("/api/chat", json=body)).status_code == 400
    assert seen == [1.0, 1.0, 1.25]
