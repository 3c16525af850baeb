"""Every protocol continues an assistant's last turn, with the prompts that transformers makes."""

# ruff: noqa: E501 - texts as templates have them

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.echo.byte_tokenizer import save_byte_tokenizer
from transformers import PreTrainedTokenizerFast

from appliance.dialects import Content, Thought
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.server.conftest import Running, Serve

MARKS = ("<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>")
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + GENERATION
)
STRIPS = PLAIN.replace("m.content", "m.content | trim")
# Writes a thought before the last turn's text, even an empty one, as Qwen3's template does.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    + GENERATION
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
# Begins an answer with the start of a thought, as DeepSeek-R1's template does.
BEGINS = PLAIN + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
TEMPLATES = {"plain": PLAIN, "strips": STRIPS, "thinks": THINKS, "begins": BEGINS}
USER = {"role": "user", "content": "Say hello."}
TEXTS = ["Hello", "Hello, ", "  Hello\n", "Hé 🎈 {\n", "<|im_end|>", "ends <thi"]


def saved(folder: Path, template: str) -> tuple[Tokenizer, Any]:
    save_byte_tokenizer(folder, template, special=MARKS)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=template
    )
    return Tokenizer.from_path(folder), theirs


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_end_as_those_of_transformers(tmp_path: Path, name: str) -> None:
    ours, theirs = saved(tmp_path, TEMPLATES[name])
    for text in TEXTS:
        for field in ("content", "reasoning_content"):
            last = {"role": "assistant", "content": "", field: text}
            if field == "reasoning_content" and name != "thinks":
                continue
            wanted = theirs.apply_chat_template(
                [USER, last], tokenize=False, continue_final_message=field
            )
            ids = ours.encode_chat([USER, last], continues=field)
            assert ours.decode(ids, with_control=True) == wanted, (field, text)


async def prompt_of(running: Running, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """The prompt of a request, and the text of its answer."""
    seen: list[list[int]] = []
    engine, generate = running.state.engine, running.state.engine.generate

    def noted(request: Any) -> Any:
        seen.append(list(request.prompt_token_ids))
        return generate(request)

    engine.generate = noted  # type: ignore[method-assign]
    response = await running.http.post(path, json=body)
    engine.generate = generate  # type: ignore[method-assign]
    assert response.status_code == 200, response.text
    tokenizer = running.state.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(seen[0], with_control=True), response.text


def bodies(turns: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        "/v1/chat/completions": {"messages": turns},
        "/v1/responses": {"input": turns, "store": False},
        "/v1/messages": {"messages": turns, "max_tokens": 50},
        "/api/chat": {"model": "echo", "messages": turns, "stream": False},
    }


PREFILLED = [USER, {"role": "assistant", "content": "Hello, dear"}]


@pytest.mark.parametrize("path", bodies([]))
@pytest.mark.parametrize("name", TEMPLATES)
async def test_every_protocol_continues(serve: Serve, tmp_path: Path, path: str, name: str) -> None:
    ours, theirs = saved(tmp_path, TEMPLATES[name])
    options = {"enable_thinking": False} if path == "/v1/messages" else {}
    wanted = theirs.apply_chat_template(
        PREFILLED, tokenize=False, continue_final_message=True, **options
    )
    async with serve(tokenizer=ours) as running:
        prompt, answer = await prompt_of(running, path, bodies(PREFILLED)[path])
        assert prompt == wanted
        assert "Hello, dear" not in answer, "the text that was given is not part of the answer"
        empty = [USER, {"role": "assistant", "content": ""}]
        prompt, _ = await prompt_of(running, path, bodies(empty)[path])
        assert prompt == theirs.apply_chat_template(
            [USER], tokenize=False, add_generation_prompt=True, **options
        )


async def test_the_fields_of_vllm_choose(serve: Serve, tmp_path: Path) -> None:
    ours, theirs = saved(tmp_path, PLAIN)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"continue_final_message": True}),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            {"continue_final_message": True},
        ),
        ({"continue_final_message": False}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": True}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {}),
    ]
    async with serve(tokenizer=ours) as running:
        for fields, theirs_fields in cases:
            wanted = theirs.apply_chat_template(PREFILLED, tokenize=False, **theirs_fields)
            body = {"messages": PREFILLED, **fields}
            assert (await prompt_of(running, "/v1/chat/completions", body))[0] == wanted, fields
            tokenized = (await running.http.post("/tokenize", json=body)).json()
            assert ours.decode(tokenized["tokens"], with_control=True) == wanted
        calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        for messages, fields in (
            (PREFILLED, {"continue_final_message": True, "add_generation_prompt": True}),
            ([USER], {"continue_final_message": True}),
            ([USER, {**PREFILLED[1], "tool_calls": calls}], {"continue_final_message": True}),
        ):
            refused = await running.http.post(
                "/v1/chat/completions", json={"messages": messages, **fields}
            )
            assert refused.status_code == 400


