"""The `openai` package as the client, as most programs use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ollama
import openai
import pytest

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

    from tests.server.conftest import Serve

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


async def test_chat(serve: Serve) -> None:
    async with serve() as running:
        answer = await running.openai.chat.completions.create(
            model="echo", messages=MESSAGES, n=2, logprobs=True, top_logprobs=3, max_tokens=4
        )
        assert [choice.message.content for choice in answer.choices] == ["use", "user"]
        assert answer.choices[1].logprobs is not None
        assert answer.choices[1].logprobs.content is not None
        first = answer.choices[1].logprobs.content[0]
        assert (first.token, first.bytes, len(first.top_logprobs)) == ("u", [117], 3)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None


async def test_chat_streaming(serve: Serve) -> None:
    async with serve() as running:
        text, reasons, usage = "", [], None
        stream = await running.openai.chat.completions.create(
            model="echo",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            stop=["lo"],
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons.append(choice.finish_reason)
        assert text == "user\nhel"
        assert reasons[-1] == "stop"
        assert usage is not None
        assert usage.completion_tokens == 11


async def test_the_streaming_helper(serve: Serve) -> None:
    async with (
        serve() as running,
        running.openai.chat.completions.stream(model="echo", messages=MESSAGES) as stream,
    ):
        final = await stream.get_final_completion()
        assert final.choices[0].message.content == "user\nhello"
        assert final.choices[0].finish_reason == "stop"


async def test_completions(serve: Serve) -> None:
    async with serve() as running:
        answer = await running.openai.completions.create(
            model="echo", prompt=["ab", "cd"], max_tokens=3, logprobs=1
        )
        assert [choice.text for choice in answer.choices] == ["aba", "cdc"]
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.text_offset == [0, 1, 2]
        text = ""
        stream = await running.openai.completions.create(
            model="echo", prompt="ab", max_tokens=3, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].text
        assert text == "aba"


async def test_models(serve: Serve) -> None:
    async with serve(server={"api_key": "secret-key"}) as running:
        models = await running.openai.models.list()
        assert [model.id for model in models.data] == ["echo"]
        model = await running.openai.models.retrieve("echo")
        assert (model.object, model.owned_by) == ("model", "appliance")
        assert model.model_extra is not None
        assert model.model_extra["max_model_len"] == 512
        with pytest.raises(openai.NotFoundError) as caught:
            await running.openai.models.retrieve("gpt-4o")
        assert caught.value.code == "model_not_found"


async def test_errors_have_their_classes(serve: Serve) -> None:
    async with serve(server={"api_key": "secret-key"}) as running:
        create = running.openai.chat.completions.create
        with pytest.raises(openai.NotFoundError, match="echo"):
            await create(model="gpt-4o", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="context") as caught:
            await create(model="echo", messages=[{"role": "user", "content": "x" * 600}])
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"
        assert caught.value.request_id
        with pytest.raises(openai.AuthenticationError, match="wrong"):
            await running.openai.with_options(api_key="other").models.list()


async def test_a_wrong_base_url_is_told_from_the_right_one(serve: Serve) -> None:
    """The mistakes are those of clients' issues: a path segment too few or too many."""
    import anthropic  # takes seconds; few processes run its tests

    async with serve() as running:
        for end in ("", "/v1/chat/completions", "/api/v1", "/v1/v1", "//v1", "/openai/deployments"):
            client = running.openai.with_options(base_url=f"{running.url}{end}")
            with pytest.raises(openai.NotFoundError, match="but '/v1/chat/completions': change"):
                await client.chat.completions.create(model="echo", messages=MESSAGES)
        wrong = f"{running.url}/v1"
        async with anthropic.AsyncAnthropic(base_url=wrong, api_key="none") as claude:
            with pytest.raises(anthropic.NotFoundError, match="but '/v1/messages': change"):
                await claude.messages.create(
                    model="echo", max_tokens=4, messages=[{"role": "user", "content": "hi"}]
                )
        async with ollama.AsyncClient(wrong) as llama:
            with pytest.raises(ollama.ResponseError, match="but '/api/chat': change"):
                await llama.chat("echo", [{"role": "user", "content": "hi"}])
        for path in ("/chat", "/v2/" + "a/" * 30_000):
            missing = await running.http.post(path, json={})
            assert missing.status_code == 404
            assert "lists what there is" in missing.text


async def test_an_error_in_mid_stream_is_raised(serve: Serve) -> None:
    async with serve("step_seconds=0.01") as running:
        stream = await running.openai.completions.create(
            model="echo", prompt="ab", max_tokens=300, stream=True
        )
        await anext(stream)
        running.state.engine.fail_all(ValueError("not for strangers"))
        with pytest.raises(openai.APIError, match="internal error"):
            async for _ in stream:
                pass
