"""Measure the memory, accuracy and speed of GGUF files held in their own types.

    scripts/benchmark cpu_held_types --peer FOLDER              # the packaged model in each type
    scripts/benchmark cpu_held_types --peer FOLDER --random 16  # random weights of a 1B's shape
    scripts/benchmark cpu_held_types --random 2 --repeats 0     # no times, for a busy machine
    scripts/benchmark cpu_held_types --model a.gguf --types --peer FOLDER  # a file as it is

For the trained model, llama.cpp quantizes a file of any types to each type, and the two take turns
on the result. The random model has the widths of Llama 3.2 1B, all 16 of its layers or fewer, and a
smaller vocabulary. Matrices have the types that llama.cpp would give them, narrower ones if their
rows are not a multiple of a super-block of 256. The divergence is that of the library's predictions
from float32 arithmetic on the same weights, on the text of `cpu_quality`, or on random words in a
random model. `read_gb_per_second` is torch's read bandwidth just before, which limits one stream.
FOLDER has the package xllamacpp; see `cpu_experts`.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.bench.bandwidth import probe
from appliance.config import cache_dir
from appliance.gguf import read_header
from appliance.hub import resolve_model
from appliance.kernels.backend import select_backend
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library, select_isa
from appliance.model.loader import load_decoder
from appliance.model.native_loader import load_native
from appliance.model.source import open_model
from appliance.quant.text.held_out import HeldOutText
from appliance.tokenizer import Tokenizer
from bench.cpu.experts import measure
from bench.cpu.quality import CPU, Measured, run
from bench.lib.closeness import figures_of
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.gguf_types import type_in, write_in_types
from bench.lib.synthetic_gguf import write_model

if TYPE_CHECKING:
    import argparse

    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource

TYPES = ("Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS", "Q8_0", "MXFP4")
MORE_TYPES = ("Q4_0", "Q2_K", "Q3_K", "IQ4_NL")  # of random models
VOCABULARY = 32_000
# https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
WIDTHS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": True,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}


def closeness(
    source: ModelSource, candidate: Executor[Any], windows: list[torch.Tensor]
) -> dict[str, Any]:
    """Compare the library's predictions with exact ones."""
    base = load_decoder(source, select_backend(CPU, "reference"), CPU, torch.float32)
    measured = Measured()
    for window in windows:
        ids = window.tolist()
        exact = run(base, ids, KVFormat.FP32, len(ids))
        measured.add(exact, run(candidate, ids, KVFormat.BF16, len(ids)), window)
    return figures_of(measured.divergence)


def held(path: Path, options: argparse.Namespace, windows: list[torch.Tensor]) -> dict[str, Any]:
    """Measure one file."""
    stored = sum(info.nbytes for info in read_header(path).tensors.values())
    library, source = load_library(), open_model(path)
    isa = select_isa(library, options.isa)
    decoder = load_native(source, NativeEngine(library, options.threads), torch.bfloat16)
    found: dict[str, Any] = {
        "weights": decoder.weight_format,
        "isa": isa.name.lower(),
        "file_bytes": stored,
        "held_bytes": decoder.weight_bytes,
        "closeness": closeness(source, decoder, windows),
    }
    del decoder
    if options.repeats:
        found["read_gb_per_second"] = probe([options.threads])[0]["read_gb_per_second"]
        found["speed"] = measure(path, options)
    return found


def trained(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure files of trained models: each as it is, or in each of the types."""
    rows = []
    for path in options.model or [resolve_model("", cache_dir=cache_dir()).path]:
        text = HeldOutText(None, options.text_tokens, options.window)
        windows = list(text.windows_of(Tokenizer.from_path(path)).tokens)
        if not options.types:
            rows.append({"model": path.stem} | held(path, options, windows))
        for kind in options.types:
            file = (options.files or folder) / f"{path.stem}-{kind}.gguf"
            if not file.exists():
                partial_file = file.with_suffix(".partial")
                write_in_types(path, partial_file, kind, options.peer, options.threads)
                partial_file.rename(file)
            row = held(file, options, windows)
            rows.append({"model": path.stem, "type": kind} | row)
            print(rows[-1], file=sys.stderr)
    return rows


def random_models(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure a random model in each of the types."""
    chance = torch.Generator().manual_seed(0)
    words = torch.randint(300, VOCABULARY, (options.random_tokens,), generator=chance)
    rows = []
    for kind in options.types:
        file = folder / f"{kind}.gguf"
        shape = WIDTHS | {"num_hidden_layers": options.random}
        write_model(file, shape, partial(type_in, kind, num_layers=options.random))
        rows.append({"model": "random", "type": kind} | held(file, options, [words]))
        print(rows[-1], file=sys.stderr)
        file.unlink()
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, nargs="+", help="default: the packaged model")
    parser.add_argument("--files", type=Path, help="folder that keeps a trained model's files")
    parser.add_argument("--random", type=int, metavar="LAYERS", help="a random model instead")
    parser.add_argument("--types", nargs="*", choices=(*TYPES, *MORE_TYPES), default=TYPES)
    parser.add_argument("--text-tokens", type=int, default=1024)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--random-tokens", type=int, default=64, help="of a random model")
    parser.add_argument("--repeats", type=int, default=3, help="of the speed; 0: it is left out")
    parser.add_argument("--peer", type=Path, help="folder with the package xllamacpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="of decode, in the speed")
    parser.add_argument("--prefill-tokens", type=int, default=512)
    options = parser.parse_args()
    if options.random is None and options.peer is None and options.types:
        parser.error("llama.cpp chooses the codes of a trained model: give its folder by --peer")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="bench-held-") as name:
        folder = Path(name)
        rows = random_models(options, folder) if options.random else trained(options, folder)
    result = {
        "benchmark": "cpu_held_types",
        "conditions": conditions(),
        "threads": options.threads,
        "layers": options.random,
        "rows": rows,
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
