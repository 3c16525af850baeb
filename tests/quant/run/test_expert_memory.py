"""A run's memory depends on one expert, not on the number of experts or layers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.large_model import LETTERS, write_large_model

from appliance.errors import MemoryPlanError
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run.memory import MemoryUse
from appliance.quant.run.memory_plan import RunMemory, plan_memory, running_bytes
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.run.plan import make_plan
from appliance.quant.text.calibration import CalibrationText

MIB = 1 << 20
USE = MemoryUse(ram=300 * MIB, peak_ram=300 * MIB, vram=0, peak_vram=0)
RUN = """
import json, os, re, sys
from pathlib import Path
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run.dry_run import plan_memory
from appliance.quant.run import dry_run
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

def planned(*given):
    plans.append(plan_memory(*given))
    return plans[-1]

folder, plans, found = Path(sys.argv[1]), [], []
dry_run.plan_memory = planned
ceiling = peak() + int(sys.argv[2])
rows = CalibrationText(folder / "letters.txt", num_tokens=1024, row_tokens=512)
options = QuantizeOptions(WeightScheme(4, 64), Method.GPTQ, rows, max_ram=ceiling)
for name in sys.argv[3:]:
    report = quantize_model(folder / name, folder / f"{name}-out", options)
    found.append({"peak": peak(), "plan": plans[-1].ram, "notes": report.notes})
print(json.dumps({"ceiling": ceiling, "runs": found}))
"""


def write(folder: Path, *, experts: int, layers: int = 2, hidden: int = 128, **form: bool) -> Path:
    write_large_model(
        folder, hidden=hidden, middle=hidden, layers=layers, vocab=50, experts=experts, **form
    )
    (folder.parent / "letters.txt").write_text(LETTERS * 800)
    return folder


def options(folder: Path, method: Method, max_ram: int | None = None) -> QuantizeOptions:
    rows = CalibrationText(folder / "letters.txt", num_tokens=2048, row_tokens=512)
    return QuantizeOptions(WeightScheme(4, 64), method, rows, max_ram=max_ram)


def plan_of(model: Path, method: Method) -> RunMemory:
    source, asked = open_model(model), options(model.parent, method)
    text = (4, 512) if method.needs_text else (0, 0)
    plan = make_plan(source, asked, torch.bfloat16)
    return plan_memory(source, plan, asked, text, USE, 1, 1 << 18)


def test_more_experts_and_layers_take_no_more_memory(tmp_path: Path) -> None:
    """One process on one processor; a layer of the second model has 18 MiB in float32."""
    write(tmp_path / "few", hidden=256, experts=4, layers=1)
    write(tmp_path / "many", hidden=256, experts=24, layers=2)
    beside = 140 * MIB
    command = [sys.executable, "-c", RUN, *map(str, (tmp_path, beside, "few", "many"))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    few, many = found["runs"]
    assert many["peak"] - few["peak"] < 6 * MIB
    for run in found["runs"]:
        assert 0.8 * run["plan"] < run["peak"] <= run["plan"] <= found["ceiling"]
    said = "layer 1: no calibration text came to 20 experts (0, 1, 2"
    assert not any("no calibration text" in note for note in few["notes"])
    assert any(said in note for note in many["notes"]), many["notes"]


@pytest.mark.parametrize("method", [Method.RTN, Method.AWQ, Method.GPTQ, Method.AWQ_GPTQ])
@pytest.mark.parametrize("fused", [False, True])
def test_the_plan_counts_one_expert(tmp_path: Path, method: Method, fused: bool) -> None:
    few = plan_of(write(tmp_path / "few", experts=8, fused=fused), method)
    many = plan_of(write(tmp_path / "many", experts=200, layers=3, fused=fused), method)
    wide = plan_of(write(tmp_path / "wide", experts=8, hidden=256, fused=fused), method)
    assert few.ram <= many.ram < few.ram + 2 * MIB, "its router has more outputs"
    assert wide.ram > few.ram
    if fused:
        assert few.parts["stored expert"] == 2 * 128 * 128 * 2


def test_a_card_counts_all_experts_of_a_layer(tmp_path: Path) -> None:
    """The evaluation holds a whole layer; see `evaluation_memory`."""
    few, many = (
        running_bytes(open_model(write(tmp_path / str(count), experts=count)), 512, 512)
        for count in (8, 200)
    )
    assert many - few > 192 * 3 * 128 * 128 * 4


def test_too_low_a_ceiling_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path / "model", experts=6, layers=1)
    monkeypatch.setattr(MemoryUse, "now", lambda device: USE)
    needed = r"gptq \d+.*but 310 MiB may be used; --max-ram (\d+)MiB would do"
    with pytest.raises(MemoryPlanError, match=needed) as caught:
        quantize_model(model, tmp_path / "out", options(tmp_path, Method.GPTQ, 310 * MIB))
    assert not list(tmp_path.glob("*out*"))
    found = re.search(needed, str(caught.value))
    assert found is not None
    would_do = int(found[1]) * MIB
    quantize_model(model, tmp_path / "out", options(tmp_path, Method.GPTQ, would_do))
