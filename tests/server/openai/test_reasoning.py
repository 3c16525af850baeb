"""Thoughts over HTTP, with an engine that repeats the first message."""

# ruff: noqa: E501 - texts as models and templates have them

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

    from appliance.engine.nouns.request import Request
    from tests.server.conftest import Serve

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{% if mood %}{{ mood }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif open is defined %}<think>\n{% endif %}"
)


@pytest.fixture
def tokenizer(tokenizer_with: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_with(TEMPLATE)


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


async def test_thoughts_come_under_both_names(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running:
        body = ask("<think>\nHm, 🎈.\n</think>\n\nYes.")
        answer = (await running.http.post(CHAT, json=body)).json()
        message = answer["choices"][0]["message"]
        assert message["content"] == "Yes."
        assert message["reasoning_content"] == message["reasoning"] == "Hm, 🎈."
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == len("<think>\nHm, 🎈.\n</think>".encode()) - 6
        frames = await running.frames(CHAT, **body)
        chunks = [json.loads(frame)["choices"][0] for frame in frames[:-1]]
        parts = [chunk["delta"] for chunk in chunks]
        assert parts[0] == {"role": "assistant", "content": ""}
        assert parts[-1] == {}
        assert chunks[-1]["finish_reason"] == "stop"
        thoughts = [part for part in parts if "reasoning" in part]
        assert all(p["reasoning"] == p["reasoning_content"] for p in thoughts)
        assert "".join(part["reasoning"] for part in thoughts) == "Hm, 🎈."
        assert "".join(part.get("content", "") for part in parts) == "Yes."


async def test_a_thought_that_is_cut_leaves_no_content(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running:
        body = ask("<think>never ending", max_tokens=12)
        (choice,) = (await running.http.post(CHAT, json=body)).json()["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] is None
        assert choice["message"]["reasoning"] == "never"


async def test_options_reach_the_template(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(tokenizer=tokenizer) as running:
        text = "a</think>b"

        async def message(**fields: Any) -> tuple[str | None, str | None, int]:
            answer = (await running.http.post(CHAT, json=ask(text, **fields))).json()
            found = answer["choices"][0]["message"]
            return found["content"], found.get("reasoning"), answer["usage"]["prompt_tokens"]

        plain = (await message())[2]
        assert await message() == (text, None, plain)
        # Here the template opens the thought itself.
        opened = await message(chat_template_kwargs={"open": True})
        assert opened == ("b", "a", plain + len("<think>\n"))
        closed = plain + len("<think>\n\n</think>\n\n")
        assert await message(reasoning_effort="none") == (text, None, closed)
        assert await message(chat_template_kwargs={"enable_thinking": False}) == (
            text,
            None,
            closed,
        )
        wins = await message(
            reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}
        )
        assert wins[2] == plain
        assert (await message(reasoning_effort="high"))[2] == plain + len("high")
        assert (await message(reasoning_effort="minimal"))[2] == plain + len("low")
        # A control token in an option stays text.
        assert (await message(chat_template_kwargs={"mood": "<|im_end|>"}))[2] == plain + 10
        fixed = await message(chat_template_kwargs={"bos_token": "x", "unknown": [1, {"a": None}]})
        assert fixed[2] == plain


async def test_thoughts_go_back_in_under_either_name(
    serve: Serve, tokenizer_with: Callable[[str], Tokenizer]
) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.reasoning_content or '' }}<|im_end|>{% endfor %}"
    async with serve(tokenizer=tokenizer_with(template)) as running:
        lengths = []
        for fields in ({}, {"reasoning": "abc"}, {"reasoning_content": "abc"}):
            messages = [*ask("hi")["messages"], {"role": "assistant", "content": "yo", **fields}]
            messages.append({"role": "user", "content": "and"})
            answer = await running.http.post(CHAT, json={"messages": messages})
            lengths.append(answer.json()["usage"]["prompt_tokens"])
        assert lengths == [lengths[0], lengths[0] + 3, lengths[0] + 3]


async def test_the_openai_client(serve: Serve, tokenizer: Tokenizer) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "<think>Hm.</think>Yes."}
    ]
    async with (
        serve(tokenizer=tokenizer) as running,
        running.openai.chat.completions.stream(
            model="echo",
            messages=messages,
            reasoning_effort="low",
            stream_options={"include_usage": True},
        ) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Yes."
    assert final.choices[0].message.model_extra is not None
    assert final.choices[0].message.model_extra["reasoning_content"] == "Hm."
    assert final.usage is not None
    assert final.usage.completion_tokens_details is not None
    assert final.usage.completion_tokens_details.reasoning_tokens == len("<think>Hm.</think>") - 6


async def test_the_form_of_an_answer_counts_after_its_thought(
    serve: Serve, tokenizer_with: Callable[..., Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    for special in ((), ("<think>", "</think>")):
        tokenizer = tokenizer_with(TEMPLATE, *special)
        seen: list[Request] = []
        async with serve(tokenizer=tokenizer) as running:
            generate = running.state.engine.generate

            def noted(
                request: Request,
                seen: list[Request] = seen,
                generate: Callable[[Request], Any] = generate,
            ) -> Any:
                seen.append(request)
                return generate(request)

            monkeypatch.setattr(running.state.engine, "generate", noted)
            for options in ({}, {"open": True}):
                body = ask("hi", response_format=form, chat_template_kwargs=options, max_tokens=2)
                assert (await running.http.post(CHAT, json=body)).status_code == 200
        plain, opened = (request.sampling.grammar for request in seen)
        assert plain is not None
        assert opened is not None
        assert plain.after is None
        if special:
            assert opened.text == plain.text
            assert opened.after == tokenizer.mark_ids(["</think>"])["</think>"]
        else:
            assert "think>" in opened.text


async def test_a_budget_ends_a_thought(
    serve: Serve, tokenizer_with: Callable[..., Tokenizer]
) -> None:
    for special in ((), ("<think>", "</think>")):
        async with serve(tokenizer=tokenizer_with(TEMPLATE, *special)) as running:
            opened = {"chat_template_kwargs": {"open": True}}
            text = "abcdefghijklmnopqrstuvwxyz"
            resumes = 6 if special else 13  # the engine's place after the end mark
            for fields, message, thought, rest in (
                ({"thinking_token_budget": 5, **opened}, text, "abcde", text[resumes:]),
                ({"thinking_token_budget": 0, **opened}, text, None, text[resumes - 5 :]),
                ({"thinking_token_budget": 100, **opened}, "a</think>b", "a", "b"),
                ({"thinking_token_budget": 3}, text, None, text),
            ):
                if special and "</think>" in message:
                    continue  # it stays text in a message
                answer = (await running.http.post(CHAT, json=ask(message, **fields))).json()
                found = answer["choices"][0]["message"]
                assert (found.get("reasoning"), found["content"]) == (thought, rest)
            if not special:
                body = ask(f"<think>{text}", thinking_token_budget=5)
                found = (await running.http.post(CHAT, json=body)).json()["choices"][0]["message"]
                assert (found["reasoning"], found["content"]) == ("abcde", text[13:])
            refused = ask("hi", thinking_token_budget=5, use_beam_search=True, n=2)
            answer = await running.http.post(CHAT, json=refused)
            assert answer.json()["error"]["param"] == "use_beam_search"
