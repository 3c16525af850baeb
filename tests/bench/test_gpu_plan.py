"""The plan of a first run measures every goal, and measures nothing twice."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu.goals import verdicts
from bench.gpu.plan import SUITES, Amount, Wanted
from bench.gpu.results import Results
from bench.gpu.rows import Rows
from bench.gpu.supervisor import name_of
from bench.gpu.timing import Bench

# The fields of a row of each suite, with any figure.
FOUND: dict[str, dict[str, Any]] = {
    "matmul": {"us": {"median": 1.0}, "share_of_copy": 0.5},
    "decode": {"us": {"median": 1.0}, "share_of_copy": 0.5},
    "start": {"ready_seconds": 1.0, "first_token_seconds": 1.0},
    "engine": {"idle_share": 0.5, "used_of_planned": 1.0, "tokens_per_second": {"median": 1.0}},
    "peer_engine": {"tokens_per_second": {"median": 1.0}},
    "real_model": {"agreement": 1.0, "positions": 1},
}


class Planned(Rows):
    """Records what would be measured on a GPU."""

    def __init__(self) -> None:
        super().__init__(Bench(torch.device("cuda", 0), 1, 1.0), lambda **message: None)
        self.keys: list[dict[str, Any]] = []

    def prepare(
        self,
        kernel: str,
        shape: str,
        size: dict[str, int],
        measure: Callable[[], None],
        who: str = "ours",
    ) -> None:
        """Record the key."""
        self.keys.append({"kernel": kernel, "shape": shape, **size, "who": who})

    def note(self, key: dict[str, Any], find: Callable[[], dict[str, Any]]) -> None:
        """Record the key."""
        self.keys.append(key)


def test_a_first_run_measures_every_goal(tmp_path: Path) -> None:
    results = Results.read(tmp_path)
    for suite in SUITES:
        planned = Planned()
        wanted = Wanted(Amount.FIRST, model=Path("model"))
        importlib.import_module(suite.module).measure(planned, wanted)
        names = [name_of(key) for key in planned.keys]
        assert names, suite.name
        assert len(set(names)) == len(names), suite.name
        for key in planned.keys:
            row = {"suite": suite.name, "key": key, **FOUND.get(suite.name, {})}
            results.add(row)
            if suite.name == "matmul" and key["kernel"] == "w4a16":
                for peer in ("cuBLAS bf16", "torch int4"):  # `contest` measures it beside its own
                    results.add({**row, "key": {**key, "who": peer}})
    unmeasured = [goal.what for goal in verdicts(results, "NVIDIA H200") if goal.value is None]
    assert unmeasured == []
