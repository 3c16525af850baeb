from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from support.runs.waiting import until

if TYPE_CHECKING:
    from tests.server.conftest import Serve

COMPLETIONS = "/v1/completions"


FORMS: list[tuple[Any, list[str]]] = [
    ("abc", ["abca"]),
    (["abc"], ["abca"]),
    (["abc", "xyz"], ["abca", "xyzx"]),
    ([97, 98], ["abab"]),
    ([[97, 98], [120]], ["abab", "xxxx"]),
]


async def test_prompts_in_every_form(serve: Serve) -> None:
    async with serve() as running:
        for prompt, texts in FORMS:
            answer = (await running.complete(prompt, max_tokens=4)).json()
            assert answer["object"] == "text_completion"
            assert answer["id"].startswith("cmpl-")
            assert [choice["text"] for choice in answer["choices"]] == texts
            assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
            assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
            assert answer["usage"]["completion_tokens"] == 4 * len(texts)
            streamed = [""] * len(texts)
            frames = await running.frames(COMPLETIONS, prompt=prompt, max_tokens=4)
            assert frames[-1] == "[DONE]"
            for frame in frames[:-1]:
                (choice,) = json.loads(frame)["choices"]
                streamed[choice["index"]] += choice["text"]
            assert streamed == texts


async def test_sixteen_tokens_unless_said_otherwise_or_what_the_context_leaves(
    serve: Serve,
) -> None:
    async with serve(max_model_len=32) as running:
        assert (await running.complete("abc")).json()["usage"]["completion_tokens"] == 16
        answer = (await running.complete("a" * 30)).json()
        assert answer["usage"]["completion_tokens"] == 2


async def test_the_last_frame_of_a_choice_has_the_reason_and_no_text(serve: Serve) -> None:
    async with serve() as running:
        options = {"stream_options": {"include_usage": True}}
        frames = await running.frames(COMPLETIONS, prompt="ab", max_tokens=2, **options)
        chunks = [json.loads(frame) for frame in frames[:-1]]
        choices = [chunk["choices"] for chunk in chunks]
        assert [(c[0]["text"], c[0]["finish_reason"]) for c in choices[:-1]] == [
            ("a", None),
            ("b", None),
            ("", "length"),
        ]
        assert choices[-1] == []
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
        assert chunks[-1]["usage"]["total_tokens"] == 4


async def test_echo_puts_the_prompt_in_front(serve: Serve) -> None:
    async with serve() as running:
        for prompt in ("é!", [0xC3, 0xA9, 33]):
            answer = (await running.complete(prompt, max_tokens=3, echo=True, n=2)).json()
            assert [choice["text"] for choice in answer["choices"]] == ["é!é!", "é!\ufffd!\ufffd"]
            frames = await running.frames(COMPLETIONS, prompt=prompt, max_tokens=3, echo=True)
            assert "".join(json.loads(f)["choices"][0]["text"] for f in frames[:-1]) == "é!é!"


async def test_logprobs_in_the_form_of_text_completions(serve: Serve) -> None:
    async with serve() as running:
        answer = (await running.complete("abc", max_tokens=3, logprobs=2)).json()
        assert answer["choices"][0]["logprobs"] == {
            "tokens": ["a", "b", "c"],
            "token_logprobs": [-0.5, -0.5, -0.5],
            "top_logprobs": [
                {"a": -0.5, "b": -1.5},
                {"b": -0.5, "c": -1.5},
                {"c": -0.5, "d": -1.5},
            ],
            "text_offset": [0, 1, 2],
        }
        none = (await running.complete("abc", max_tokens=1, logprobs=0)).json()
        assert none["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}]
        frames = await running.frames(COMPLETIONS, prompt="abc", max_tokens=3, logprobs=0)
        offsets = [
            offset
            for frame in frames[:-1]
            if (logprobs := json.loads(frame)["choices"][0]["logprobs"])
            for offset in logprobs["text_offset"]
        ]
        assert offsets == [0, 1, 2]


async def test_echo_with_logprobs_scores_the_prompt(serve: Serve) -> None:
    async with serve() as running:
        both = {"echo": True, "logprobs": 1}
        answer = (await running.complete(["abé", "xy"], max_tokens=1, **both)).json()
        first, second = answer["choices"]
        assert (first["text"], second["text"]) == ("abéa", "xyx")
        assert second["logprobs"] == {
            "tokens": ["x", "y", "x"],
            "token_logprobs": [None, -0.5, -0.5],
            "top_logprobs": [None, {"y": -0.5}, {"x": -0.5}],
            "text_offset": [0, 1, 2],
        }
        assert len(first["logprobs"]["tokens"]) == 5  # bytes
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 2)
        for prompt, count in (("abc", 3), ("a", 1)):
            (only,) = (await running.complete(prompt, **both)).json()["choices"]
            assert only["text"] == prompt
            assert len(only["logprobs"]["tokens"]) == count


