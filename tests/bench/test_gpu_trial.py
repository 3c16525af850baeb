"""The whole plan for a GPU, tried on the CPU with the packages of a lent machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.quant.formats.scheme import WeightScheme
from bench.gpu.plan import SUITES
from bench.gpu.results import Results
from bench.lib.model_shapes import TINY_LLAMA
from bench.lib.synthetic import Schemes
from bench.lib.synthetic_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[2]
# Our packages that a lent machine lacks and that are not sent along.
MISSING = ("fastapi", "gguf", "textual", "uvicorn", "openai", "compressed_tensors")
BLOCK = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MISSING}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_suite_comes_to_its_end(tmp_path: Path) -> None:
    model, out = tmp_path / "tiny-model", tmp_path / "out"
    write_checkpoint(model, TINY_LLAMA, Schemes(WeightScheme(4, 64), WeightScheme(8, 64)))
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    command = ["scripts/benchmark", "gpu", "--tiny", "--out", str(out), "--model", str(model)]
    command += ["--minutes", "14", "--commit", "abc"]
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    results = Results.read(out / "cpu")
    failed = [row for row in results.rows.values() if "failed" in row]
    assert finished.returncode == 0, (failed, finished.stderr[-3000:])
    assert {row["key"]["who"] for row in failed} <= {"SDPA cuDNN, contiguous"}
    assert list(results.ends) == [suite.name for suite in SUITES]
    assert all(list(results.of(suite.name)) for suite in SUITES)
    assert results.runs[0]["commit"] == "abc"
    (agreement, *_) = (row for row in results.of("real_model"))
    assert agreement["positions"] == 80
    assert agreement["agreement"] > 0.7  # random weights: the likeliest tokens are nearly tied
    goals = json.loads((out / "cpu" / "report.json").read_text())["goals"]
    assert len(goals) == 19
    measured = {goal["what"] for goal in goals if goal["value"] is not None}
    assert {"first start, seconds", "real weights, likeliest tokens"} <= measured
    assert "| W4A16, M >= 256 | cuBLAS BF16 | >= 0.9 |" in (out / "cpu" / "report.md").read_text()
