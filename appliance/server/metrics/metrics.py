"""Prometheus metrics of a model and of the server.

Names are vLLM's where the meaning is equal, `appliance_*` for the rest. Takes counts from the
engine's stats, and measures times here, where the client waits.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Summary, generate_latest
from prometheus_client.registry import Collector

from appliance.config.api_keys import NO_KEY
from appliance.events import Quantiles
from appliance.server.metrics.metric_families import HistogramCollector, gauge
from appliance.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from appliance.engine.nouns.messages import StepReport
    from appliance.stats import StepView

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_RECENT_SECONDS = 60.0
_RECENT_SAMPLES = 8192
_TOKEN_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2, 5)
_STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
RECENT_STEPS = 1024


class RecentTimes:
    """The last samples of a latency, for quantiles of the last minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_RECENT_SAMPLES)

    def add(self, now: float, seconds: float) -> None:
        self._samples.append((now, seconds))

    def rate(self, now: float) -> float:
        """Return samples per second since the first sample of the last minute; 0 without any."""
        times = [when for when, _ in self._samples if when >= now - _RECENT_SECONDS]
        return len(times) / max(1.0, now - times[0]) if times else 0.0

    def quantiles(self) -> Quantiles:
        """Return quantiles of the last minute, as far as kept."""
        since = time.monotonic() - _RECENT_SECONDS
        seconds = sorted(value for when, value in self._samples if when >= since)
        if not seconds:
            return Quantiles()
        p50, p90, p99 = (seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.9, 0.99))
        return Quantiles(p50=p50, p90=p90, p99=p99, count=len(seconds))


