"""A program that runs a model to write rows of tokens and prints them; see `calibration`.

It exits if its parent does, or if it exceeds its memory limit.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from appliance.errors import ApplianceError, MemoryPlanError

if TYPE_CHECKING:
    from appliance.model.source import ModelSource
    from appliance.tokenizer import Tokenizer

AT_ONCE = 32  # rows sampled together; another number changes rounding
DRAWS = 256  # most tries for a word; of large vocabularies one in three is one
SHORTEST_WORD = 3  # letters of a row's first token
WATCHED_EVERY = 0.02  # seconds
BLOCK_TOKENS = 32  # cache slots allocated at once, on any device
MIB = 1 << 20


def first_words(tokenizer: Tokenizer, count: int, seed: int) -> list[int]:
    """Draw random tokens that are words of letters; any tokens of a vocabulary with few words."""
    chosen = random.Random(seed)
    found: list[int] = []
    for _ in range(DRAWS * count):
        if len(found) == count:
            break
        token_id = chosen.randrange(tokenizer.vocab_size)
        word = tokenizer.decode([token_id]).strip()
        if len(word) >= SHORTEST_WORD and word.isascii() and word.isalpha():
            found.append(token_id)
    return found + [chosen.randrange(tokenizer.vocab_size) for _ in range(count - len(found))]


def sample_here(
    model_path: str, device: str, count: int, row_tokens: int, seed: int
) -> list[list[int]]:
    """Sample rows in this process."""
    from appliance.engine.nouns.sampling_params import SamplingParams
    from appliance.llm import LLM
    from appliance.model.source import open_model

    llm = LLM(
        model_path,
        max_model_len=row_tokens,
        max_num_seqs=AT_ONCE,
        device=device,
        kv_cache_dtype="bf16",
        kv_cache_memory=_cache_bytes(open_model(Path(model_path)), count, row_tokens),
    )
    start = llm.tokenizer.encode("", add_special_tokens=True)
    prompts = [[*start, word] for word in first_words(llm.tokenizer, count, seed)]
    length = row_tokens - len(start) - 1
    sampling = [
        SamplingParams(max_tokens=length, seed=seed * count + row, ignore_eos=True)
        for row in range(count)
    ]
    answers = llm.generate(prompts, sampling, progress=False)
    return [
        [*prompt, *answer.outputs[0].token_ids]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _cache_bytes(source: ModelSource, count: int, row_tokens: int) -> int:
    """Return the bytes of a KV cache that holds all rows sampled together."""
    from appliance.model.executor import heads_of

    slots = -(-row_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    elements = sum(2 * num_kv_heads * head_dim for num_kv_heads, head_dim in heads_of(source.spec))
    return min(count, AT_ONCE) * slots * elements * 2


def _check_fits(model_path: str, count: int, row_tokens: int, max_bytes: int) -> None:
    """Raise MemoryPlanError, before reading weights, if a model and its cache do not fit."""
    import torch

    from appliance.model.size import estimate_native_bytes
    from appliance.model.source import open_model

    source = open_model(Path(model_path))
    weights = estimate_native_bytes(source, torch.bfloat16)
    cache = _cache_bytes(source, count, row_tokens)
    needed = psutil.Process().memory_info().rss + weights + cache
    if needed > max_bytes:
        raise MemoryPlanError(_too_much(f"at least {needed / MIB:,.0f}", max_bytes))


def _too_much(needed: str, max_bytes: int) -> str:
    return (
        f"running it takes {needed} MiB of memory, and --max-ram leaves"
        f" {max_bytes / MIB:,.0f} MiB for that"
    )


def _watch(max_bytes: int) -> None:
    """Exit if the parent is gone or the memory limit is exceeded."""
    process = psutil.Process()
    while not select.select([0], [], [], WATCHED_EVERY)[0]:
        if max_bytes and process.memory_info().rss > max_bytes:
            message = _too_much(f"more than {max_bytes / MIB:,.0f}", max_bytes)
            os.write(2, f"\n{message}\n".encode())
            break
    os._exit(1)  # the main thread may be within a step


def _main() -> None:
    path, device, *numbers = sys.argv[1:]
    count, row_tokens, seed, max_bytes = map(int, numbers)
    threading.Thread(target=_watch, args=(max_bytes,), daemon=True).start()
    try:
        if max_bytes:
            _check_fits(path, count, row_tokens, max_bytes)
        rows = sample_here(path, device, count, row_tokens, seed)
        from appliance.quant.run.memory import peak_ram
    except ApplianceError as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps({"rows": rows, "peak_ram": peak_ram()}) + "\n")


if __name__ == "__main__":
    _main()
