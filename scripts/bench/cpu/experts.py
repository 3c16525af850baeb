"""Time experts of Qwen3-30B-A3B's or Qwen3.6's shape beside llama.cpp, on the same random GGUF.

    scripts/benchmark cpu_experts --layers 4 --threads 1
    scripts/benchmark cpu_experts --shape qwen3.6-35b-a3b
    scripts/benchmark cpu_experts --peer FOLDER  # where the package xllamacpp is installed
    scripts/benchmark cpu_experts --peer FOLDER --layers 34 --apart  # 12 GiB of weights

The two take turns, or with `--apart` one is measured after the other has left the memory: decode of
one stream and of several, then the prefill of one prompt. llama.cpp's numbers are timings by its
own server; ours time the library's whole steps, without HTTP and sampling. The peer is built for
AVX2; `--isa avx2` keeps ours to that. Threads that wait for each other suffer from other programs:
look at the load that the result names. The bytes of weights that a token's step reads are counted
from the file, without those of experts that it does not choose.
"""

from __future__ import annotations

import gc
import math
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library, select_isa
from appliance.model.native_loader import load_native
from appliance.model.source import open_model
from appliance.model.tensors import Role
from bench.cpu.models import decode_seconds, prefill_seconds
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.llama_peer import Peer
from bench.lib.model_shapes import (
    QWEN_30B_A3B,
    QWEN_36_35B_A3B,
    TINY_QWEN_30B_A3B,
    TINY_QWEN_36_35B_A3B,
)
from bench.lib.synthetic_gguf import write_model

if TYPE_CHECKING:
    import argparse

    from appliance.model.native import NativeDecoder
    from appliance.model.source import ModelSource

SHAPES = {
    "qwen3-30b-a3b": QWEN_30B_A3B,
    "qwen3.6-35b-a3b": QWEN_36_35B_A3B,
    "tiny-qwen3-30b-a3b": TINY_QWEN_30B_A3B,
    "tiny-qwen3.6-35b-a3b": TINY_QWEN_36_35B_A3B,
}


def bytes_of_a_token(source: ModelSource) -> dict[str, int]:
    """Count the bytes of weights that a step of one token reads, and those of all weights.

    Of the embedding it reads one row.
    """
    router = source.spec.router
    assert router is not None
    read = whole = 0.0
    for slot in source.slots():
        bits = source.weights.packed_bits(slot.name)
        # Blocks of 32 codes have a scale of 16 bits; what is not packed is float32.
        size = math.prod(slot.shape) * (4 if bits is None else bits / 8 + 2 / 32)
        whole += size
        if slot.role is Role.EMBEDDING:
            size /= slot.shape[0]
        share = 1 if slot.expert is None else router.top_k / router.num_experts
        read += size * share
    return {"weight_bytes_of_a_token": round(read), "weight_bytes_of_all": round(whole)}


def ours(decoder: NativeDecoder, options: argparse.Namespace) -> dict[str, float]:
    """Measure tokens per second of decode by streams, and of the prefill."""
    context, found = options.prompt_tokens, {}
    for streams in options.streams:
        seconds = decode_seconds(decoder, KVFormat.BF16, streams, context, options.tokens)
        found[f"decode_{streams}"] = streams * len(seconds) / sum(seconds)
    seconds = prefill_seconds(decoder, KVFormat.BF16, options.prefill_tokens, 1)
    found["prefill"] = options.prefill_tokens * len(seconds) / sum(seconds)
    return found


def asked(prompt: int, tokens: int, streams: int) -> dict[str, Any]:
    return {"prompt": list(range(prompt)), "tokens": tokens, "streams": streams}


def theirs(peer: Peer, options: argparse.Namespace) -> dict[str, float]:
    """Measure the same of llama.cpp."""
    found = {}
    for streams in options.streams:
        timings = peer.ask(asked(options.prompt_tokens, options.tokens, streams))
        found[f"decode_{streams}"] = sum(each["predicted_per_second"] for each in timings)
    (timing,) = peer.ask(asked(options.prefill_tokens, 1, 1))
    found["prefill"] = timing["prompt_per_second"]
    return found


def measure(model: Path, options: argparse.Namespace, *, is_apart: bool = False) -> dict[str, Any]:
    library = load_library()
    isa = select_isa(library, options.isa)
    decoder = load_native(open_model(model), NativeEngine(library, options.threads), torch.bfloat16)
    result: dict[str, Any] = {
        "isa": isa.name.lower(),
        "weights": decoder.weight_format,
        "weight_bytes": decoder.weight_bytes,
    }
    peer = None
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "llama.cpp": []}
    load = []

    def started() -> Peer:
        return Peer(options.peer, model, options.threads, max(options.streams))

    if options.peer is not None and not is_apart:
        peer = started()
    for _ in range(options.repeats):
        load.append(round(os.getloadavg()[0], 2))
        runs["ours"].append(ours(decoder, options))
        if peer is not None:
            runs["llama.cpp"].append(theirs(peer, options))
    if options.peer is not None and is_apart:
        del decoder
        gc.collect()
        peer = started()
        runs["llama.cpp"] = [theirs(peer, options) for _ in range(options.repeats)]
    result |= {"load": load, "runs": runs}
    if peer is not None:
        result |= {"peer": peer.about, "ratios": ratios(runs)}
        peer.close()
    return result


def ratios(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return our rate over llama.cpp's right after it, turn by turn."""
    pairs = list(zip(runs["ours"], runs["llama.cpp"], strict=True))
    found = {}
    for name in pairs[0][0]:
        each = [mine[name] / other[name] for mine, other in pairs]
        found[name] = {"median": round(median(each), 2), "least": round(min(each), 2)}
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--peer", type=Path, help="folder with the package xllamacpp")
    parser.add_argument("--apart", action="store_true", help="never both in memory")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="auto")
    options = parser.parse_args()
    shape = SHAPES[options.shape] | {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "experts.gguf"
        write_model(model, shape)
        found = measure(model, options, is_apart=options.apart)
        found |= bytes_of_a_token(open_model(model))
    result = {
        "benchmark": "cpu_experts",
        "conditions": conditions(),
        "threads": options.threads,
        "shape": shape,
        "prompt_tokens": options.prompt_tokens,
        "prefill_tokens": options.prefill_tokens,
        **found,
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
