"""A run's memory plan includes the card that follows, which keeps to its ceiling."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.large_model import LETTERS, write_large_model

from appliance.errors import MemoryPlanError
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run.dry_run import plan_run
from appliance.quant.run.evaluation_memory import LEAST_ENTRIES, MOST_ENTRIES, EvaluationMemory
from appliance.quant.run.options import QuantizeOptions
from appliance.quant.run.plan import make_plan

MIB = 1 << 20
WINDOW = 512
VOCABULARY = 30_000  # 4,096 logits of each of nine variants take 180 MiB

RUN = """
import json, os, re, sys
from pathlib import Path
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.quality.make_card import CardOptions, make_card
from appliance.quant.run.memory import peak_ram, return_large_blocks
from appliance.quant.run.options import QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.held_out import HeldOutText

model, out, text = map(Path, sys.argv[1:4])
window, *ceilings = map(int, sys.argv[4:])
options = QuantizeOptions(WeightScheme(4, 64), card_tokens=window)
quantize_model(model, out, options)
found = []
for beside in ceilings:
    return_large_blocks()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_ram()
    ceiling = before + beside
    card = make_card(out, model, CardOptions(HeldOutText(text, window, window), max_ram=ceiling))
    found.append({"before": before, "peak": peak_ram(), "ceiling": ceiling,
                  "perplexity": card.perplexity.value})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "model"
    write_large_model(folder, hidden=128, middle=256, layers=1, vocab=VOCABULARY)
    return folder


def memory_of(model: Path, max_ram: int | None) -> EvaluationMemory:
    return EvaluationMemory(open_model(model), 512, 4096, 2, 9, max_ram)


def test_less_memory_is_fewer_logits_at_once_and_then_a_refusal(model: Path) -> None:
    free = memory_of(model, None)
    assert free.entries_at_once(0) == MOST_ENTRIES
    least = free.logits_bytes(LEAST_ENTRIES)
    for size, entries in ((316, 4096), (166, 2048), (116, 1024), (66, 256)):
        assert memory_of(model, size * MIB).entries_at_once(0) == entries
        assert free.logits_bytes(entries) <= size * MIB
    assert memory_of(model, least).entries_at_once(0) == LEAST_ENTRIES
    with pytest.raises(MemoryPlanError, match=r"--max-ram \d+MiB would do.*--no-card"):
        memory_of(model, least - 1).entries_at_once(0)
    assert memory_of(model, 250 * MIB).tokens_at_once(0) == 2048
    with pytest.raises(MemoryPlanError, match="quality card"):
        memory_of(model, 40 * MIB).tokens_at_once(0)


def test_a_run_is_refused_whose_card_would_not_fit(model: Path) -> None:
    source = open_model(model)
    options = QuantizeOptions(WeightScheme(4, 64))
    plan = make_plan(source, options, torch.bfloat16)
    _, without = plan_run(source, plan, options, None, is_tried=False)
    carded = QuantizeOptions(WeightScheme(4, 64), card_tokens=4096)
    _, with_card = plan_run(source, plan, carded, None, is_tried=False)
    memory = EvaluationMemory.of_run(source, carded)
    assert memory is not None
    assert with_card.peak_ram - without.peak_ram > memory.head_bytes
    tight = replace(carded, max_ram=without.peak_ram)
    with pytest.raises(MemoryPlanError, match="measuring the quality card takes"):
        plan_run(source, plan, tight, None, is_tried=False)


@pytest.mark.slow
def test_a_card_keeps_to_the_ceiling(model: Path, tmp_path: Path) -> None:
    """All memory counts, whatever holds it."""
    text = tmp_path / "letters.txt"
    text.write_text(LETTERS * 200)
    arguments = map(str, (model, tmp_path / "out", text, WINDOW, 120 * MIB, 4000 * MIB))
    command = [sys.executable, "-c", RUN, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    tight, roomy = json.loads(result.stdout)
    assert tight["peak"] <= tight["ceiling"]
    assert roomy["peak"] - roomy["before"] > 120 * MIB, "the ceiling was one"
    assert tight["perplexity"] == pytest.approx(roomy["perplexity"], rel=1e-6)
