"""Prometheus metrics: vLLM's names where the meaning is equal, `appliance_*` for the rest.

Counts come from the engine's latest stats; times are measured here, where the client waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from appliance.engine.process.supervisor import EngineState
from appliance.events import Quantiles
from appliance.server.histogram import Histogram

if TYPE_CHECKING:
    from appliance.engine.process.client import EngineClient

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_RECENT_SECONDS = 60.0
_RECENT_SAMPLES = 8192


class RecentTimes:
    """The latest samples of one latency, for quantiles of the last minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_RECENT_SAMPLES)

    def add(self, now: float, seconds: float) -> None:
        """Add a sample taken at a monotonic time."""
        self._samples.append((now, seconds))

    def quantiles(self) -> Quantiles:
        """Of the last minute, or of as much of it as was kept."""
        since = time.monotonic() - _RECENT_SECONDS
        seconds = sorted(value for when, value in self._samples if when >= since)
        if not seconds:
            return Quantiles()
        p50, p90, p99 = (seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.9, 0.99))
        return Quantiles(p50=p50, p90=p90, p99=p99, count=len(seconds))


class Metrics:
    """Everything that is counted in one API process."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self.time_to_first_token = RecentTimes()
        self.inter_token_latency = RecentTimes()
        self.finished = 0
        self.failed = 0

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, model_name, buckets)
            self.registry.register(made)
            return made

        self.first_token_seconds = histogram(
            "vllm:time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            _FIRST_TOKEN_BUCKETS,
        )
        self.token_seconds = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a choice.", _TOKEN_BUCKETS
        )
        self.request_seconds = histogram(
            "vllm:e2e_request_latency_seconds",
            "From the arrival of a request to its end.",
            _REQUEST_BUCKETS,
        )
        self.queue_seconds = histogram(
            "vllm:request_queue_time_seconds", "In the engine's queue.", _FIRST_TOKEN_BUCKETS
        )
        self.prompt_tokens = histogram(
            "vllm:request_prompt_tokens",
            "Tokens of a prompt.",
            (1, 10, 50, 100, 250, 500, 1000, 2000, 4000, 8000, 16000, 32000, 64000),
        )
        self._success = Counter(
            "vllm:request_success",
            "Choices that came to their end, by the reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._responses = Counter(
            "appliance_http_responses",
            "HTTP responses by route and status.",
            ["route", "status"],
            registry=self.registry,
        )

    def watch(self, engine: EngineClient) -> None:
        """Report the engine's own numbers too."""
        self.registry.register(_EngineCollector(engine, self.model_name))

    def count_choice(self, reason: str) -> None:
        """A choice ended as the engine reported."""
        self._success.labels(self.model_name, reason).inc()

    def count_response(self, route: str, status: int) -> None:
        """A response began."""
        self._responses.labels(route, str(status)).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class RequestTimer:
    """The times of one request, from its arrival on."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._last: dict[int, float] = {}  # choice to the time of its latest token

    def tokens(self, choice: int, count: int, queue_seconds: float | None) -> None:
        """A choice got tokens just now."""
        now = time.monotonic()
        metrics = self._metrics
        if queue_seconds is not None:
            metrics.queue_seconds.observe(queue_seconds)
        if not self._last:
            metrics.first_token_seconds.observe(now - self._arrival)
            metrics.time_to_first_token.add(now, now - self._arrival)
        elif choice in self._last and count:
            seconds = (now - self._last[choice]) / count
            metrics.token_seconds.observe(seconds, count)
            metrics.inter_token_latency.add(now, seconds)
        self._last[choice] = now

    def end(self, *, complete: bool) -> None:
        """The request is over."""
        self._metrics.finished += 1
        if complete:
            self._metrics.request_seconds.observe(time.monotonic() - self._arrival)
        else:
            self._metrics.failed += 1


class _EngineCollector(Collector):
    """Reads the engine's latest stats whenever somebody asks."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        stats, engine = self._engine.stats, self._engine
        ready = engine.state is EngineState.READY
        yield self._gauge("vllm:num_requests_running", "Requests in work.", engine.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", engine.num_waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_usage
        )
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens accepted.", stats.prompt_tokens_total),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens_total),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries_total),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits_total),
            ("vllm:num_preemptions", "Sequences preempted.", stats.preemptions_total),
            ("appliance_engine_steps", "Steps of the engine.", stats.steps_total),
            ("appliance_sequences_aborted", "Sequences aborted.", stats.aborted_total),
            ("appliance_nan_logits", "Sequences ended by broken logits.", stats.nan_logits_total),
            ("appliance_engine_restarts", "Engine processes after the first.", engine.restarts),
        ):
            yield self._counter(name, text, value)
        for name, text, gauge in (
            ("appliance_engine_up", "1 while the engine is ready.", float(ready)),
            ("appliance_kv_utilization", "Share of held slots with tokens.", stats.kv_utilization),
            ("appliance_kv_blocks", "KV blocks in all.", stats.blocks_total),
            ("appliance_kv_blocks_active", "KV blocks held by sequences.", stats.blocks_active),
            ("appliance_kv_blocks_cached", "KV blocks kept for reuse.", stats.blocks_cached),
            ("appliance_kv_blocks_shared", "KV blocks held more than once.", stats.blocks_shared),
            ("appliance_step_seconds", "Duration of the last step.", stats.step_seconds),
        ):
            yield self._gauge(name, text, gauge)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
