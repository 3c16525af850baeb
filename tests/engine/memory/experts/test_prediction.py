from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from support.engine.memory_requests import memory_request
from support.models.expert_models import save_experts

from appliance.engine.memory.experts.prediction import (
    CROSSING_SECONDS,
    split_in_words,
    token_time,
)
from appliance.engine.memory.experts.split import NONE_ON_HOST, ExpertsOnHost
from appliance.engine.memory.experts.streaming import HOST_GB_PER_SECOND, Streaming
from appliance.engine.memory.plan import MemoryPlan, plan_memory
from appliance.model.source import ModelSource, open_model
from appliance.model.tensors import Role

GIB = 2**30


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Layers 0 and 2 have 8 experts each, of which a token chooses 3."""
    folder: Path = tmp_path_factory.mktemp("models") / "routed"
    save_experts("qwen3_moe", folder)
    return open_model(folder)


def test_a_token_reads_the_chosen_experts_on_either_side(source: ModelSource) -> None:
    own = sum(
        slot.shape[0] * slot.shape[1]
        for slot in source.slots()
        if slot.expert is not None and slot.layer == 2 and len(slot.shape) == 2
    )
    whole = token_time(source, 0, 0.0, NONE_ON_HOST, 936)
    assert (whole.host, whole.crossings, whole.device) == (0, 0, 0)
    moved = token_time(source, 0, 0.0, ExpertsOnHost((2,), 8 * own), 936)
    assert moved.host == pytest.approx(8 * own * 3 / 8 / (HOST_GB_PER_SECOND * 1e9))
    assert moved.crossings == 2 * CROSSING_SECONDS
    cached = token_time(source, 0, 1e9, NONE_ON_HOST, 500)
    assert cached.device == pytest.approx(0.002)
    assert cached.per_second == pytest.approx(500)


def test_experts_that_left_are_no_part_of_what_the_device_reads(source: ModelSource) -> None:
    """Once no experts are left there, a token reads all the device's weights but the embedding."""
    sizes = {True: 0, False: 0}
    embedding = 0
    for slot in source.slots():
        count = 1
        for side in slot.shape:
            count *= side
        sizes[slot.expert is not None] += count
        embedding += count if slot.role.value == "embedding" else 0
    rest, experts = sizes[False], sizes[True]
    unread = 0 if source.spec.tied_head else embedding
    whole = token_time(source, rest + experts, 0.0, NONE_ON_HOST, 1)
    assert whole.device * 1e9 == pytest.approx(rest - unread + experts * 3 / 8)
    gone = token_time(source, rest, 0.0, ExpertsOnHost((0, 2), experts), 1)
    assert gone.device * 1e9 == pytest.approx(rest - unread)


def test_narrow_experts_are_a_smaller_share_of_what_a_token_reads(source: ModelSource) -> None:
    """By hand: layers have 4.25 bits, embedding and head 16; the head is tied, or read too."""
    layers, experts, ends, unread = 0, 0, 0, 0
    for slot in source.slots():
        count = math.prod(slot.shape)
        if slot.is_linear and slot.expert is not None:
            experts += count
        elif slot.is_linear:
            layers += count
        else:
            ends += count
            unread += count if slot.role is Role.EMBEDDING and not source.spec.tied_head else 0
    whole = 4.25 * (layers + experts) + 16 * ends
    read = 4.25 * (layers + 3 / 8 * experts) + 16 * (ends - unread)
    time = token_time(source, 1000, 0.0, NONE_ON_HOST, 1, 4.25)
    assert time.device * 1e9 == pytest.approx(1000 * read / whole)


def plan() -> MemoryPlan:
    usual = plan_memory(memory_request())
    on_host = ExpertsOnHost((2,), 3 * GIB)
    return replace(usual, weight_bytes=9 * GIB, budget_bytes=11 * GIB, host_experts=on_host)


def test_the_banner_says_split_reason_and_prediction(source: ModelSource) -> None:
    said = split_in_words(source, plan(), 1024, "NVIDIA GeForce RTX 3060")
    assert "experts of 1 of 2 layers stay in host memory (3.00 GiB)" in said
    assert "11.00 GiB may be used of NVIDIA GeForce RTX 3060" in said
    assert "predicted, not measured:" in said
    assert "360 GB/s" in said
    asked = replace(plan(), host_experts=ExpertsOnHost((2,), 3 * GIB, is_asked=True))
    assert "as --experts-on-cpu asks" in split_in_words(source, asked, 1024, "RTX 3060")
    streamed = ExpertsOnHost((2,), 3 * GIB, streaming=Streaming(300, 512, 1 << 25, 0, 0.013, 0.014))
    said = split_in_words(source, replace(plan(), host_experts=streamed), 1024, "RTX 3060")
    assert "steps of 300 rows or more stream them to the GPU" in said
    unknown = split_in_words(source, plan(), 1024, "Voodoo 2")
    assert "nothing is predicted" in unknown
    assert "tokens/s" not in unknown