class Metrics:
    """The API process's counts for one model.

    Args:
        shared: counts of all models together.
    """

    def __init__(self, model_name: str, shared: SharedMetrics | None = None) -> None:
        self.registry = CollectorRegistry()
        self.shared = shared or SharedMetrics()
        self.shared.registries.append(self.registry)
        self.model_name = model_name
        self.time_to_first_token = RecentTimes()
        self.inter_token_latency = RecentTimes()
        self.end_to_end = RecentTimes()
        self.queue_wait = RecentTimes()
        self.recent_steps: deque[StepView] = deque(maxlen=RECENT_STEPS)
        self.finished = 0
        self.failed = 0

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> HistogramCollector:
            made = HistogramCollector(name, text, model_name, buckets)
            self.registry.register(made)
            return made

        self.first_token_seconds = histogram(
            "vllm:time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            _FIRST_TOKEN_BUCKETS,
        )
        self.token_seconds = histogram(
            "vllm:inter_token_latency_seconds",
            "Between two deltas of a choice, which a step adds whole.",
            _TOKEN_BUCKETS,
        )
        self.request_seconds = histogram(
            "vllm:e2e_request_latency_seconds",
            "From the arrival of a request to its end.",
            _REQUEST_BUCKETS,
        )
        self.queue_seconds = histogram(
            "vllm:request_queue_time_seconds", "In the engine's queue.", _FIRST_TOKEN_BUCKETS
        )
        self.prefill_seconds = histogram(
            "vllm:request_prefill_time_seconds",
            "From the start of a request's work to its first token.",
            _FIRST_TOKEN_BUCKETS,
        )
        self.decode_seconds = histogram(
            "vllm:request_decode_time_seconds",
            "From the first token of a request to its last.",
            _REQUEST_BUCKETS,
        )
        self.prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKEN_COUNTS
        )
        self.answer_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", _TOKEN_COUNTS
        )
        self.step_rows = histogram(
            "vllm:iteration_tokens_total", "Tokens that one step of the engine ran.", _STEP_ROWS
        )
        self.step_sequences = histogram(
            "appliance_step_sequences", "Sequences that had rows in one step.", _STEP_ROWS
        )
        self.step_seconds = histogram(
            "appliance_step_duration_seconds", "One step of the engine.", _STEP_BUCKETS
        )
        self._success = Counter(
            "vllm:request_success",
            "Choices that came to their end, by the reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )

    def add(self, collector: Collector) -> None:
        self.registry.register(collector)

    def take_steps(self, report: StepReport) -> None:
        self.recent_steps.extend(report.steps)
        for step in report.steps:
            self.step_rows.observe(step.prefill_tokens + step.decode_tokens)
            self.step_sequences.observe(step.sequences)
            self.step_seconds.observe(step.seconds)

    def count_choice(self, reason: str) -> None:
        self._success.labels(self.model_name, reason).inc()

    def observe_wait(self, owner: str, seconds: float) -> None:
        self.shared.observe_wait(owner or NO_KEY, seconds)

    def count_shed(self, owner: str) -> None:
        self.shared.count_shed(owner or NO_KEY)

    def count_expired(self, owner: str, state: str) -> None:
        self.shared.count_expired(owner or NO_KEY, state)


@dataclass(frozen=True, slots=True)
class Seconds:
    """A request's durations: total, to the first token, and from there to the last."""

    total: float
    prefill: float
    decode: float


class RequestTimer:
    """Times one request from its arrival."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._begin = self._arrival  # of the engine's work, once known
        self._first = 0.0
        self._count = 0
        self._last: dict[int, float] = {}  # time of each choice's last token

    def tokens(self, choice: int, count: int, queue_seconds: float | None) -> None:
        now = time.monotonic()
        metrics = self._metrics
        if queue_seconds is not None:
            metrics.queue_seconds.observe(queue_seconds)
            metrics.queue_wait.add(now, queue_seconds)
        self._count += count
        if not self._last:
            self._begin += queue_seconds or 0.0
            self._first = now
            metrics.prefill_seconds.observe(max(0.0, now - self._begin))
            metrics.first_token_seconds.observe(now - self._arrival)
            metrics.time_to_first_token.add(now, now - self._arrival)
        elif choice in self._last and count:
            seconds = now - self._last[choice]
            metrics.token_seconds.observe(seconds)
            metrics.inter_token_latency.add(now, seconds)
        self._last[choice] = now

    @property
    def seconds(self) -> Seconds:
        """The times so far; only the total includes queueing."""
        total = time.monotonic() - self._arrival
        if not self._last:
            return Seconds(total, 0.0, 0.0)
        decode = max(self._last.values()) - self._first
        return Seconds(total, max(0.0, self._first - self._begin), decode)

    def end(self, *, complete: bool) -> None:
        metrics, now = self._metrics, time.monotonic()
        metrics.finished += 1
        if self._last:
            metrics.answer_tokens.observe(self._count)
        if complete:
            metrics.request_seconds.observe(now - self._arrival)
            metrics.end_to_end.add(now, now - self._arrival)
            if self._last:
                metrics.decode_seconds.observe(max(self._last.values()) - self._first)
        else:
            metrics.failed += 1


class SharedMetrics:
    """Counts by key and by route, over all models.

    Attributes:
        registries: this one, and each model's.
    """

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registries = [registry]
        self._waits = Summary(
            "appliance_queue_wait_seconds",
            "In the engine's queue, by the name of the key.",
            ["key"],
            registry=registry,
        )
        self._shed = Counter(
            "appliance_requests_shed",
            "Requests refused because too many waited, by the name of their key.",
            ["key"],
            registry=registry,
        )
        self._expired = Counter(
            "appliance_requests_expired",
            "Requests or choices whose time was over while they waited or ran, by key.",
            ["key", "state"],
            registry=registry,
        )
        self._responses = Counter(
            "appliance_http_responses",
            "HTTP responses by route and status.",
            ["route", "status"],
            registry=registry,
        )
        registry.register(_Build())

    def add(self, collector: Collector) -> None:
        self.registries[0].register(collector)

    def know_keys(self, names: Iterable[str]) -> None:
        """Start each key's counters at zero, so that no series begins with its first event."""
        for name in names:
            self._waits.labels(name)
            self._shed.labels(name)
            for state in ("waiting", "running"):
                self._expired.labels(name, state)

    def observe_wait(self, key: str, seconds: float) -> None:
        """Add a request's time in the queue."""
        self._waits.labels(key).observe(seconds)

    def count_shed(self, key: str) -> None:
        """Count a request refused because the queue was full."""
        self._shed.labels(key).inc()

    def count_expired(self, key: str, state: str) -> None:
        """Count a request that timed out while `waiting` or `running`."""
        self._expired.labels(key, state).inc()

    def count_response(self, route: str, status: int) -> None:
        self._responses.labels(route, str(status)).inc()

    def render(self) -> bytes:
        merged = CollectorRegistry()
        merged.register(_Merged(self.registries))
        return generate_latest(merged)


class _Merged(Collector):
    """All families of several registries, each name once."""

    def __init__(self, registries: Iterable[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                if family.name in found:
                    found[family.name].samples += family.samples
                else:
                    found[family.name] = family
        return found.values()


class _Build(Collector):
    """The running version."""

    def collect(self) -> Iterable[Metric]:
        build = {"version": __version__, "python": platform.python_version()}
        yield gauge("appliance_build_info", "What is running.", [(build, 1)])
