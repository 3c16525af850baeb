from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from support.runs.waiting import until

from appliance.server.http import body

if TYPE_CHECKING:
    import pytest

    from tests.server.conftest import Serve

CHAT = "/v1/chat/completions"


def parse(frames: list[str]) -> list[dict[str, Any]]:
    return [json.loads(frame) for frame in frames if frame != "[DONE]"]


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


async def test_a_whole_answer(serve: Serve) -> None:
    async with serve() as running:
        response = await running.chat("héllo 🎈")
        assert response.headers["content-type"] == "application/json"
        answer = response.json()
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-")
        assert answer["model"] == "echo"
        (choice,) = answer["choices"]
        # The engine repeats the prompt up to the first control token that ends an answer.
        assert choice == {
            "index": 0,
            "message": {"content": "user\nhéllo 🎈", "role": "assistant", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
        prompt = len("user\nhéllo 🎈".encode()) + len("\nassistant\n") + 3
        generated = 1 + len("user\nhéllo 🎈".encode()) + 1
        assert answer["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        again = (await running.chat("héllo 🎈")).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt // 16 * 16


async def test_a_stream_has_role_content_reason_and_done(serve: Serve) -> None:
    async with serve() as running:
        frames = await running.frames(CHAT, **say("🎈é", model="echo"))
        assert frames[-1] == "[DONE]"
        chunks = parse(frames)
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert all("usage" not in chunk for chunk in chunks)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[-1] == {}
        assert [delta["content"] for delta in deltas[1:-1]] == [*"user\n", "🎈", "é"]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["stop"]


async def test_usage_comes_only_if_asked_for(serve: Serve) -> None:
    async with serve() as running:
        for options in ({"include_usage": False}, {"include_usage": None}, {}, None):
            chunks = parse(await running.frames(CHAT, **say("hi", stream_options=options)))
            assert all("usage" not in chunk for chunk in chunks)
        asked = say("hi", stream_options={"include_usage": True})
        chunks = parse(await running.frames(CHAT, **asked))
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == len("user\nhi") + 2


async def test_length_ends_an_answer_under_both_names(serve: Serve) -> None:
    async with serve() as running:
        for fields in ({"max_tokens": 4}, {"max_completion_tokens": 4}):
            answer = (await running.chat("hi", **fields)).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["choices"][0]["message"]["content"] == "use"
            assert answer["usage"]["completion_tokens"] == 4
        newer_wins = (await running.chat("hi", max_tokens=9, max_completion_tokens=2)).json()
        assert newer_wins["usage"]["completion_tokens"] == 2


async def test_stop_strings_are_held_back_and_never_leak(serve: Serve) -> None:
    async with serve() as running:
        body = say("one two three four", stop=["thrall", "three"], ignore_eos=True)
        chunks = parse(await running.frames(CHAT, **body))
        texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(texts) == "user\none two "
        assert "tw" in texts, "a beginning that came to nothing is let out"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        await until(running.idle)
        whole = (await running.chat("one two three four", stop="three", ignore_eos=True)).json()
        assert whole["choices"][0]["message"]["content"] == "user\none two "
        assert whole["usage"]["completion_tokens"] == 1 + len("user\none two three")


async def test_a_stop_string_that_does_not_come_is_flushed(serve: Serve) -> None:
    async with serve() as running:
        answer = (await running.chat("hi th", stop=["three"])).json()
        assert answer["choices"][0]["message"]["content"] == "user\nhi th"


async def test_choices_are_numbered_and_usage_counts_all(serve: Serve) -> None:
    async with serve() as running:
        answer = (await running.chat("abc", n=3, max_tokens=5, ignore_eos=True)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert texts == ["user", "user\n", "ser\na"]
        assert answer["usage"]["completion_tokens"] == 15
        chunks = parse(await running.frames(CHAT, **say("abc", n=2, max_tokens=5, ignore_eos=True)))
        by_choice: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
        for chunk in chunks:
            by_choice[chunk["choices"][0]["index"]].append(chunk["choices"][0])
        for choice, parts in by_choice.items():
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            assert parts[-1]["finish_reason"] == "length"
            text = "".join(part["delta"].get("content", "") for part in parts)
            assert text == texts[choice]


async def test_one_choice_stops_and_the_other_goes_on(serve: Serve) -> None:
    async with serve("step_seconds=0.002") as running:
        body = {"n": 3, "max_tokens": 200, "ignore_eos": True, "stop": "user\nabc"}
        answer = (await running.chat("abc", **body)).json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
        # Choice 2 begins with "ser", so that it reaches the whole string only in its second round.
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert texts == ["", "", "ser\nabc\nassistant\n"]
        await until(running.idle)
        assert running.state.engine.stats.generation_tokens_total < 100


async def test_logprobs_have_text_bytes_and_alternatives(serve: Serve) -> None:
    async with serve() as running:
        answer = (await running.chat("é", logprobs=True, top_logprobs=2)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        # The control token at the end is not part of the answer.
        assert [entry["token"] for entry in content[-2:]] == ["\ufffd", "\ufffd"]
        assert [entry["bytes"] for entry in content[-2:]] == [[0xC3], [0xA9]]
        u = content[1]
        assert (u["token"], u["bytes"], u["logprob"]) == ("u", [117], -0.5)
        assert [top["token"] for top in u["top_logprobs"]] == ["u", "v"]
        only_chosen = (await running.chat("é", logprobs=True)).json()
        assert only_chosen["choices"][0]["logprobs"]["content"][1]["top_logprobs"] == []


async def test_streamed_logprobs_are_the_same_ones(serve: Serve) -> None:
    async with serve() as running:
        body = say("aé🎈", logprobs=True, top_logprobs=1)
        whole = (await running.http.post(CHAT, json=body)).json()
        chunks = parse(await running.frames(CHAT, **body))
        streamed = [
            entry
            for chunk in chunks
            if chunk["choices"][0]["logprobs"]
            for entry in chunk["choices"][0]["logprobs"]["content"]
        ]
        assert streamed == whole["choices"][0]["logprobs"]["content"]
        balloon = next(c for c in chunks if c["choices"][0]["delta"].get("content") == "🎈")
        assert len(balloon["choices"][0]["logprobs"]["content"]) == 4


async def test_roles_and_content_in_every_accepted_form(serve: Serve) -> None:
    async with serve() as running:
        messages = [
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}],
            },
            {"role": "tool", "content": "42", "tool_call_id": "1"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "c"},
        ]
        prompt = "".join(
            f"<|im_start|>{role}\n{text}<|im_end|>\n"
            for role, text in [
                ("system", "be brief"), ("user", "a\nb"),
                ("assistant", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
                ("user", "<tool_response>\n42\n</tool_response>"), ("assistant", ""), ("user", "c"),
            ]
        )  # fmt: skip
        response = await running.http.post(CHAT, json={"messages": messages})
        assert response.status_code == 200
        expected = await running.complete(prompt + "<|im_start|>assistant\n", max_tokens=1)
        assert (
            response.json()["usage"]["prompt_tokens"] == (expected.json()["usage"]["prompt_tokens"])
        )


async def test_control_tokens_in_a_message_stay_text(serve: Serve) -> None:
    async with serve() as running:
        answer = (await running.chat("a<|im_end|>b")).json()
        assert answer["choices"][0]["message"]["content"] == "user\na<|im_end|>b"


async def test_min_tokens_and_ignore_eos_reach_the_engine(serve: Serve) -> None:
    async with serve() as running:
        longer = (await running.chat("hi", min_tokens=12)).json()
        assert longer["usage"]["completion_tokens"] > 12
        ignored = (await running.chat("hi", ignore_eos=True, max_tokens=40)).json()
        assert ignored["usage"]["completion_tokens"] == 40
        assert ignored["choices"][0]["finish_reason"] == "length"


async def test_an_unknown_field_is_logged_once(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "names_logged", set())  # other tests send more than are logged
    caplog.set_level("INFO", "appliance")
    async with serve() as running:
        for _ in range(3):
            answer = await running.chat("hi", max_tokens=1, nobody_knows_this="secret")
            assert answer.status_code == 200
    told = [line for line in caplog.messages if "nobody_knows_this" in line]
    assert told == ["field 'nobody_knows_this' of a request is not known and ignored"]


async def test_fields_without_effect_are_accepted(serve: Serve) -> None:
    async with serve() as running:
        response = await running.chat(
            "hi",
            store=True,
            metadata={"a": "b"},
            user="me",
            service_tier="auto",
            prompt_cache_key="k",
            something_new={"x": 1},
            tools=[],
            response_format={"type": "text"},
            logit_bias={"5": 1},
            temperature=None,
            stop=None,
        )
        assert response.status_code == 200, response.text
