"""Reports that are too long for a frame are cut, and equal the original once reassembled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.nouns.messages import Candidate, SequenceDelta, StepReport, TokenLogprobs
from appliance.engine.nouns.request import FinishReason
from appliance.engine.process.framing import (
    MAX_CANDIDATES,
    MAX_FRAME_BYTES,
    encode_frame,
    pieces_of,
)
from appliance.stats import EngineStats


def score(token_id: int, num_top: int) -> TokenLogprobs:
    top = tuple(Candidate(2**20 + rank, -1.5) for rank in range(num_top))
    return TokenLogprobs(Candidate(token_id, -2.5), top)


def delta(number: int, num_scores: int, num_top: int) -> SequenceDelta:
    scores = tuple(score(place, num_top) for place in range(num_scores))
    return SequenceDelta(
        request_id=f"r{number}",
        token_ids=(number,),
        logprobs=(score(number, num_top),) if number % 2 else None,
        finish_reason=FinishReason.LENGTH if number % 3 else None,
        num_cached_tokens=number,
        queue_seconds=0.5,
        prompt_logprobs=scores or None,
    )


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=6), st.integers(12, 60))
def test_pieces_say_what_the_whole_said(sizes: list[tuple[int, int]], most: int) -> None:
    deltas = tuple(delta(number, *size) for number, size in enumerate(sizes))
    report = StepReport(deltas=deltas, started=("r0", "r1"), stats=EngineStats(steps_total=9))
    pieces = list(pieces_of(report, most))
    assert [piece.started for piece in pieces] == [("r0", "r1")] + [()] * (len(pieces) - 1)
    assert [piece.stats for piece in pieces] == [None] * (len(pieces) - 1) + [report.stats]
    for piece in pieces:
        assert (
            sum(
                len(tokens) * (1 + len(tokens[0].top))
                for one in piece.deltas
                for tokens in (one.logprobs, one.prompt_logprobs)
                if tokens
            )
            <= most + 6
        ), "those beside the last part of a prompt's are few"
    for whole in deltas:
        parts = [one for piece in pieces for one in piece.deltas]
        own = [one for one in parts if one.request_id == whole.request_id]
        scores = [one for part in own for one in part.prompt_logprobs or ()]
        assert tuple(scores) == (whole.prompt_logprobs or ())
        assert [one.finish_reason for one in own[:-1]] == [None] * (len(own) - 1)
        assert [one.token_ids for one in own[:-1]] == [()] * (len(own) - 1)
        last = own[-1]
        assert (last.token_ids, last.logprobs) == (whole.token_ids, whole.logprobs)
        assert (last.finish_reason, last.queue_seconds) == (whole.finish_reason, 0.5)


def test_a_report_of_more_than_a_frame_fits_into_several() -> None:
    rows = MAX_CANDIDATES // 21 + 1
    scores = (score(2**20, 20),) * rows
    long = SequenceDelta(request_id="long", prompt_logprobs=scores)
    report = StepReport(deltas=(long,) * 3)
    pieces = list(pieces_of(report))
    sizes = [len(encode_frame(piece)) for piece in pieces]
    assert len(sizes) > 1
    assert max(sizes) < MAX_FRAME_BYTES // 2 + 2**16
    assert sum(sizes) > MAX_FRAME_BYTES
