"""How a parallel run (`pytest -n`) shares the tests out: in units, of which the longest come first.

A unit is a file, but for what one child process runs, for clients of one server or browser, and for
files whose tests take long and share nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

# What one child process runs, and waits for, in the worker that gets the first of its tests.
ONE_UNIT = "tests/kernels/executed"
# All its files ask one server, which each worker with one of them would start.
CLIENTS = "tests/e2e/clients"
# Files that share a browser, of which each worker with one of them would start its own.
IN_BROWSER = "tests/server/dashboard/test_page_in_browser.py"
# Their tests are units of their own.
BY_TEST = {"tests/kernels/executed/test_compiled_once.py"}
# Seconds of one of three workers on two processors, waits included; of executed kernels when their
# code has changed. Who begins one of these last leaves the others without work.
SECONDS = {
    "tests/model/test_class_defaults.py": 110,
    "tests/e2e/test_cluster.py": 92,
    ONE_UNIT: 89,
    CLIENTS: 87,
    "tests/kernels/cpu/test_sanitizers.py": 69,
    IN_BROWSER: 53,
    "tests/model/test_real_settings.py": 50,
    "tests/engine/ranks/test_torch_engine.py": 45,
    "tests/model/test_packaged_models.py": 40,
    "tests/quant/methods/test_quality_smollm2.py": 37,
    "tests/kernels/cpu/test_attention.py": 33,
    "tests/engine/ranks/test_torch_probes.py": 28,
    "tests/tui/test_snapshots.py": 28,
    "tests/kernels/executed/test_engine.py": 28,
    "tests/bench/test_gpu_trial.py": 27,
    "tests/server/dashboard/test_web_dashboard.py": 27,
    "tests/quant/run/test_resume.py": 26,
    "tests/engine/ranks/test_engine.py": 24,
    "tests/kernels/executed/test_compiled_once.py": 24,
    "tests/kernels/executed/test_traffic.py": 24,
    "tests/e2e/test_ranks.py": 18,
    "tests/quant/run/test_memory.py": 15,
    "tests/engine/run/test_model_runner.py": 15,
    "tests/kernels/cpu/test_pool.py": 14,
    "tests/model/encoder/test_encoder.py": 30,
    "tests/model/test_text_part.py": 25,
    "tests/quant/quality/test_readers.py": 20,
    "tests/quant/kv/test_served_plan.py": 14,
    "tests/engine/test_expert_models.py": 14,
    "tests/kernels/test_compiled_kernels.py": 13,
    "tests/quant/run/test_quantize_smollm2.py": 13,
    "tests/engine/speculation/test_same_answers.py": 12,
    "tests/engine/speculation/test_draft_head.py": 12,
    "tests/engine/test_recurrent_models.py": 12,
    "tests/engine/test_simulation.py": 12,
    "tests/bench/test_gpu_run.py": 11,
    "tests/engine/process/test_process_hangs.py": 11,
    "tests/server/test_chaos.py": 11,
    "tests/server/test_protocols.py": 11,
    "tests/test_quantize_command.py": 11,
    "tests/kernels/cpu/test_linear.py": 10,
    "tests/e2e/test_serve.py": 10,
    "tests/tui/test_map_screen.py": 10,
    "tests/tui/test_request_table.py": 10,
    "tests/tui/test_run.py": 10,
    "tests/quant/run/test_evaluation_memory.py": 9,
    "tests/e2e/test_fallback.py": 9,
    "tests/engine/test_fallback_models.py": 9,
    "tests/model/shard/test_real_model.py": 9,
    "tests/quant/run/test_calibrated_kinds.py": 9,
    "tests/quant/run/test_expert_memory.py": 9,
    "tests/tui/test_screens.py": 9,
    "tests/e2e/test_doctor.py": 8,
    "tests/fit/test_candidates.py": 8,
    "tests/kernels/test_executed_record.py": 8,
    "tests/quant/gguf/test_quantize.py": 8,
}


def unit_of(nodeid: str) -> str:
    """Return the unit that a test belongs to: a file, a folder, or the test itself."""
    file = nodeid.split("::", 1)[0]
    if "[interpreter" in nodeid and file.startswith(f"{ONE_UNIT}/"):
        return ONE_UNIT
    if file.startswith(f"{CLIENTS}/"):
        return CLIENTS
    if file.endswith("_in_browser.py"):
        return IN_BROWSER
    return nodeid if file in BY_TEST else file


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by what their unit takes, then files with slow ones before others."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[int, bool]:
        unit = unit_of(item.nodeid)
        return -SECONDS.get(unit.split("::", 1)[0], 0), item.path not in slow

    items.sort(key=place)


class FileScheduling(LoadScopeScheduling):
    """Gives a worker that is about to run out of tests the next unit, as they were collected."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        missing = [name for name in SECONDS if not Path(config.rootpath, name).exists()]
        assert not missing, f"{missing} are not there; have they moved?"
        config.option.loadscopereorder = False  # it would begin with the most tests, however quick
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