async def test_scoring_takes_an_end_token_like_any_other(serve: Serve) -> None:
    async with serve() as running:
        answer = (await running.complete("ab<eos>c", echo=True, logprobs=0)).json()
        assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b", "<eos>", "c"]


async def test_an_end_token_ends_and_is_not_shown(serve: Serve) -> None:
    async with serve() as running:
        answer = (await running.complete("ab<eos>c", max_tokens=9, logprobs=0)).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
        assert choice["logprobs"]["tokens"] == ["a", "b"]
        other = (await running.complete("abc", max_tokens=9, stop_token_ids=[98])).json()
        assert other["choices"][0]["finish_reason"] == "stop"
        assert other["usage"]["completion_tokens"] == 2


async def test_several_prompts_end_at_stop_strings_after_which_nothing_comes(serve: Serve) -> None:
    """The engine is slow: it learns that the choices ended before it has another token."""
    async with serve("holds_at=5") as running:
        body = {"prompt": ["abc", "xbc"], "n": 2, "max_tokens": 9, "stop": "b"}
        choices = (await running.complete(**body)).json()["choices"]
        assert [choice["text"] for choice in choices] == ["a", "", "x", ""]
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
        frames = await running.frames("/v1/completions", **body)
        assert frames[-1] == "[DONE]"
        await until(running.idle)


async def test_a_hundred_at_once_are_all_answered(serve: Serve) -> None:
    async with serve(server={"max_queue": 200}, max_num_seqs=8) as running:
        prompts = [f"{number:03d}" for number in range(50)]
        answers = (await running.complete(prompts, n=2, max_tokens=6)).json()["choices"]
        assert len(answers) == 100
        for choice in answers:
            prompt = prompts[choice["index"] // 2]
            begin = choice["index"] % 2
            assert choice["text"] == (prompt * 3)[begin : begin + 6]


async def test_the_best_of_several_come_first_and_all_are_counted(serve: Serve) -> None:
    async with serve() as running:
        asked = {"max_tokens": 4, "n": 2, "best_of": 5}
        answer = (await running.complete(["abcdef", "uvwxyz"], **asked)).json()
        # The echo begins choice i at the i-th letter, and gives later choices higher probabilities.
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == ["efab", "defa", "yzuv", "xyzu"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["choices"][0]["cumulative_logprob"] == pytest.approx(-4 * 0.5 / 5)
        assert {choice["logprobs"] for choice in answer["choices"]} == {None}
        assert answer["usage"]["completion_tokens"] == 2 * 5 * 4
        plain = (await running.complete("abcdef", max_tokens=4)).json()
        assert "cumulative_logprob" not in plain["choices"][0]
        chat = (await running.chat("abcdef", logprobs=True, **asked)).json()
        assert [len(choice["logprobs"]["content"]) for choice in chat["choices"]] == [4, 4]
        same = await running.frames(COMPLETIONS, prompt="abc", n=2, best_of=2, max_tokens=2)
        assert same[-1] == "[DONE]", "nothing is chosen, so it can be streamed"


async def test_scoring_alone_generates_nothing(serve: Serve) -> None:
    async with serve() as running:
        answer = (await running.complete("ab", echo=True, logprobs=0, max_tokens=0)).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
        assert choice["logprobs"]["tokens"] == ["a", "b"]
        assert answer["usage"]["completion_tokens"] == 0
        bare = (await running.complete(["ab", "c"], echo=True, max_tokens=0)).json()
        assert [one["text"] for one in bare["choices"]] == ["ab", "c"]
        assert [one["logprobs"] for one in bare["choices"]] == [None, None]
        refused = await running.complete("ab", max_tokens=0)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


async def test_scores_of_the_prompt_come_beside_the_answer(serve: Serve) -> None:
    async with serve() as running:
        asked = {"prompt_logprobs": 2, "max_tokens": 2}
        answer = (await running.complete(["ab", "c"], n=2, **asked)).json()
        likely = {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
        second = {"logprob": -1.5, "rank": 2, "decoded_token": "c"}
        scores = [None, {"98": likely, "99": second}]
        assert [one["prompt_logprobs"] for one in answer["choices"]] == [scores] * 2 + [[None]] * 2
        assert answer["choices"][0]["text"] == "ab"
        alone = (await running.complete("ab", prompt_logprobs=0, max_tokens=0)).json()
        (choice,) = alone["choices"]
        assert choice["text"] == ""
        assert choice["prompt_logprobs"] == [None, {"98": {**likely, "rank": None}}]
        chat = (await running.chat("hi", prompt_logprobs=1, max_tokens=1)).json()
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert chat["prompt_logprobs"][1]["117"]["decoded_token"] == "u"
        assert "prompt_logprobs" not in (await running.chat("hi", max_tokens=1)).json()
