"""The conditions on which a model may take memory beside others."""

from __future__ import annotations

import pytest
from support.engine.memory_requests import MIB
from support.engine.memory_requests import memory_request as request

from appliance.engine.memory.admission import Admission
from appliance.engine.memory.plan import plan_memory
from appliance.errors import MemoryPlanError


def test_alone_it_plans_with_what_is_free() -> None:
    assert Admission().plan(lambda: request(fill=True), measured=False) == request(fill=True)


def test_it_asks_for_its_plan_and_takes_what_others_have_left() -> None:
    asked: list[tuple[int, int]] = []
    free = iter([20 * MIB, 250 * MIB])
    admission = Admission(300 * MIB, is_shared=True, ask=lambda *words: asked.append(words))
    granted = admission.plan(lambda: request(fill=True, budget_bytes=next(free)), measured=False)
    assert granted.budget_bytes == 250 * MIB
    assert not granted.fill, "others may come"
    plan = plan_memory(request())
    needed = plan.weight_bytes + plan.kv_bytes + plan.workspace_bytes + plan.kv_host_bytes
    assert asked == [(needed, 20 * MIB)]


def test_what_does_not_fit_even_alone_is_refused_before_anyone_makes_room() -> None:
    admission = Admission(90 * MIB, is_shared=True, ask=lambda *words: pytest.fail("it asked"))
    with pytest.raises(MemoryPlanError, match=r"90\.0 MiB may be used"):
        admission.plan(request, measured=False)


def test_where_the_workspace_is_measured_later_its_estimate_is_asked_for() -> None:
    asked: list[int] = []
    terms = {"fill": True, "host_budget_bytes": 100 * MIB}
    for measured in (False, True):
        admission = Admission(None, is_shared=True, ask=lambda needed, free: asked.append(needed))
        admission.plan(lambda: request(**terms), measured=measured)
    assert asked[0] == asked[1]
