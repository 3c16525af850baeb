"""Measure the divergence of each KV cache from one of float32, with float32 weights.

    scripts/benchmark kv_quality --model smollm2.gguf  # Python's help topics
    scripts/benchmark kv_quality --text prose.txt --tokens 2048 --windows 512 --only fp8 int8

Everything but the cache is float32, and packed weights are dequantized, so that the figures are
those of the cache alone. Caches are measured bare (FP8 with the scale 1), and with the scales and
means that `appliance quantize --kv-bits` finds on its own help topics, which are not those read
here.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.config import cache_dir
from appliance.hub import resolve_model
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.model.executor import heads_of
from appliance.model.source import open_model
from appliance.quant.kv.calibrate import measure_kv
from appliance.quant.kv.even_keys import with_even_keys
from appliance.quant.quality.kv_caches import NAMES, bytes_per_token
from appliance.quant.quality.make_card import EvaluationOptions, evaluate
from appliance.quant.text.documents import default_documents
from appliance.quant.text.held_out import SEPARATOR, HeldOutText
from appliance.tokenizer import Tokenizer
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.quant.kv.calibrate import MeasuredLayer
    from appliance.quant.quality.kv_caches import Caches
    from appliance.quant.quality.measures import Divergence

CPU = torch.device("cpu")
ROW = 512
CALIBRATED = ", calibrated"


def calibration_rows(tokenizer: Tokenizer, count: int) -> Tensor:
    """Return (count, ROW) token ids, evenly spread over the topics that calibration takes."""
    text = SEPARATOR.join(text for _, text in default_documents(held_out=False))
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    prefix = tokenizer.encode("", add_special_tokens=True)
    body = ROW - len(prefix)
    starts = [i * (len(ids) - body) // count for i in range(count)]
    return torch.tensor([prefix + ids[start : start + body] for start in starts])


def caches(measured: Sequence[MeasuredLayer], only: Sequence[str]) -> Caches:
    """Return the formats bare and, but for BF16, calibrated."""
    found: Caches = {}
    for form, name in NAMES.items():
        if only and name not in only:
            continue
        found[name] = tuple(LayerPrecision(form) for _ in measured)
        calibrated = tuple(layer.chosen(form).precision() for layer in measured)
        if any(of.key_mean is not None or of.head_scales is not None for of in calibrated):
            found[name + CALIBRATED] = calibrated
    return found


def summary(source: ModelSource, cache: Sequence[LayerPrecision], found: Divergence) -> Any:
    """Return the figures over all places; KLD in nats."""
    comparison = found.summary()
    values = sum(2 * count * width for count, width in heads_of(source.spec))
    return {
        "bits_per_value": round(8 * bytes_per_token(source, cache) / values, 3),
        "layers_with_mean_off": sum(layer.key_mean is not None for layer in cache),
        "tokens": comparison.places,
        "kld_mean": round(comparison.kld_mean.value, 6),
        "kld_mean_standard_error": round(comparison.kld_mean.error, 6),
        "kld_p99": round(comparison.kld_p99, 5),
        "same_top_percent": round(comparison.same_top_percent.value, 2),
        "perplexity_ratio": round(comparison.perplexity_ratio.value, 5),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--text", type=Path, help="default: help topics, held out")
    parser.add_argument("--tokens", type=int, default=4096, help="for each length of windows")
    parser.add_argument("--windows", type=int, nargs="+", default=[224, 512])
    parser.add_argument("--only", nargs="+", default=[], choices=NAMES.values(), help="caches")
    parser.add_argument("--calibration-rows", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = resolve_model(options.model, cache_dir=cache_dir()).path
    source, tokenizer = open_model(path), Tokenizer.from_path(path)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        rows = calibration_rows(tokenizer, options.calibration_rows)
        measured = measure_kv(source, rows, Path(folder), CPU)
    chosen = caches(measured, options.only)
    evened = with_even_keys(source, [layer.chosen(KVFormat.INT8) for layer in measured])
    result: dict[str, Any] = {
        "benchmark": "kv_quality",
        "conditions": conditions(),
        "model": path.stem,
        "weights": "dequantized, float32",
        "calibration": f"{options.calibration_rows} rows of {ROW} tokens",
        "layers_with_factors": sum(layer.key_factors is not None for layer in measured),
        "windows": {},
    }
    for length in options.windows:
        windows = HeldOutText(options.text, options.tokens, length).windows_of(tokenizer)
        print(f"{len(windows.tokens)} windows of {length} tokens", file=sys.stderr)
        # Factors of keys are in the weights of `evened`, which computes the same function.
        bare = {name: of for name, of in chosen.items() if not name.endswith(CALIBRATED)}
        found = evaluate(source, windows, EvaluationOptions(kv=bare))
        rest = evaluate(
            evened, windows, EvaluationOptions(kv={n: chosen[n] for n in chosen.keys() - bare})
        )
        measured_gaps = found.kv | rest.kv
        result["windows"][length] = {
            "text": windows.source,
            "fingerprint": windows.fingerprint,
            "perplexity": round(found.candidate.perplexity().value, 4),
            "perplexity_with_factors": round(rest.candidate.perplexity().value, 4),
            "kv": {name: summary(source, of, measured_gaps[name]) for name, of in chosen.items()},
        }
        write_result(options.out, result, quiet=length != options.windows[-1])
