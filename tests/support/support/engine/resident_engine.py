"""An engine in a process of its own, under a load that uses all the memory of its plan.

`python resident_engine.py MODEL SETTINGS` prints a line of JSON: the parts of the plan, and the
process's resident memory after loading, with a full KV cache, and after steps of all kinds.
SETTINGS is JSON too. With --idle there are no steps.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import MAX_LOGPROBS, SamplingParams
from appliance.runtime import resident_bytes


def ask(engine: LLMEngine, count: int, length: int, sampling: SamplingParams) -> None:
    noise = random.Random(count)
    for number in range(count):
        tokens = tuple(noise.choices(range(1000, 40_000), k=length))
        engine.submit(Request(request_id=str(number), prompt_token_ids=tokens, sampling=sampling))
    while engine.has_work:
        engine.step()


def fill(engine: LLMEngine) -> None:
    """Write to every block of the cache, as hours of prompts would."""
    cache: Any = engine.runner.cache  # type: ignore[attr-defined]
    for block in range(cache.num_blocks):
        cache.write_block(block, bytes(cache.block_bytes))


def compute(engine: LLMEngine) -> None:
    """Take steps of all kinds."""
    limits = engine.info.max_num_seqs
    ask(engine, 1, 520, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    sampled = SamplingParams(
        max_tokens=3, temperature=0.8, top_p=0.9, logprobs=MAX_LOGPROBS, presence_penalty=0.5
    )
    ask(engine, limits, 2, sampled)


def main(model: str, settings: dict[str, Any], *, computes: bool = True) -> None:
    engine = load_llm_engine(
        EngineConfig(model=model, **settings),
        eos_token_ids=(),
        metadata=None,
        on_progress=lambda stage, done, total: None,
    )
    info, loaded = engine.info, resident_bytes()
    fill(engine)
    filled = resident_bytes()
    if computes:
        compute(engine)
    parts = {
        "weights": info.weight_bytes,
        "kv_cache": info.kv_bytes,
        "workspace": info.workspace_bytes,
        "process": info.process_bytes,
    }
    found = {"parts": parts, "loaded": loaded, "filled": filled, "full": resident_bytes()}
    found["of"] = info.memory_bytes
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), computes="--idle" not in sys.argv)
