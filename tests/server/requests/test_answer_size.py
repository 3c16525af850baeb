"""Answers in one piece: how large they may be, and which thread assembles them."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from appliance.errors import RequestError
from appliance.server.requests import answer_size, intake
from appliance.server.requests.answer import merged as merge
from appliance.server.requests.answer_size import (
    MAX_LOGPROBS,
    MAX_TOKENS,
    check_answer,
    most_tokens,
)

if TYPE_CHECKING:
    from tests.server.conftest import Serve


@pytest.mark.parametrize(
    ("prompts", "choices", "tokens", "logprobs", "said"),
    [
        (1, 1, MAX_TOKENS, None, ""),
        (8, 8, MAX_TOKENS // 64, None, ""),
        (8, 8, MAX_TOKENS // 64 + 1, None, "8 x 8 x 16385 tokens .* are 1048640,"),
        (1, 1, MAX_LOGPROBS // 21, 20, ""),
        (1, 8, 8192, 20, "1 x 8 x 8192 tokens .* with 21 log probabilities each are 1376256,"),
        (64, 8, 131072, 20, "are 67108864, .* holds at most 1048576 tokens; .* at most 48 tokens"),
        (64, 8, 1, 20, ""),
    ],
)
def test_the_product_is_bounded(
    prompts: int, choices: int, tokens: int, logprobs: int | None, said: str
) -> None:
    if not said:
        check_answer(prompts, choices, tokens, logprobs, param="max_tokens")
        return
    with pytest.raises(RequestError, match=said) as caught:
        check_answer(prompts, choices, tokens, logprobs, param="max_tokens")
    assert caught.value.param == "max_tokens"
    most = most_tokens(prompts, choices, logprobs)
    check_answer(prompts, choices, most, logprobs, param="max_tokens")


async def test_what_is_too_large_is_refused_and_what_was_left_open_is_cut(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_size, "MAX_TOKENS", 100)
    monkeypatch.setattr(answer_size, "MAX_LOGPROBS", 60)
    async with serve("num_blocks=2000") as running:
        answer = await running.complete(["ab", "cd"], n=3, max_tokens=17)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "max_tokens"
        assert "2 x 3 x 17 tokens" in error["message"]
        assert (await running.complete(["ab", "cd"], n=3, max_tokens=16)).status_code == 200
        refused = await running.chat("ab", max_tokens=11, logprobs=True, top_logprobs=5)
        assert "with 6 log probabilities each are 66" in refused.json()["error"]["message"]
        scored = await running.complete("x" * 40, echo=True, logprobs=1, max_tokens=1)
        assert scored.json()["error"]["param"] == "prompt"

        open_end = await running.chat("ab", logprobs=True, top_logprobs=5, ignore_eos=True)
        choice = open_end.json()["choices"][0]
        assert len(choice["logprobs"]["content"]) == 10
        assert choice["finish_reason"] == "length"
        frames = await running.frames("/v1/completions", prompt="ab", max_tokens=300, logprobs=5)
        assert frames[-1] == "[DONE]", "a stream is sent as it comes"
        assert len(frames) > 300


async def test_a_large_answer_is_put_together_beside_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    json_response = intake.json_response  # type: ignore[attr-defined]

    def noted(content: Any) -> Any:
        threads.append(threading.get_ident())
        return json_response(content)

    monkeypatch.setattr(intake, "json_response", noted)
    monkeypatch.setattr(intake, "OFF_LOOP_LOGPROBS", 100)
    async with serve() as running:
        for tokens, aside in ((16, False), (17, True)):
            answer = await running.complete("ab", max_tokens=tokens, logprobs=5)
            assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == tokens
            assert (threads.pop() != threading.get_ident()) == aside


class Endless:
    """A generation that always has another delta."""

    def __init__(self) -> None:
        self.taken = 0

    def ready(self) -> int:
        self.taken += 1
        return self.taken


async def test_what_is_not_taken_stays_with_its_generation() -> None:
    """The queue of several prompts' deltas was unbounded, so that no client was too slow for it."""
    sources = [Endless(), Endless()]
    merged = merge(sources)  # type: ignore[arg-type]
    await anext(merged)
    for _ in range(100):
        await asyncio.sleep(0)
    assert sum(source.taken for source in sources) == 1
    await merged.aclose()
