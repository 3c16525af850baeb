"""Measure one server under load: start, prefill, a sweep over numbers of clients, memory.

A repeat counts only if other programs used little CPU in it; else it is repeated, up to a bound,
and the row says so.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from appliance.bench.figures import spread
from appliance.bench.load import Burst, latency, run_burst
from bench.lib.processes import Meter

if TYPE_CHECKING:
    from appliance.bench.own_server import ServerProcess
    from bench.lib.prompts import ExactPrompts

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Load:
    """The load of every server.

    Attributes:
        concurrency: numbers of clients, one level each.
        prompt_tokens: of a prompt in the sweep.
        max_tokens: of an answer in the sweep.
        prefill_tokens: of a prompt in the measurement of prefill.
        prefill_prompts: how many of those make one repeat.
        repeats: that count, of each level.
        attempts: at most so many repeats, counted or not.
        quiet_cores: a repeat counts if others used less.
        pause: seconds to wait after one that does not count.
    """

    concurrency: tuple[int, ...] = (1, 4, 8, 16)
    prompt_tokens: int = 63
    max_tokens: int = 128
    prefill_tokens: int = 512
    prefill_prompts: int = 5
    repeats: int = 3
    attempts: int = 10
    quiet_cores: float = 0.25
    pause: float = 3.0


@dataclass(frozen=True, slots=True)
class Kept(Generic[ResultT]):
    """Repeats that count, and how quiet the machine was."""

    results: list[ResultT]
    notes: dict[str, Any]


class Trial:
    """The measurements of one server."""

    def __init__(
        self,
        server: ServerProcess,
        load: Load,
        prompts: ExactPrompts,
        body: Callable[[str, int], dict[str, Any]],
    ) -> None:
        self._server = server
        self._load = load
        self._prompts = prompts
        self._body = body

    async def run(self) -> dict[str, Any]:
        """Wait for the server, then load it.

        Raises:
            LoadError: it does not start, or does not answer as asked.
        """
        load = self._load
        meter = Meter(self._server)
        healthy = await self._server.healthy()
        cores, memory = meter.read(), self._server.memory()
        first = await self._burst(1, load.prompt_tokens, 8)
        answered = healthy + first.answers[0].first_token
        await self._burst(max(load.concurrency), load.prompt_tokens, 32)  # warm-up
        return {
            "start": {
                "healthy_seconds": round(healthy, 2),
                "first_token_seconds": round(answered, 2),
                "cores": cores,
            },
            "memory_before_load": memory,
            "prefill": await self._prefill(),
            "sweep": [await self._level(concurrency) for concurrency in load.concurrency],
            "memory_after_load": self._server.memory(),
        }

    async def _level(self, concurrency: int) -> dict[str, Any]:
        load = self._load
        kept = await self._repeat(
            lambda: self._burst(concurrency, load.prompt_tokens, load.max_tokens)
        )
        answers = [answer for burst in kept.results for answer in burst.answers]
        return {
            "concurrency": concurrency,
            "prompt_tokens": sorted({answer.prompt_tokens for answer in answers}),
            "output_tokens_per_second": spread([burst.rate for burst in kept.results]),
            "ttft_ms": latency([answer.first_token for answer in answers]),
            "inter_token_ms": latency([gap for answer in answers for gap in answer.gaps]),
            "chunks_per_answer": round(statistics.mean(answer.chunks for answer in answers), 1),
            **kept.notes,
            "sample": answers[0].text[:80],
        }

    async def _prefill(self) -> dict[str, Any]:
        """Measure prompt tokens per second until the first token, one long prompt after another."""
        load = self._load

        async def one_repeat() -> list[Burst]:
            return [
                await self._burst(1, load.prefill_tokens, 4) for _ in range(load.prefill_prompts)
            ]

        kept = await self._repeat(one_repeat)
        answers = [burst.answers[0] for bursts in kept.results for burst in bursts]
        return {
            "prompt_tokens": sorted({answer.prompt_tokens for answer in answers}),
            "prompts": len(answers),
            "tokens_per_second": spread([a.prompt_tokens / a.first_token for a in answers]),
            **kept.notes,
        }

    async def _burst(self, concurrency: int, prompt_tokens: int, max_tokens: int) -> Burst:
        clients = [
            [self._body(self._prompts.next(prompt_tokens), max_tokens)] for _ in range(concurrency)
        ]
        return await run_burst(self._server.endpoint, clients)

    async def _repeat(self, once: Callable[[], Awaitable[ResultT]]) -> Kept[ResultT]:
        """Repeat until enough repeats are quiet; else keep the least disturbed ones."""
        load = self._load
        tries: list[tuple[dict[str, float], ResultT]] = []
        while len(tries) < load.attempts:
            meter = Meter(self._server)
            result = await once()
            tries.append((meter.read(), result))
            quiet = [one for one in tries if one[0]["others"] < load.quiet_cores]
            if len(quiet) == load.repeats:
                break
            if quiet[-1:] != tries[-1:]:
                await asyncio.sleep(load.pause)
        if len(quiet) < load.repeats:
            by_others = sorted(tries, key=lambda one: one[0]["others"])
            chosen = by_others[: load.repeats]
        else:
            chosen = quiet
        notes = {
            "repeats": len(chosen),
            "quiet_repeats": len(quiet),
            "tries": len(tries),
            "most_cores": {name: max(cores[name] for cores, _ in chosen) for name in chosen[0][0]},
        }
        return Kept([result for _, result in chosen], notes)
