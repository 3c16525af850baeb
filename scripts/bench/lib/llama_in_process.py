"""llama.cpp as its own process, asked for timings through a pipe: a line of JSON each way.

`python llama_in_process.py MODEL THREADS SLOTS [SETTINGS]` needs the package xllamacpp on its path.
SETTINGS are JSON: `drafts` names a kind of speculation, `adapters` lists GGUF files, which requests
choose by their number. A request is {"prompt": [token ids], "tokens": count, "streams": count}; the
answer holds the timings that the server took itself, one set for each stream. Or it is
{"bodies": [...]} of completions, and the answer holds theirs.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import repeat
from typing import Any


def serve(model: str, threads: int, slots: int, settings: dict[str, Any]) -> None:
    """Load, say what the build is, then answer each line."""
    xllamacpp: Any = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_parallel, params.n_ctx = slots, 1024 * slots
    params.n_gpu_layers, params.verbosity = 0, 0
    if drafts := settings.get("drafts"):
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{drafts}")]
    params.lora_init_without_apply = True
    params.lora_adapters = [loaded(path) for path in settings.get("adapters", ())]
    server = xllamacpp.Server(params)
    say({"build": str(xllamacpp.BUILD_INFO), "system": xllamacpp.get_system_info()})
    for line in sys.stdin:
        asked = json.loads(line)
        if "bodies" in asked:
            with ThreadPoolExecutor(slots) as pool:
                say(list(pool.map(complete, repeat(server), asked["bodies"])))
            continue
        with ThreadPoolExecutor(asked["streams"]) as pool:
            say(list(pool.map(answer, repeat(server), repeat(asked), range(asked["streams"]))))


def loaded(path: str) -> Any:
    """Return what makes the server load an adapter."""
    adapter = import_module("xllamacpp").CommonAdapterLoraInfo()
    adapter.path, adapter.scale = path, 1.0
    return adapter


def answer(server: Any, asked: dict[str, Any], number: int) -> dict[str, Any]:
    """Generate for one stream; the prompts of different streams share no prefix."""
    prompt = [3 + (token + 17 * number) % 30_000 for token in asked["prompt"]]
    body = {
        "prompt": prompt,
        "n_predict": asked["tokens"],
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    timings: dict[str, Any] = complete(server, body)["timings"]
    return timings


def complete(server: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Answer one request; an error is an answer as well."""
    try:
        found: Any = server.handle_completions(body)
    except RuntimeError as error:
        return {"error": str(error)}
    answered: dict[str, Any] = json.loads(found) if isinstance(found, str) else found
    return answered


def say(value: object) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    given = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), given)
