"""Fixtures of the engine tests."""

from __future__ import annotations

import pytest

from appliance.engine.nouns.plan import StepLoad
from appliance.engine.speculation.speculator import Speculator


@pytest.fixture(autouse=True)
def _durations_follow_from_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute durations from rows, since drafts and preemptions depend on measured times."""
    observe = Speculator.observe

    def price(self: Speculator, load: StepLoad, seconds: float, *, is_ahead: bool = False) -> None:
        observe(self, load, (load.num_answers + load.draft_rows) ** 0.5, is_ahead=is_ahead)

    monkeypatch.setattr(Speculator, "observe", price)
