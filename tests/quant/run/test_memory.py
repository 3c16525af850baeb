"""A run's memory is planned beforehand, kept to, and does not grow with the model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.large_model import LETTERS, write_large_model

from appliance.errors import MemoryPlanError
from appliance.model.source import open_model
from appliance.progress.quantize_events import QuantizeEvent, RunPlanned
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run import dry_run, memory_plan
from appliance.quant.run.memory import MemoryUse
from appliance.quant.run.memory_plan import plan_memory
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import dry_run as try_out
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.run.plan import make_plan
from appliance.quant.text.calibration import CalibrationText

MIB = 1 << 20
# Of these, 12 were once pages of the libraries' files, which a box reads in as it finds time.
BESIDE_LIBRARIES = 160 * MIB
FOR_SLOPES = 25 * MIB  # more where slopes come back through a layer
RUN = """
import json, os, re, sys
from pathlib import Path
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from appliance.quant.text.calibration import CalibrationText
from appliance.quant.run.options import Method, QuantizeOptions, WeightFormat
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.formats.scheme import TrellisScheme, WeightScheme
from appliance.progress.quantize_events import RunPlanned

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

def quantize(model, out, text, method, plans, max_ram=None):
    def keep(event):
        if isinstance(event, RunPlanned):
            plans.append(event)

    rows = CalibrationText(Path(text), num_tokens=1024, row_tokens=512)
    scheme, form = WeightScheme(4, 64), WeightFormat.COMPRESSED_TENSORS
    if method == "trellis":
        scheme, form = TrellisScheme(4), WeightFormat.TRELLIS
    options = QuantizeOptions(scheme, Method(method), rows, format=form, max_ram=max_ram)
    return quantize_model(Path(model), Path(out), options, keep)

def run(small, large, text, method, beside):
    quantize(small, small + method, text, method, [])  # touches what a run needs of the libraries
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is taken now
    plans, ceiling = [], peak() + beside
    report = quantize(large, large + "-out", text, method, plans, ceiling)
    return {"peak": peak(), "reported": report.peak_ram, "plan": plans[0].peak_ram,
            "ceiling": ceiling}

