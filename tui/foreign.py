"""Turns the metrics of servers that use vLLM's names into events.

Knows nothing of networks.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.events import Info, Quantiles, Stats
from appliance.stats import EngineStats

if TYPE_CHECKING:
    from appliance.events import Event

_WINDOW = 60.0  # seconds that quantiles cover
_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_BLOCKS = 1000  # blocks shown for a server that reports only a share


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of Prometheus' text format."""

    labels: dict[str, str]
    value: float


Samples = dict[str, list[Sample]]


def parse(text: str) -> Samples:
    """Parse samples by name, with unescaped labels; skip other lines."""
    samples: Samples = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        labels = {
            name: re.sub(r"\\(.)", lambda at: {"n": "\n"}.get(at[1], at[1]), escaped)
            for name, escaped in _LABEL.findall(match["labels"] or "")
        }
        samples.setdefault(match["name"], []).append(Sample(labels, value))
    return samples


class MetricsReader:
    """Turns successive scrapes into events.

    Attributes:
        scrapes: scrapes so far that had a known name.
    """

    def __init__(self) -> None:
        self.scrapes = 0
        self._first = 0.0
        self._past: deque[tuple[float, Samples]] = deque()

    def read(self, text: str, now: float) -> list[Event]:
        """Return the events of one scrape, or none if it has no known name.

        `text` is the body of GET /metrics, `now` in Unix seconds.
        """
        samples = parse(text)
        if not any(name.startswith("vllm:") for name in samples):
            return []
        before = self._past[-1] if self._past else None
        self.scrapes += 1
        self._first = self._first or now
        self._past.append((now, samples))
        while now - self._past[0][0] > _WINDOW:
            self._past.popleft()
        return [_info(samples), self._stats(samples, before, now)]

    def _stats(self, samples: Samples, before: tuple[float, Samples] | None, now: float) -> Stats:
        def rate(name: str) -> float:
            if before is None or now <= before[0]:
                return 0.0
            return max(0.0, _total(samples, name) - _total(before[1], name)) / (now - before[0])

        def quantiles(*names: str) -> Quantiles:
            name = next((name for name in names if f"{name}_bucket" in samples), "")
            return _quantiles(samples, self._past[0][1], name)

        usage = _total(samples, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
        started = _total(samples, "process_start_time_seconds") or self._first
        running = int(_total(samples, "vllm:num_requests_running"))
        waiting = int(_total(samples, "vllm:num_requests_waiting"))
        return Stats(
            time=now,
            uptime_seconds=now - started,
            engine=EngineStats(
                running=running,
                waiting=waiting,
                prompt_tokens_total=int(_total(samples, "vllm:prompt_tokens_total")),
                generation_tokens_total=int(_total(samples, "vllm:generation_tokens_total")),
                prefix_queries_total=int(_total(samples, "vllm:prefix_cache_queries_total")),
                prefix_hits_total=int(_total(samples, "vllm:prefix_cache_hits_total")),
                preemptions_total=int(_total(samples, "vllm:num_preemptions_total")),
                blocks_total=_BLOCKS,
                blocks_active=round(_BLOCKS * usage),
                blocks_free=_BLOCKS - round(_BLOCKS * usage),
                draft_tokens_total=int(_total(samples, "vllm:spec_decode_num_draft_tokens_total")),
                accepted_tokens_total=int(
                    _total(samples, "vllm:spec_decode_num_accepted_tokens_total")
                ),
            ),
            requests_running=running,
            requests_waiting=waiting,
            requests_finished=int(_total(samples, "vllm:request_success_total")),
            requests_failed=0,
            prompt_tokens_per_second=rate("vllm:prompt_tokens_total"),
            generation_tokens_per_second=rate("vllm:generation_tokens_total"),
            time_to_first_token=quantiles("vllm:time_to_first_token_seconds"),
            inter_token_latency=quantiles(
                "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"
            ),
            end_to_end=quantiles("vllm:e2e_request_latency_seconds"),
            queue_wait=quantiles("vllm:request_queue_time_seconds"),
        )


def _info(samples: Samples) -> Info:
    names = (
        sample.labels["model_name"]
        for of_name in samples.values()
        for sample in of_name
        if "model_name" in sample.labels
    )
    return Info(protocol=0, version="", model=next(names, "unknown model"), state="ready")


def _total(samples: Samples, *names: str) -> float:
    """Sum the first metric that is present over all its labels; 0 if none is."""
    for name in names:
        if name in samples:
            total = sum(sample.value for sample in samples[name])
            return total if math.isfinite(total) else 0.0
    return 0.0


def _buckets(samples: Samples, name: str) -> dict[float, float]:
    counts: dict[float, float] = {}
    for sample in samples.get(f"{name}_bucket", ()):
        try:
            limit = float(sample.labels.get("le", ""))
        except ValueError:
            continue
        counts[limit] = counts.get(limit, 0.0) + sample.value
    return dict(sorted(counts.items()))


def _quantiles(now: Samples, then: Samples, name: str) -> Quantiles:
    """Compute quantiles of a histogram between two scrapes, linear within a bucket."""
    before = _buckets(then, name)
    counts = [
        (limit, count - before.get(limit, 0.0)) for limit, count in _buckets(now, name).items()
    ]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return Quantiles()

    def at(share: float) -> float:
        low = below = 0.0
        for limit, count in counts:
            if count >= share * total:
                if math.isinf(limit):
                    return low
                return low + (limit - low) * (share * total - below) / max(count - below, 1e-9)
            low, below = limit, count
        return low

    return Quantiles(p50=at(0.5), p90=at(0.9), p99=at(0.99), count=int(total))
