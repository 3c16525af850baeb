"""An engine whose model now and then gives one sequence logits that are NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from appliance.engine.engine import LLMEngine

ROW = 1


class BrokenExecutor:
    """The executor of a model, except that logits in `ROW` are NaN when told so."""

    def __init__(self, executor: Any, breaks: Callable[[int, int], bool]) -> None:
        self._executor = executor
        self._breaks = breaks
        self._num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def forward(self, *arguments: Any) -> torch.Tensor:
        logits: torch.Tensor = self._executor.forward(*arguments)
        self._num_calls += 1
        if self._breaks(self._num_calls, len(logits)):
            logits[ROW] = torch.nan
        return logits


def break_logits(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, breaks: Callable[[int, int], bool]
) -> None:
    """Break logits until the test ends; `breaks` gets the call's number, from 1, and its rows."""
    runner: Any = engine.runner
    broken = BrokenExecutor(runner.executor, breaks)
    for owner in (runner, runner.graphed):
        if owner is not None:
            monkeypatch.setattr(owner, "executor", broken)
