"""Where the CPU library serves, it loads neither torch nor transformers, whatever the format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.gguf.ggml_models import write_llama
from support.models.checkpoint_forms import FORMS, write_both
from support.models.encoder_models import make
from support.models.model_families import FAMILIES, write_family

from appliance.kernels.weights.ggml_types import GGML_TYPES

# Loads each model of the arguments, answers a prompt with it, and prints what was imported. An
# argument names a setting, the number of processes in it, and the model.
PROGRAM = """
import sys
from pathlib import Path

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams

for setting, ranks, folder in (given.split(":", 2) for given in sys.argv[1:]):
    config = EngineConfig(
        model=folder, device="cpu", threads=1, max_model_len=32, max_num_seqs=2,
        kv_cache_memory=2**20, kv_host_memory=0, kv_disk="off", **{setting: int(ranks)},
    )
    engine = load_llm_engine(
        config, eos_token_ids=(), metadata=None, on_progress=lambda stage, done, total: None
    )
    sampling = SamplingParams(temperature=0, max_tokens=3)
    engine.submit(Request(request_id="one", prompt_token_ids=(1, 2, 3), sampling=sampling))
    answer = []
    while engine.has_work:
        answer += [token for delta in engine.step().deltas for token in delta.token_ids]
    for rank in engine.info.ranks:  # the other processes, of which only the files are seen
        print(*Path(f"/proc/{rank.pid}/maps").read_text().split())
    engine.close()
    assert len(answer) == 3, (folder, answer)
print(*sys.modules)
"""


ENCODER_PROGRAM = """
import sys

from appliance.config import EngineConfig
from appliance.engine.load.load_engine import load_engine
from appliance.engine.nouns.request import Pooling, Request
from appliance.engine.nouns.sampling_params import SamplingParams

for folder, bits in [(folder, bits) for folder in sys.argv[1:] for bits in (None, 8)]:
    engine = load_engine(
        EngineConfig(model=folder, device="cpu", threads=1, max_num_seqs=2, weight_bits=bits),
        eos_token_ids=(), metadata=None, on_progress=lambda stage, done, total: None,
    )
    sampling, ranks = SamplingParams(temperature=0, max_tokens=0), engine.info.ranks_pairs
    engine.submit(
        Request(
            request_id="one", prompt_token_ids=(2, 3, 4), sampling=sampling, pooling=Pooling.CLS,
            second_text=2 if ranks else 0,
        )
    )
    (delta,) = engine.step().deltas
    assert delta.error is None, delta.error
    assert len(delta.pooled) == (4 if ranks else 4 * engine.info.hidden_size)
print(*sys.modules)
"""


HEAVY = {"torch", "transformers"}


def modules_after_serving(program: str, *given: object) -> tuple[set[str], set[str]]:
    """Answer with each model in a process; return its packages, and the files of other ranks."""
    command = [sys.executable, "-P", "-c", program, *map(str, given)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert "appliance.engine.engine" in loaded
    files = {name for name in loaded if name.startswith("/")}
    packages = {name.partition(".")[0] for name in loaded - files}
    return packages, {Path(name).name for name in files}


def test_serving_a_native_family_loads_neither(tmp_path: Path) -> None:
    """GGUF files of each type of codes, quantized folders, ranks."""
    models = [write_family(family, tmp_path / family) for family in FAMILIES]
    models.append(write_llama(tmp_path / "held.gguf", (*GGML_TYPES, "MXFP4")))
    models.append(write_llama(tmp_path / "packed.gguf", ("Q4_0", "Q4_1", "Q8_0")))
    for name, form in FORMS.items():
        (tmp_path / name).mkdir()
        models.append(write_both(tmp_path / name, form)[0].path)
    given = [f"tensor_parallel:1:{model}" for model in models]
    given += [f"{way}:2:{models[0]}" for way in ("tensor_parallel", "pipeline_parallel")]
    packages, libraries = modules_after_serving(PROGRAM, *given)
    assert not packages & HEAVY
    assert any(name.startswith("_multiarray_umath") for name in libraries)  # NumPy's
    assert not [name for name in libraries if name.startswith("libtorch")]


def test_serving_an_encoder_loads_neither(tmp_path: Path) -> None:
    folders = []
    for name in ("bert", "xlm-roberta", "modernbert"):
        folders.append(make(name, tmp_path / name, ranks=name == "modernbert").path)
    packages, _ = modules_after_serving(ENCODER_PROGRAM, *folders)
    assert not packages & HEAVY


def test_the_plan_counts_torch_where_adapters_need_it(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from appliance.config import EngineConfig
from appliance.engine.load.memory_request import request_memory
from appliance.model.source import open_model
source = open_model(Path(sys.argv[1]), in_torch=False)
for options in ({}, {"lora_dir": sys.argv[2]}):
    config = EngineConfig(model=sys.argv[1], device="cpu", threads=1, **options)
    print(request_memory(config, source)[1].process_bytes >> 20)
"""
    folder = write_family("llama", tmp_path / "llama")
    result = subprocess.run(
        [sys.executable, "-P", "-c", program, folder, tmp_path], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    without, with_adapters = map(int, result.stdout.split())
    assert without < 100 < with_adapters - without
