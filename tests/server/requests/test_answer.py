from __future__ import annotations

import json
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest
from msgspec import UNSET
from support.runs.waiting import until

from appliance.engine.nouns.messages import SequenceDelta
from appliance.engine.nouns.request import FinishReason, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.server.openai.chunks import StreamUsage
from appliance.server.openai.completions import completion_frames
from appliance.server.requests.answer import MAX_TURN, Answer
from appliance.server.requests.exchange import CompletionTokensDetails, Exchange

if TYPE_CHECKING:
    from tests.server.conftest import Running, Serve


def answer_to(running: Running, prompt: bytes, **sampling: object) -> Answer:
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
    )
    return Answer(running.state, [request])


async def test_what_came_meanwhile_is_handed_over_together(serve: Serve) -> None:
    async with serve() as running:
        with answer_to(running, b"ab", max_tokens=100) as answer:
            await until(lambda: running.state.engine.stats.generation_tokens_total == 100)
            async with aclosing(answer.pieces()) as turns:
                found = [pieces async for pieces in turns]
        assert list(map(len, found)) == [MAX_TURN, 100 - MAX_TURN]
        assert "".join(piece.text for pieces in found for piece in pieces) == "ab" * 50


async def test_it_is_still_one_frame_a_token(serve: Serve) -> None:
    async with serve() as running:
        exchange = Exchange.begin(running.state, "cmpl", None, logprobs=False)
        with answer_to(running, b"ab", max_tokens=5) as answer:
            await until(lambda: running.state.engine.stats.generation_tokens_total == 5)
            frames = completion_frames(exchange, answer, usage=StreamUsage(), echo=[""])
            async with aclosing(frames):
                writes = [write async for write in frames]
        assert len(writes) == 2, "all there was, and [DONE]"
        chunks = [json.loads(frame[6:]) for frame in writes[0].split(b"\n\n") if frame]
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
        assert texts == ["a", "b", "a", "b", "a", ""]


@pytest.mark.parametrize("n", [1, 2])
async def test_nothing_comes_after_a_stop_string(serve: Serve, n: int) -> None:
    async with serve("step_seconds=0.001") as running:
        with answer_to(running, b"abc", n=n, max_tokens=400, stop=("ca",)) as answer:
            await until(lambda: running.state.engine.stats.generation_tokens_total >= 20 * n)
            async with aclosing(answer.pieces()) as turns:
                pieces = [piece async for turn in turns for piece in turn]
        texts = ["".join(p.text for p in pieces if p.choice == number) for number in range(n)]
        assert texts == ["ab", "b"][:n]
        assert sorted(p.choice for p in pieces if p.finish_reason is not None) == list(range(n))
        assert answer.completion_tokens == (4 if n == 1 else 7)
        await until(running.idle)


async def test_tokens_behind_a_stop_string_in_the_same_step_do_not_count(serve: Serve) -> None:
    async with serve("step_seconds=1000") as running:
        run = SequenceDelta(
            request_id="r",
            token_ids=tuple(b"abcab"),
            finish_reason=FinishReason.LENGTH,
            num_draft_tokens=6,
            num_accepted_tokens=4,
        )
        late = SequenceDelta(request_id="r", token_ids=tuple(b"xyz"))
        with answer_to(running, b"abc", max_tokens=400, stop=("ca",)) as answer:
            pieces = answer.take(0, run)
            assert answer.take(0, late) == [], "what was on its way when it ended"
        assert "".join(piece.text for piece in pieces) == "ab"
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [
            FinishReason.STOP
        ]
        assert answer.completion_tokens == 4
        details = answer.usage().completion_tokens_details
        assert isinstance(details, CompletionTokensDetails)
        predicted = (details.accepted_prediction_tokens, details.rejected_prediction_tokens)
        assert predicted == (4, 2)
        assert details.reasoning_tokens is UNSET