# A fork is a fresh run, in which torch has no threads yet.
for arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        sys.stdout.write(json.dumps(run(*arguments)) + "\\n")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, arguments
"""
SHAPES: dict[str, dict[str, Any]] = {
    "rtn": {"hidden": 512, "middle": 2048, "layers": 5, "vocab": 170_000},
    "gptq": {"hidden": 512, "middle": 1024, "layers": 2, "vocab": 170_000},
    "awq": {"hidden": 512, "middle": 1024, "layers": 1, "vocab": 170_000},
    "trellis": {"hidden": 512, "middle": 1024, "layers": 1, "vocab": 170_000},
}


@pytest.fixture(scope="module")
def large_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Memory of a run by each method; on one processor each, so that allocations have one order."""
    folder = tmp_path_factory.mktemp("large")
    text = folder / "letters.txt"
    text.write_text(LETTERS * 800)
    write_large_model(folder / "small", hidden=128, middle=256, layers=1, vocab=50)
    runs = []
    for method, shape in SHAPES.items():
        size = write_large_model(folder / method, **shape)
        assert size > 2 * BESIDE_LIBRARIES, "and its embedding alone is more"
        models = f"{folder / 'small'}", f"{folder / method}"
        beside = BESIDE_LIBRARIES + FOR_SLOPES * (method == "trellis")
        runs.append((*models, f"{text}", method, beside))
    command = [sys.executable, "-c", RUN, json.dumps(runs)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return dict(zip(SHAPES, map(json.loads, result.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("method", SHAPES)
def test_a_large_model_takes_little_memory_beside_the_libraries(
    large_runs: dict[str, dict[str, int]], method: str
) -> None:
    found = large_runs[method]
    assert found["peak"] <= found["ceiling"]
    assert found["reported"] == pytest.approx(found["peak"], rel=0.02)
    assert found["plan"] == pytest.approx(found["peak"], rel=0.05), "measured beforehand"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    write_large_model(tmp_path / "large", hidden=128, middle=256, layers=2, vocab=50)
    (tmp_path / "letters.txt").write_text(LETTERS * 800)
    return tmp_path / "large"


def options(folder: Path, method: Method, **ceilings: int) -> QuantizeOptions:
    rows = CalibrationText(folder / "letters.txt", num_tokens=2048, row_tokens=512)
    return QuantizeOptions(WeightScheme(4, 64), method, rows, **ceilings)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [Method.RTN, Method.AWQ, Method.GPTQ])
def test_too_low_a_ceiling_is_refused_with_one_that_would_do(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    use = MemoryUse(ram=300 * MIB, peak_ram=300 * MIB, vram=0, peak_vram=0)
    monkeypatch.setattr(MemoryUse, "now", lambda device: use)
    with pytest.raises(
        MemoryPlanError, match=r"but 100 MiB may be used; --max-ram \d+MiB"
    ) as caught:
        quantize_model(large, tmp_path / "out", options(tmp_path, method, max_ram=100 * MIB))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob(".*"))
    found = re.search(r"--max-ram (\d+)MiB", str(caught.value))
    assert found is not None
    would_do = int(found[1]) * MIB
    least = would_do - memory_plan.SPREAD
    with pytest.raises(MemoryPlanError, match=f"--max-ram {found[1]}MiB would do"):
        quantize_model(large, tmp_path / "out", options(tmp_path, method, max_ram=least - MIB))
    quantize_model(large, tmp_path / "out", options(tmp_path, method, max_ram=least))


def test_what_the_model_took_to_write_its_text_counts(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CalibrationText(tmp_path / "letters.txt", num_tokens=1024, row_tokens=512)
    rows = replace(text.rows_of(large), peak_ram=1 << 40)
    monkeypatch.setattr(CalibrationText, "rows_of", lambda *_, **__: rows)
    plans: list[RunPlanned] = []

    def keep(event: QuantizeEvent) -> None:
        if isinstance(event, RunPlanned):
            plans.append(event)

    report = quantize_model(large, tmp_path / "out", options(tmp_path, Method.GPTQ), keep)
    assert report.peak_ram == 1 << 40
    assert [plan.peak_ram for plan in plans] == [1 << 40]
    assert plans[0].notes == (), "it is smaller than before"


def test_finding_where_bits_matter_is_refused_before_it_takes_too_much(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = MemoryUse(ram=300 * MIB, peak_ram=300 * MIB, vram=0, peak_vram=0)
    monkeypatch.setattr(MemoryUse, "now", lambda device: use)
    asked = options(tmp_path, Method.RTN, max_ram=use.ram + 20 * MIB)
    with pytest.raises(MemoryPlanError, match=r"bits matter most takes .* without --mixed"):
        quantize_model(large, tmp_path / "out", replace(asked, mixed=5.0))
    assert not list(tmp_path.glob(".*"))


def test_the_result_does_not_depend_on_the_ceiling(large: Path, tmp_path: Path) -> None:
    for name, ceilings in (("free", {}), ("capped", {"max_ram": 8 << 30})):
        quantize_model(large, tmp_path / name, options(tmp_path, Method.AWQ_GPTQ, **ceilings))
    one, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("free", "capped")
    )
    assert one == other


@pytest.mark.parametrize("method", [Method.RTN, Method.GPTQ])
def test_a_dry_run_says_what_a_run_takes_and_leaves_nothing(
    large: Path, tmp_path: Path, method: Method
) -> None:
    before = sorted(tmp_path.rglob("*"))
    plan = try_out(large, tmp_path / "out", options(tmp_path, method))
    assert sorted(tmp_path.rglob("*")) == before
    assert plan.measured
    assert plan.seconds > 0
    assert plan.peak_ram > 100 * MIB
    assert plan.disk_bytes == (0 if method is Method.RTN else 2 * 2048 * 128 * 4)
    forms = {kind.tensors: kind.form for kind in plan.classes}
    assert forms == {
        "layer weights": "4 bits, groups of 64, symmetric",
        "embedding": "16 bits",
        "head": "16 bits",
        "norms and biases": "16 bits",
    }


@pytest.mark.parametrize("message", ["[enforce fail] can't allocate memory: 9 bytes", None])
def test_memory_that_runs_out_at_the_start_is_one_line(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str | None
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError if message is None else RuntimeError(message)

    monkeypatch.setattr(dry_run, "quantize_layers", exhausted)
    with pytest.raises(MemoryPlanError, match="did not suffice for trying the largest layer"):
        quantize_model(large, tmp_path / "out", options(tmp_path, Method.GPTQ, max_ram=8 << 30))
    assert not list(tmp_path.glob(".*"))


def test_a_layer_that_takes_more_than_reckoned_is_refused_before_the_work(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "plan_memory", _nothing)
    monkeypatch.setattr(dry_run, "plan_memory", _nothing)
    with pytest.raises(MemoryPlanError, match=r"the largest layer took .* MiB where 1 MiB"):
        quantize_model(large, tmp_path / "out", options(tmp_path, Method.GPTQ, max_ram=MIB))
    assert not list(tmp_path.glob(".*"))


def _nothing(*_: object) -> memory_plan.RunMemory:
    return memory_plan.RunMemory(program=0, parts={}, vram=0, free=1, workers=1)


def test_ceilings_of_the_gpu_are_kept_by_reckoning(large: Path, tmp_path: Path) -> None:
    source = open_model(large)
    asked = options(tmp_path, Method.GPTQ, max_vram=MIB)
    asked = replace(asked, device="cuda")
    plan = make_plan(source, asked, torch.bfloat16)
    use = MemoryUse.now(torch.device("cpu"))
    with pytest.raises(MemoryPlanError, match=r"on the GPU, but 1 MiB .*--max-vram \d+MiB"):
        plan_memory(source, plan, asked, (4, 512), use, 2, 1 << 18)
    roomy = replace(asked, max_vram=1 << 30)
    found = plan_memory(source, plan, roomy, (4, 512), use, 2, 1 << 18)
    assert 4 * MIB < found.vram < 40 * MIB
    assert found.ram < use.ram + 100 * MIB, "the layer is on the GPU"
