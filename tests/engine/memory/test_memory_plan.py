from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.engine.memory_requests import MIB
from support.engine.memory_requests import memory_request as request

from appliance.engine.memory.plan import MemoryRequest, plan_memory, workspace_bytes
from appliance.errors import ConfigError, MemoryPlanError
from appliance.model.recurrent_spec import ShortConvSpec
from appliance.model.spec import AttentionSpec


def test_a_cpu_gets_four_contexts_and_a_gpu_all_that_is_left() -> None:
    assert plan_memory(request()).num_blocks == 4 * 512
    filled = plan_memory(request(fill=True))
    assert filled.num_blocks > 4 * 512
    used = filled.weight_bytes + filled.kv_bytes + filled.workspace_bytes
    assert used <= filled.budget_bytes < used + 16 * 2048


def test_memory_asked_for_is_memory_used() -> None:
    plan = plan_memory(request(kv_cache_memory=20 * MIB))
    assert plan.kv_bytes == 20 * MIB


def test_a_longer_context_than_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="8,192"):
        plan_memory(request(max_model_len=8193))


def test_what_the_process_has_already_is_part_of_the_plan() -> None:
    without = plan_memory(request(fill=True))
    plan = plan_memory(request(fill=True, process_bytes=50 * MIB))
    assert plan.process_bytes == 50 * MIB
    assert without.kv_bytes - plan.kv_bytes == 50 * MIB
    more = plan_memory(request(process_bytes=50 * MIB, budget_bytes=350 * MIB))
    assert more.kv_host_bytes == plan_memory(request()).kv_host_bytes
    with pytest.raises(MemoryPlanError, match=r"of weights, 200\.0 MiB of Python and libraries"):
        plan_memory(request(process_bytes=200 * MIB))


@pytest.mark.parametrize(
    "changes",
    [
        {"budget_bytes": 112 * MIB},
        {"budget_bytes": 212 * MIB, "process_bytes": 100 * MIB},
        {"kv_cache_memory": 8 * MIB},
        {"kv_cache_memory": 250 * MIB},
        {"budget_bytes": 90 * MIB},
    ],
)
def test_a_refusal_names_settings_that_then_fit(changes: dict[str, int]) -> None:
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(request(**changes))
    message = str(caught.value)
    assert "\n" not in message
    if found := re.search(r"--max-model-len (\d+)", message):
        plan_memory(request(**changes, max_model_len=int(found[1])))
    if found := re.search(r"--kv-cache-memory (\d+)MiB", message):
        plan_memory(request(kv_cache_memory=int(found[1]) * MIB))
    if "int8" in message:
        plan_memory(request(**changes, kv_format="int8", kv_bytes_per_token=4 * 2 * 2 * (64 + 2)))
    if changes == {"budget_bytes": 90 * MIB}:
        assert "quantize" in message


def test_memory_that_was_asked_for_is_named_in_the_refusal() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(request(kv_cache_memory=200 << 30))
    assert "--kv-cache-memory asks for 200.00 GiB; " in str(caught.value)
    assert "may be used" in str(caught.value)


def test_on_a_cpu_blocks_that_make_room_get_a_share_of_what_is_left() -> None:
    plan = plan_memory(request())
    used = plan.weight_bytes + plan.kv_bytes + plan.workspace_bytes
    assert plan.kv_host_bytes == (plan.budget_bytes - used) // 16
    assert plan_memory(request(budget_bytes=2**40)).kv_host_bytes == 2**30
    assert plan_memory(request(kv_host_memory=0)).kv_host_bytes == 0


def test_a_share_that_holds_no_whole_context_is_said_to_be_short() -> None:
    assert plan_memory(request()).host_is_short
    assert not plan_memory(request(max_model_len=16)).host_is_short
    assert not plan_memory(request(kv_host_memory=0)).host_is_short, "as it was asked for"


def test_host_memory_that_was_asked_for_is_part_of_the_plan_on_a_cpu() -> None:
    without = plan_memory(request(fill=True, kv_host_memory=0))
    plan = plan_memory(request(fill=True, kv_host_memory=50 * MIB))
    assert plan.kv_host_bytes == 50 * MIB
    assert 0 <= without.kv_bytes - 50 * MIB - plan.kv_bytes < 16 * 2048 * 2
    used = plan.weight_bytes + plan.kv_bytes + plan.workspace_bytes + plan.kv_host_bytes
    assert used <= plan.budget_bytes


@pytest.mark.parametrize("changes", [{}, {"kv_cache_memory": 40 * MIB}])
def test_too_much_host_memory_is_refused_with_what_would_fit(changes: dict[str, int]) -> None:
    with pytest.raises(MemoryPlanError, match=r"187\.5 MiB for blocks that make room") as caught:
        plan_memory(request(kv_host_memory=int(187.5 * MIB), **changes))
    found = re.search(r"--kv-host-memory (\d+)MiB", str(caught.value))
    assert found is not None
    plan = plan_memory(request(kv_host_memory=int(found[1]) * MIB, **changes))
    assert plan.kv_host_bytes == int(found[1]) * MIB > 0


