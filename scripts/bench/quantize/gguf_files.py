"""Compare llama.cpp's perplexity of the GGUF files that `quantize` writes with ours.

    scripts/benchmark quantize_gguf --peer FOLDER  # the packaged model in seven types
    scripts/benchmark quantize_gguf --peer FOLDER --model gemma.gguf --method awq+gptq

Both read the same file and the same windows of a text that calibration leaves out, and score every
token of a window but its first. Ours is that of `appliance evaluate`, in float32; llama.cpp rounds
activations to 8 bits. FOLDER has the package xllamacpp.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from appliance.config import cache_dir
from appliance.gguf import read_header
from appliance.hub import resolve_model
from appliance.model.source import open_model
from appliance.quant.gguf.mixes import MIXES
from appliance.quant.quality.make_card import evaluate
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText
from appliance.quant.text.held_out import HeldOutText
from appliance.tokenizer import Tokenizer
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.llama_functions import BATCH, losses_of

USUAL = ["Q4_0", "Q4_K_M", "IQ4_XS", "Q3_K_M", "Q5_K_M", "Q6_K", "Q8_0"]

if TYPE_CHECKING:
    from appliance.quant.text.held_out import Windows


def compare(file: Path, windows: Windows, peer: Path, threads: int) -> dict[str, Any]:
    """Return both perplexities, and how much single tokens' losses differ."""
    ours = evaluate(open_model(file), windows).candidate.values.numpy()
    theirs = np.array(losses_of(peer, file, windows.tokens.tolist(), threads)).reshape(-1)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return {
        "tokens": len(ours),
        "perplexity": round(math.exp(ours.mean()), 4),
        "llama_cpp_perplexity": round(math.exp(theirs.mean()), 4),
        "off_percent": round(100 * math.expm1(theirs.mean() - ours.mean()), 3),
        "standard_error_percent": round(100 * (theirs - ours).std() / len(ours) ** 0.5, 3),
        "mean_loss_off": round(float(np.abs(theirs - ours).mean()), 5),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--peer", type=Path, required=True, help="folder with xllamacpp")
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--types", nargs="+", choices=MIXES, default=USUAL)
    parser.add_argument("--method", type=Method.parse, default=Method.RTN)
    parser.add_argument("--text", type=Path, help="default: help topics, held out")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=BATCH)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = resolve_model(options.model, cache_dir=cache_dir()).path
    held_out = HeldOutText(options.text, options.tokens, options.window)
    windows = held_out.windows_of(Tokenizer.from_path(model))
    rows = []
    for name in options.types:
        chosen = QuantizeOptions.of_type(
            name,
            method=options.method,
            text=CalibrationText() if options.method.needs_text else None,
        )
        with tempfile.TemporaryDirectory(prefix="bench-quantize-") as folder:
            file = quantize_model(model, Path(folder) / name, chosen).out
            types = Counter(info.type.name for info in read_header(file).tensors.values())
            row = compare(file, windows, options.peer, options.threads)
        rows.append({"type": name, "types": dict(types), **row})
        print(rows[-1], file=sys.stderr)
    result = {
        "benchmark": "quantize_gguf",
        "conditions": conditions(),
        "model": model.stem,
        "method": options.method.value,
        "text": windows.source,
        "fingerprint": windows.fingerprint,
        "windows": len(windows.tokens),
        "window": options.window,
        "rows": rows,
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