async def test_what_anthropic_refuses(serve: Serve, tmp_path: Path) -> None:
    """Its documents forbid white space at the end, text where a thought must come, and a format."""
    ours, _ = saved(tmp_path, THINKS)
    thought = {"type": "thinking", "thinking": "Hm", "signature": ""}
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    on = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    cases: list[tuple[Any, dict[str, Any], int]] = [
        ("Hello ", {}, 400),
        ("Hello\n", {}, 400),
        ("Hello", {}, 200),
        ("Hello", on, 400),
        ([thought, {"type": "text", "text": "Hello"}], on, 200),
        ([thought], on, 200),
        ("{", {"output_config": {"format": schema}}, 400),
        ([{"type": "tool_use", "id": "t", "name": "f", "input": {}}], {}, 400),
    ]
    async with serve(tokenizer=ours) as running:
        for content, fields, status in cases:
            turns = [USER, {"role": "assistant", "content": content}]
            body = {"messages": turns, "max_tokens": 9, **fields}
            answer = await running.http.post("/v1/messages", json=body)
            assert answer.status_code == status, (content, fields, answer.text)


async def test_a_finished_response_is_followed_and_a_cut_one_continued(
    serve: Serve, tmp_path: Path
) -> None:
    ours, theirs = saved(tmp_path, PLAIN)
    async with serve(tokenizer=ours) as running:
        for status in ("completed", "incomplete"):
            part = {"type": "output_text", "text": "Hello", "annotations": []}
            item = {"type": "message", "role": "assistant", "status": status, "content": [part]}
            turns = [USER, {"role": "assistant", "content": "Hello"}]
            body = {"input": [USER, {"id": "msg_1", **item}], "store": False}
            prompt, _ = await prompt_of(running, "/v1/responses", body)
            done = status == "completed"
            assert prompt == theirs.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=done, continue_final_message=not done
            )
        cut = await running.openai.responses.create(
            model="echo", input="x" * 40, max_output_tokens=16
        )
        assert cut.status == "incomplete"
        body = {"input": [], "previous_response_id": cut.id}
        prompt, _ = await prompt_of(running, "/v1/responses", body)
        assert prompt.endswith("assistant\n" + cut.output_text)


@pytest.mark.parametrize(
    ("name", "last", "parts"),
    [
        ("thinks", {"content": "Hello"}, [Content(" world")]),
        ("begins", {"content": "Hello"}, [Content(" world")]),
        ("thinks", {"content": "", "reasoning_content": "Hm"}, [Thought(" world")]),
        ("begins", {"content": "<think>\nHm"}, [Thought(" world")]),
        ("begins", {"content": "<think>Hm</think>Hello"}, [Content(" world")]),
    ],
)
async def test_what_follows_belongs_to_what_was_begun(
    serve: Serve, tmp_path: Path, name: str, last: dict[str, Any], parts: list[Any]
) -> None:
    from appliance.server.requests.conversation import Conversation
    from appliance.server.requests.prompt import chat_prompt
    from appliance.server.requests.schema import ChatRequest

    ours, _ = saved(tmp_path, TEMPLATES[name])
    async with serve(tokenizer=ours) as running:
        turns: list[Any] = [USER, {"role": "assistant", **last}]
        chat = Conversation(sampling=ChatRequest(messages=[]), turns=lambda: turns)
        prompt = await chat_prompt(running.state, chat, "")
        assert prompt.reading is not None
        assert prompt.thinking == isinstance(parts[0], Thought)
        reader = prompt.reading.make()
        assert [*reader.push(" world"), *reader.finish()] == parts
