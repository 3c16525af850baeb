from __future__ import annotations

from dataclasses import replace

import pytest
from support.engine.memory_requests import MIB, memory_request

from appliance.engine.memory.experts.split import ExpertChoice, LayerExperts
from appliance.engine.memory.experts.streaming import Streaming
from appliance.engine.memory.plan import (
    MemoryRequest,
    plan_memory,
    settled_by_estimate,
)
from appliance.errors import MemoryPlanError

# The experts of three of four layers: 80 MiB on the device, 90 in host memory.
LAYERS = tuple(LayerExperts(layer, 80 * MIB, 90 * MIB) for layer in (3, 2, 0))


def request(asked: int | None = None, **changes: object) -> MemoryRequest:
    """A GPU of 300 MiB beside a host of 1 GiB; a context takes 16 MiB, a step about 11."""
    usual: dict[str, object] = {
        "weight_bytes": 400 * MIB,
        "host_budget_bytes": 1024 * MIB,
        "fill": True,
        "experts": ExpertChoice(LAYERS, asked),
    }
    return memory_request(**usual | changes)


def test_as_few_layers_as_fit_leave_the_device_the_last_one_first() -> None:
    roomy = plan_memory(request(weight_bytes=250 * MIB))
    assert roomy.host_experts.layers == ()
    assert roomy.weight_bytes == 250 * MIB
    plan = plan_memory(request())
    assert plan.host_experts.layers == (2, 3)
    assert plan.host_experts.num_bytes == 180 * MIB
    assert plan.weight_bytes == 240 * MIB
    with pytest.raises(MemoryPlanError):
        plan_memory(request(asked=1))
    assert plan.kv_bytes + plan.weight_bytes + plan.workspace_bytes <= plan.budget_bytes


def test_a_number_that_was_asked_for_is_taken() -> None:
    plan = plan_memory(request(asked=3))
    assert plan.host_experts.layers == (0, 2, 3)
    assert plan.kv_bytes > plan_memory(request()).kv_bytes


def test_too_few_are_refused_with_the_number_that_fits() -> None:
    said = r"400\.0 MiB of weights and.*; --experts-on-cpu 2 would fit"
    with pytest.raises(MemoryPlanError, match=said):
        plan_memory(request(asked=0))
    with pytest.raises(MemoryPlanError, match=r"without the experts of 1 layers.* 2 would fit"):
        plan_memory(request(asked=1))


def test_what_fits_nowhere_is_refused_with_both_numbers() -> None:
    said = r"600\.0 MiB of weights.*Nor with the experts of all 3 layers in host memory.*360\.0 MiB"
    with pytest.raises(MemoryPlanError, match=said):
        plan_memory(request(weight_bytes=600 * MIB))
    with pytest.raises(MemoryPlanError, match=r"^(?!.*would fit).*without the experts of 3 layers"):
        plan_memory(request(asked=3, weight_bytes=600 * MIB))


def test_host_memory_that_is_too_small_is_refused_and_what_is_left_holds_kv_blocks() -> None:
    said = r"experts of 2 layers \(--experts-on-cpu\) need 180\.0 MiB of host memory and 100\.0 MiB"
    with pytest.raises(MemoryPlanError, match=said):
        plan_memory(request(asked=2, host_budget_bytes=100 * MIB))
    tight, roomy = (plan_memory(request(host_budget_bytes=size * MIB)) for size in (200, 1024))
    assert tight.kv_host_bytes < roomy.kv_host_bytes
    assert roomy.kv_host_bytes == (1024 - 180) * MIB // 8


def test_buffers_of_a_stream_are_part_of_the_workspace_where_experts_left() -> None:
    streaming = Streaming(32, 512, 8 * MIB, 4 * MIB)
    choice = ExpertChoice(LAYERS, 2, streaming)
    plain, streamed = (
        plan_memory(request(experts=one)) for one in (replace(choice, streaming=None), choice)
    )
    assert streamed.workspace_bytes - plain.workspace_bytes == 20 * MIB
    assert streamed.kv_bytes < plain.kv_bytes
    nobody = plan_memory(request(experts=replace(choice, asked=0), weight_bytes=200 * MIB))
    assert nobody.host_experts.stream_bytes == 0


def test_on_a_cpu_both_sides_share_the_memory() -> None:
    one = request(asked=1, host_budget_bytes=None, weight_bytes=200 * MIB, kv_cache_memory=16 * MIB)
    assert plan_memory(one).weight_bytes == 120 * MIB
    with pytest.raises(MemoryPlanError):  # 30 MiB more than on one side
        plan_memory(replace(one, experts=ExpertChoice(LAYERS, 3), budget_bytes=240 * MIB))


def test_before_the_workspace_is_measured_an_estimate_of_it_decides() -> None:
    settled = settled_by_estimate(request(max_num_batched_tokens=6400))
    assert settled.host_experts.layers == (0, 2, 3)
    assert settled.experts is None
    without = plan_memory(replace(request(max_num_batched_tokens=6400), workspace_bytes=0))
    assert len(without.host_experts.layers) == 2
    hopeless = settled_by_estimate(request(max_num_batched_tokens=65536))
    assert hopeless.host_experts.layers == (0, 2, 3)  # the measured value may be smaller
    asked = settled_by_estimate(request(asked=1, max_num_batched_tokens=65536))
    assert asked.host_experts.layers == (3,)
