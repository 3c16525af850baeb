"""Measure how fast an engine answers requests of random tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._C._autograd import DeviceType

from bench.lib.requests import submit

if TYPE_CHECKING:
    from appliance.engine.engine import LLMEngine


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a prompt, tokens of an answer, and repeats."""

    prompt_tokens: int
    max_tokens: int
    repeats: int


def drain(engine: LLMEngine) -> list[tuple[float, str]]:
    """Run until nothing is left; return when each token came, and of which request.

    Raises:
        RuntimeError: a request ended with an error.
    """
    tokens = []
    while engine.has_work:
        report = engine.step()
        now = time.perf_counter()
        for delta in report.deltas:
            if delta.error is not None:
                raise RuntimeError(delta.error)
            tokens += [(now, delta.request_id)] * len(delta.token_ids)
    return tokens


def decode_rate(engine: LLMEngine, streams: int, sizes: Sizes) -> float:
    """Measure tokens per second of all streams once each has its first token."""
    submit(engine, streams, sizes.prompt_tokens, sizes.max_tokens)
    tokens = drain(engine)
    assert len(tokens) == streams * sizes.max_tokens, len(tokens)
    begun: dict[str, float] = {}
    for moment, name in tokens:
        begun.setdefault(name, moment)
    begin = max(begun.values())
    after = [moment for moment, _ in tokens if moment > begin]
    return len(after) / (after[-1] - begin)


def prefill_rate(engine: LLMEngine, prompt_tokens: int) -> float:
    """Measure prompt tokens per second until the first token."""
    submit(engine, 1, prompt_tokens, 1)
    begin = time.perf_counter()
    drain(engine)
    return prompt_tokens / (time.perf_counter() - begin)


def throughput(engine: LLMEngine, count: int, sizes: Sizes) -> float:
    """Measure output tokens per second of many requests at once, prompts included."""
    submit(engine, count, 2 * sizes.prompt_tokens, 2 * sizes.max_tokens)
    begin = time.perf_counter()
    return len(drain(engine)) / (time.perf_counter() - begin)


def idle_share(engine: LLMEngine, streams: int, sizes: Sizes) -> float | None:
    """Measure the share of time in which no kernel runs, in the middle of a decode run."""
    submit(engine, streams, sizes.prompt_tokens, sizes.max_tokens)
    for _ in range(sizes.max_tokens // 4):
        engine.step()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(sizes.max_tokens // 4):
            engine.step()
        torch.cuda.synchronize()
    drain(engine)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    return idle_of(spans) if spans else None  # some machines forbid profiling


def idle_of(spans: list[tuple[float, float]]) -> float:
    """Return the share from the first begin to the last end that no span covers."""
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return round(1 - busy / (end - spans[0][0]), 4)
