"""Splits a report that exceeds a frame: prompt scores multiply with alternatives.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from appliance.engine.nouns.messages import StepReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.engine.nouns.messages import SequenceDelta

# Per report. Each takes up to 15 bytes of MessagePack, so a frame has at most half of its 16 MiB.
MAX_CANDIDATES = 2**19


def pieces_of(report: StepReport, most: int = MAX_CANDIDATES) -> Iterator[StepReport]:
    """Yield reports that together equal this one; nearly always it alone.

    Args:
        most: log probabilities per piece; those of one token stay together.
    """
    if sum(map(_num_candidates, report.deltas)) <= most:
        yield report
        return
    held: list[SequenceDelta] = []
    room = most
    started = report.started
    for whole in report.deltas:
        for delta in _cut(whole, most):
            if held and room < _num_candidates(delta):
                yield StepReport(deltas=tuple(held), started=started)
                held, room, started = [], most, ()
            held.append(delta)
            room -= _num_candidates(delta)
    yield replace(report, deltas=tuple(held), started=started)


def _num_candidates(delta: SequenceDelta) -> int:
    return sum(
        len(tokens) * (1 + len(tokens[0].top))
        for tokens in (delta.logprobs, delta.prompt_logprobs)
        if tokens
    )


def _cut(delta: SequenceDelta, most: int) -> Iterator[SequenceDelta]:
    """Split a prompt's scores; the last part has the rest of the delta."""
    scores = delta.prompt_logprobs
    if not scores or _num_candidates(delta) <= most:
        yield delta
        return
    step = max(1, most // (1 + len(scores[0].top)))
    last = (len(scores) - 1) // step * step
    for start in range(0, last, step):
        yield type(delta)(
            request_id=delta.request_id,
            index=delta.index,
            num_cached_tokens=delta.num_cached_tokens,
            prompt_logprobs=scores[start : start + step],
        )
    yield replace(delta, prompt_logprobs=scores[last:])
