"""Numbers of servers that use vLLM's names."""

from __future__ import annotations

import pytest

from appliance.events import Info, Stats
from appliance.tui.foreign import MetricsReader, parse
from appliance.tui.state import DashboardState, reduce

TEXT = """\
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 3.0
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-8B"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-8B"} 0.25
vllm:generation_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} %(generated)s
vllm:prompt_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 100.0
vllm:prefix_cache_queries_total{engine="0",model_name="Qwen/Qwen3-8B"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="Qwen/Qwen3-8B"} 700.0
vllm:request_success_total{finished_reason="stop",model_name="Qwen/Qwen3-8B"} 7.0
vllm:request_success_total{finished_reason="length",model_name="Qwen/Qwen3-8B"} 2.0
vllm:time_to_first_token_seconds_bucket{le="0.1",model_name="Qwen/Qwen3-8B"} %(fast)s
vllm:time_to_first_token_seconds_bucket{le="0.5",model_name="Qwen/Qwen3-8B"} %(all)s
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="Qwen/Qwen3-8B"} %(all)s
process_start_time_seconds 40.0
not a metric at all
"""
FIRST = TEXT % {"generated": 1000.0, "fast": 5.0, "all": 10.0}
SECOND = TEXT % {"generated": 1500.0, "fast": 14.0, "all": 20.0}


def test_two_scrapes_make_rates_and_quantiles() -> None:
    reader = MetricsReader()
    info, first = reader.read(FIRST, 100.0)
    assert isinstance(info, Info)
    assert info.model == "Qwen/Qwen3-8B"
    assert isinstance(first, Stats)
    assert first.generation_tokens_per_second == 0.0
    assert first.uptime_seconds == 60.0
    _, second = reader.read(SECOND, 102.0)
    assert isinstance(second, Stats)
    assert second.generation_tokens_per_second == 250.0
    assert (second.requests_running, second.requests_waiting) == (3, 1)
    assert second.requests_finished == 9
    assert second.engine.kv_usage == 0.25
    assert second.engine.prefix_hits_total == 700
    quantiles = second.time_to_first_token
    assert quantiles.count == 10
    assert quantiles.p50 == pytest.approx(0.1 * 5 / 9)  # nine of ten in the first bucket
    assert quantiles.p99 == pytest.approx(0.1 + 0.4 * 0.9)


def test_old_names_are_read_too() -> None:
    text = 'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
    _, stats = MetricsReader().read(text, 1.0)
    assert isinstance(stats, Stats)
    assert stats.engine.kv_usage == 0.5


def test_a_page_without_known_names_is_no_server_to_watch() -> None:
    reader = MetricsReader()
    assert reader.read("python_info 1\n<html>", 1.0) == []
    assert reader.scrapes == 0


def test_the_state_knows_that_it_is_reduced() -> None:
    state = DashboardState()
    for event in MetricsReader().read(FIRST, 1.0):
        state = reduce(state, event)
    assert state.reduced


def test_labels_are_unescaped_and_nonsense_is_skipped() -> None:
    samples = parse('a{x="q\\"u\\\\o\\nte",y="2"} NaN\nb 1e3\nc{} nonsense\n')
    assert samples["a"][0].labels == {"x": 'q"u\\o\nte', "y": "2"}
    assert samples["b"][0].value == 1000.0
    assert "c" not in samples
