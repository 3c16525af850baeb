"""Measure the memory, accuracy and speed of GGUF files held in their own types.

    scripts/benchmark cpu_held_types            # bytes and divergence alone: a loaded box will do
    scripts/benchmark cpu_held_types --repeats 3 --peer FOLDER  # and speed beside llama.cpp
    scripts/benchmark cpu_held_types --model a.gguf b.gguf --types --text-tokens 4000

Each type is that of all matrices of a random model with the widths of Llama 3.2 1B and a few of its
layers; files of trained models come beside it. The divergence is that of the library's predictions
from float32 arithmetic on the same weights, with the same random words in a random model and with
the text of `cpu_quality` in a trained one. FOLDER has the package xllamacpp; see `cpu_experts`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.gguf import read_header
from appliance.kernels.backend import select_backend
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.kv_format import KVFormat
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
from bench.lib.synthetic_gguf import write_model

if TYPE_CHECKING:
    import argparse

TYPES = ("Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
VOCABULARY = 32_000
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


def closeness(path: Path, windows: list[torch.Tensor]) -> dict[str, Any]:
    """Compare the library's predictions with exact ones."""
    source = open_model(path)
    base = load_decoder(source, select_backend(CPU, "reference"), CPU, torch.float32)
    engine = NativeEngine(load_library(), torch.get_num_threads())
    candidate = load_native(source, engine, torch.bfloat16)
    measured = Measured()
    for window in windows:
        ids = window.tolist()
        exact = run(base, ids, KVFormat.FP32, len(ids))
        measured.add(exact, run(candidate, ids, KVFormat.BF16, len(ids)), window)
    return figures_of(measured.divergence)


def held(path: Path, options: argparse.Namespace, windows: list[torch.Tensor]) -> dict[str, Any]:
    """Measure one file."""
    stored = sum(info.nbytes for info in read_header(path).tensors.values())
    threads = torch.get_num_threads()
    decoder = load_native(open_model(path), NativeEngine(load_library(), threads), torch.bfloat16)
    found: dict[str, Any] = {
        "model": path.stem,
        "weights": decoder.weight_format,
        "file_bytes": stored,
        "held_bytes": decoder.weight_bytes,
        "closeness": closeness(path, windows),
    }
    del decoder
    if options.repeats:
        found["speed"] = measure(path, options)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, nargs="*", default=[], help="trained GGUF files")
    parser.add_argument("--types", nargs="*", choices=TYPES, default=TYPES)
    parser.add_argument("--layers", type=int, default=4, help="of a random model")
    parser.add_argument("--text-tokens", type=int, default=1024)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--random-tokens", type=int, default=64, help="of a random model")
    parser.add_argument("--repeats", type=int, default=0, help="of the speed; 0: it is left out")
    parser.add_argument("--peer", type=Path, help="folder with the package xllamacpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="of decode, in the speed")
    parser.add_argument("--prefill-tokens", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for path in options.model:
        text = HeldOutText(None, options.text_tokens, options.window)
        windows = text.windows_of(Tokenizer.from_path(path))
        rows.append(held(path, options, list(windows.tokens)))
    random = torch.Generator().manual_seed(0)
    words = torch.randint(300, VOCABULARY, (options.random_tokens,), generator=random)
    shape = WIDTHS | {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.types:
            path = Path(folder) / f"random-{kind}.gguf"
            write_model(path, shape, kind)
            rows.append(held(path, options, [words]))
            path.unlink()
    write_result(
        options.out,
        {
            "benchmark": "cpu_held_types",
            "conditions": conditions(),
            "threads": options.threads,
            "layers": options.layers,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
