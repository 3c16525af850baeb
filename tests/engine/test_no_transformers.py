"""`transformers` is for quantizing and as an oracle: serving a native family never loads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from model_families import FAMILIES, write_family

# Loads each model of the arguments, answers a prompt with it, and prints what was imported.
PROGRAM = """
import sys

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.request import Request, SamplingParams

for folder in sys.argv[1:]:
    config = EngineConfig(
        model=folder, device="cpu", threads=1, max_model_len=32, max_num_seqs=2,
        kv_cache_memory=2**20, kv_host_memory=0, kv_disk="off",
    )
    engine = LLMEngine.load(
        config, eos_token_ids=(), metadata=None, on_progress=lambda stage, done, total: None
    )
    sampling = SamplingParams(temperature=0, max_tokens=3)
    engine.submit(Request(request_id="one", prompt_token_ids=(1, 2, 3), sampling=sampling))
    answer = []
    while engine.has_work:
        answer += [token for delta in engine.step().deltas for token in delta.token_ids]
    engine.close()
    assert len(answer) == 3, (folder, answer)
print(*sys.modules)
"""


def test_serving_a_native_family_loads_no_transformers(tmp_path: Path) -> None:
    folders = [write_family(family, tmp_path / family) for family in FAMILIES]
    result = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *map(str, folders)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert "appliance.engine.engine" in loaded
    assert not {name for name in loaded if name.partition(".")[0] == "transformers"}
