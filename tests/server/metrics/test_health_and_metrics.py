from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from support.runs.waiting import until

from appliance.engine.process.supervisor import EngineState
from appliance.server.dashboard.watcher import server_info
from appliance.server.metrics.metrics import Metrics, RequestTimer

if TYPE_CHECKING:
    import pytest

    from tests.server.conftest import Running, Serve


async def samples(running: Running) -> dict[str, float]:
    text = (await running.http.get("/metrics")).text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


async def test_health_while_loading_and_draining(serve: Serve) -> None:
    async with serve() as running:
        assert (await running.http.get("/health")).json() == {"status": "ok"}
        assert (await running.http.get("/ready")).json() == {"status": "ready"}

        tokenizer, running.state.tokenizer = running.state.tokenizer, None
        running.server.is_up = False
        for path in ("/health", "/ready", "/v1/models"):
            response = await running.http.get(path)
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert "loading" in response.json()["error"]["message"]
        assert (await running.chat()).status_code == 503
        running.state.tokenizer, running.server.is_up = tokenizer, True

        running.server.draining = True
        assert (await running.http.get("/health")).status_code == 200
        assert (await running.http.get("/ready")).status_code == 503
        assert "draining" in (await running.chat()).json()["error"]["message"]

        running.state.tokenizer = None
        response = await running.http.get("/health")
        assert response.status_code == 503, "what never worked does not while it is closed down"


async def test_a_gpu_that_is_not_used_is_in_health_and_the_dashboard(serve: Serve) -> None:
    why = "no GPU is used: NVIDIA's driver is too old; update it"
    async with serve() as running:
        supervisor: Any = running.engine.supervisor
        supervisor.info = msgspec.structs.replace(supervisor.info, unused_gpu=why, notes=(why,))
        assert (await running.http.get("/health")).json() == {"status": "ok", "unused_gpu": why}
        assert why in server_info(running.state).notes


async def test_metrics_have_the_known_names(serve: Serve) -> None:
    async with serve() as running:
        await running.chat("hi")
        await running.complete("ab", max_tokens=5, n=2)
        await running.complete("ab", n=99)
        await running.http.get("/no/such/path")
        await until(lambda: running.idle())
        text = (await running.http.get("/metrics")).text
        found = await samples(running)
        assert found["vllm:num_requests_running"] == 0
        assert found["vllm:num_requests_waiting"] == 0
        assert found["vllm:kv_cache_usage_perc"] == 0
        assert found["vllm:generation_tokens_total"] == len("user\nhi") + 2 + 10
        assert found["vllm:prompt_tokens_total"] > 20
        assert found["vllm:time_to_first_token_seconds_count"] == 2
        assert found["vllm:e2e_request_latency_seconds_count"] == 2
        assert found["vllm:request_queue_time_seconds_count"] >= 2
        assert found["vllm:inter_token_latency_seconds_count"] == len("user\nhi") + 1 + 8
        assert found["appliance_engine_up"] == 1
        assert 'appliance_kv_blocks{model_name="echo",state="free"} 256.0' in text
        assert found["appliance_nan_logits_total"] == 0
        assert 'vllm:request_success_total{finished_reason="stop",model_name="echo"} 1.0' in text
        assert 'vllm:request_success_total{finished_reason="length",model_name="echo"} 2.0' in text
        assert 'route="/v1/completions",status="400"} 1.0' in text
        assert "/no/such/path" not in text


async def test_blocks_of_the_cache_and_of_host_memory_are_told_by_state(serve: Serve) -> None:
    async with serve("step_seconds=0.01") as running:
        engine = running.engine
        task = asyncio.create_task(running.complete("a" * 100, max_tokens=300))
        await until(lambda: any(engine.metadata or ()))
        engine.stats = msgspec.structs.replace(
            engine.stats, swapped=2, kv_host_blocks=7, kv_host_swapped=5, kv_host_capacity=9,
            state_slots=8, state_slots_used=3, state_checkpoints=20, state_checkpoints_cached=6,
        )  # fmt: skip
        found = by_state(running.server.metrics.render().decode())
        task.cancel()
    blocks = {key[1]: value for key, value in found.items() if key[0] == "appliance_kv_blocks"}
    assert set(blocks) == {"free", "cached", "active", "shared", "writing", "loading"}
    assert sum(blocks.values()) == 256
    assert blocks["active"] >= 7
    assert found["appliance_kv_host_blocks", "swapped"] == 5
    assert found["appliance_kv_host_blocks", "cached"] == 2
    assert found["appliance_sequences_swapped", ""] == 2
    assert found["appliance_state_slots", "used"] == 3
    assert found["appliance_state_slots", "free"] == 5
    assert found["appliance_state_checkpoints", "cached"] == 6
    assert found["appliance_state_checkpoints", "free"] == 14


def by_state(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("state", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_nothing_of_a_prompt_is_logged_or_counted(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "canary-7d1f"
    caplog.set_level("DEBUG")
    async with serve(server={"api_key": "secret-key"}) as running:
        headers = {"authorization": "Bearer secret-key"}
        body = {"messages": [{"role": "user", "content": canary}], "user": canary}
        await running.http.post("/v1/chat/completions", json=body, headers=headers)
        await running.http.post("/v1/chat/completions", json={**body, "n": canary}, headers=headers)
        await running.http.get(f"/{canary}", headers={"x-api-key": canary})
        metrics = (await running.http.get("/metrics", headers=headers)).text
    ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("appliance"))
    assert "chatcmpl-" in ours
    for text in (ours, metrics):
        assert canary not in text
        assert "secret-key" not in text


async def test_who_looks_at_the_server_sends_the_engine_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as running:
        sent: list[object] = []
        monkeypatch.setattr(running.engine.supervisor, "send", sent.append)
        for path in ("/", "/metrics", "/health", "/ready", "/v1/models"):
            assert (await running.http.get(path)).status_code == 200
        async with running.http.stream("GET", "/admin/v1/events") as feed:
            lines = 0
            async for line in feed.aiter_lines():
                lines += line.startswith("event: stats")
                if lines == 2:
                    break
        assert sent == []
        assert running.engine.stats.steps_total == 0


def test_times_of_a_request() -> None:
    metrics = Metrics("m")
    timer = RequestTimer(metrics)
    timer.tokens(0, 1, 0.25)
    timer.tokens(1, 1, None)
    timer.tokens(0, 2, None)
    timer.end(complete=True)
    text = metrics.shared.render().decode()
    for name, count in (
        ("vllm:time_to_first_token_seconds", 1),
        ("vllm:inter_token_latency_seconds", 1),  # two tokens that came together
        ("vllm:request_queue_time_seconds", 1),
        ("vllm:e2e_request_latency_seconds", 1),
    ):
        assert f'{name}_count{{model_name="m"}} {count:.1f}' in text
    assert metrics.time_to_first_token.quantiles().count == 1
    assert (metrics.finished, metrics.failed) == (1, 0)


async def test_health_stays_quick_while_a_long_prompt_is_tokenized(serve: Serve) -> None:
    async with serve() as running:
        long = asyncio.create_task(running.complete("x" * 1_500_000))
        slowest = 0.0
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while not long.done():
            before = loop.time()
            assert (await running.http.get("/health")).status_code == 200
            slowest = max(slowest, loop.time() - before)
        assert (await long).json()["error"]["code"] == "context_length_exceeded"
        assert slowest < (loop.time() - begin) / 2, "other requests ran meanwhile"
        assert running.engine.state is EngineState.READY