def test_beside_a_gpu_it_is_other_memory() -> None:
    alone = {"fill": True, "workspace_bytes": 20 * MIB}
    beside = {**alone, "host_budget_bytes": 64 * MIB}
    plan = plan_memory(request(**beside))
    assert plan.kv_host_bytes == 8 * MIB
    assert plan.kv_bytes == plan_memory(request(**alone, kv_host_memory=0)).kv_bytes
    assert plan_memory(request(**beside, kv_host_memory=64 * MIB)).kv_bytes == plan.kv_bytes
    with pytest.raises(MemoryPlanError, match=r"64\.0 MiB may be used.* --kv-host-memory 64MiB"):
        plan_memory(request(**beside, kv_host_memory=65 * MIB))


@pytest.mark.parametrize(
    ("context", "window", "open_bytes", "partials"),
    [
        (8192, None, 0, 40 * 36),
        (8192, 512, 0, 40 * 6),
        (8192, None, MIB, 64 * 36),
        (131_072, None, 0, 4096),
        (1 << 20, None, MIB, 4096),
    ],
)
def test_a_gpu_has_partial_results_of_rows_that_decode(
    context: int, window: int | None, open_bytes: int, partials: int
) -> None:
    """Spans have 128 tokens up to 1,024 and then 256, so 8 + 28; a window touches one more.

    40 rows verify drafts; sealed, two rows of each of 32 sequences may lie in two blocks.
    """
    base = request().spec
    layer = base.layers[0]
    assert isinstance(layer.mixer, AttentionSpec)
    windowed = replace(layer, mixer=replace(layer.mixer, window=window))
    spec = replace(base, layers=(windowed,) * 4, context_length=context)
    asked = request(spec=spec, open_bytes=open_bytes)
    on_gpu = workspace_bytes(replace(asked, host_budget_bytes=64 * MIB))
    # 4 heads of 64 floats and one for the sum of weights.
    assert on_gpu - workspace_bytes(asked) == partials * 4 * (64 + 1) * 4


def recurrent(**changes: object) -> MemoryRequest:
    """A model with 512 KiB of state, and as large a KV cache as the other model."""
    base = request()
    conv = replace(base.spec.layers[0], mixer=ShortConvSpec(width=1 << 16, taps=3))
    spec = replace(base.spec, layers=(*base.spec.layers, conv))
    assert spec.state_bytes == MIB // 2
    return request(**{"spec": spec, "budget_bytes": 600 * MIB, **changes})


def test_each_sequence_has_a_state_slot_and_checkpoints_share_what_is_left() -> None:
    states = plan_memory(recurrent(budget_bytes=2000 * MIB)).states
    assert (states.num_slots, states.num_checkpoints) == (32, 4 * 32)
    assert states.num_bytes == 80 * MIB
    filled = plan_memory(recurrent(fill=True))
    used = filled.weight_bytes + filled.kv_bytes + filled.workspace_bytes + filled.states.num_bytes
    assert used <= 600 * MIB
    assert 0 < filled.states.num_checkpoints < 4 * 32
    assert plan_memory(recurrent(prefix_caching=False)).states.num_checkpoints == 0
    assert plan_memory(request()).states.num_bytes == 0


def test_memory_asked_for_checkpoints_is_given_or_refused() -> None:
    asked = plan_memory(recurrent(state_checkpoint_memory=100 * MIB))
    assert asked.states.num_checkpoints == 200
    assert plan_memory(recurrent(state_checkpoint_memory=0)).states.num_checkpoints == 0
    message = r"416\.0 MiB of recurrent states for 32 sequences .*and 800 checkpoints"
    with pytest.raises(MemoryPlanError, match=message) as caught:
        plan_memory(recurrent(state_checkpoint_memory=400 * MIB))
    found = re.search(r"--state-checkpoint-memory (\d+)MiB", str(caught.value))
    assert found is not None
    plan_memory(recurrent(state_checkpoint_memory=int(found[1]) * MIB))


def test_states_that_do_not_fit_are_refused_with_the_sequences_that_do() -> None:
    changes = {"budget_bytes": 520 * MIB, "max_num_seqs": 1000}
    with pytest.raises(MemoryPlanError, match=r"500\.0 MiB of recurrent states for 1000") as caught:
        plan_memory(recurrent(**changes))
    found = re.search(r"--max-num-seqs (\d+)", str(caught.value).partition("Nearest")[2])
    assert found is not None
    plan_memory(recurrent(**{**changes, "max_num_seqs": int(found[1])}))
