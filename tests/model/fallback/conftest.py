"""Runs every model here with transformers' modules, even if we have a family for it by now."""

from __future__ import annotations

import pytest

from appliance.model import source


@pytest.fixture(autouse=True)
def _no_family(monkeypatch: pytest.MonkeyPatch) -> None:
    for finds in ("find_family", "family_of_text"):
        monkeypatch.setattr(source, finds, lambda config: None)
