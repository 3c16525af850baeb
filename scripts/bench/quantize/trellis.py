"""Measure what each step of `--method trellis` gains, with one text and one estimator.

    scripts/benchmark quantize_trellis --text news.txt --calibration prose.txt
    scripts/benchmark quantize_trellis --text news.txt --calibration prose.txt --bits --mixed 2.1

The model is written in 16 bits with its channels in another order, which hides the grid of a
packed base, and quantized by layer in this process. Errors are of the mean over windows.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from appliance.config import cache_dir
from appliance.hub import resolve_model
from appliance.kernels.weights.trellis import BITS
from appliance.model.source import open_model
from appliance.model_files.checkpoint import write_safetensors
from appliance.quant.formats.scheme import TrellisScheme
from appliance.quant.methods.calibrated import quantize_layers
from appliance.quant.methods.mixed import choose_precisions
from appliance.quant.methods.trellis import TRUST
from appliance.quant.quality.make_card import EvaluationOptions, evaluate
from appliance.quant.run.options import Method
from appliance.quant.text.calibration import CalibrationText
from appliance.quant.text.held_out import HeldOutText
from appliance.quant.walk.slopes import kept_mean_squares
from appliance.quant.walk.walk import Walk
from appliance.tokenizer import Tokenizer
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.quantize.peers import write_dense

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model.source import ModelSource
    from appliance.quant.text.held_out import Windows

CPU = torch.device("cpu")
STEPS = ("outputs alike", "by their scales", "by slopes")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--bits", type=int, nargs="*", choices=BITS, default=[2, 3, 4])
    parser.add_argument("--mixed", type=float, nargs="*", default=[])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = resolve_model(options.model, cache_dir=cache_dir()).path
    result: dict[str, Any] = {
        "benchmark": "quantize_trellis",
        "conditions": conditions(),
        "model": model.stem,
        "rows": [],
    }
    with tempfile.TemporaryDirectory(prefix="bench-trellis-") as folder:
        base = Path(folder) / "base"
        write_shuffled(model, base)
        rows = CalibrationText(options.calibration, options.calibration_tokens).rows_of(base)
        held_out = HeldOutText(options.text, options.tokens, options.window)
        windows = held_out.windows_of(Tokenizer.from_path(base))
        result |= {"calibration": str(rows), "text": windows.source, "window": options.window}
        bench = Bench(open_model(base), rows.rows, windows, Path(folder))
        for step in options.steps:
            for size in (*options.bits, *options.mixed):
                result["rows"].append(bench.row(step, size))
                print(result["rows"][-1], file=sys.stderr)
                write_result(options.out, result, quiet=True)
    write_result(options.out, result)


class Bench:
    """A model, the text it is quantized by and the text it is measured on."""

    def __init__(self, source: ModelSource, rows: Tensor, windows: Windows, folder: Path) -> None:
        self.source = source
        self.rows = rows
        self.windows = windows
        self.folder = folder

    def row(self, step: str, size: float) -> dict[str, Any]:
        """Quantize by some steps, to bits or (not whole) mixed bits; measure."""
        names = [slot.name for slot in self.source.slots() if slot.is_linear]
        started = time.process_time()
        if size == int(size):
            schemes: Any = dict.fromkeys(names, TrellisScheme(int(size)))
        else:
            schemes = choose_precisions(
                self.source, self.rows, TrellisScheme(), size, torch.bfloat16
            )
        chosen = time.process_time()
        matters = self.matters(step)
        measured = time.process_time()
        weights = self.quantized(schemes, matters)
        done = time.process_time()
        bits = sum(weight.nbytes for weight in weights.values()) * 8
        count = sum(weight.shape[0] * weight.shape[1] for weight in weights.values())
        found = self.compared(weights)
        return {
            "step": step,
            "size": size,
            "bits_per_weight": round(bits / count, 3),
            "cpu_seconds": {
                "precisions": round(chosen - started, 1),
                "slopes": round(measured - chosen, 1),
                "layers": round(done - measured, 1),
            },
            **found,
        }

    def matters(self, step: str) -> Mapping[str, Tensor]:
        if step == "by slopes":
            with tempfile.TemporaryDirectory(dir=self.folder) as state:
                return kept_mean_squares(self.source, self.rows, Path(state), CPU)
        if step == "by their scales":
            return {}
        weights = self.source.weights
        loaded = {
            slot.name: weights.load(slot.name) for slot in self.source.slots() if slot.is_linear
        }
        return {
            name: weight.float().square().mean(1).clamp_min(1e-20) ** (-1 / TRUST)
            for name, weight in loaded.items()
            if isinstance(weight, torch.Tensor)
        }

    def quantized(self, schemes: Any, matters: Mapping[str, Tensor]) -> dict[str, Any]:
        kept: dict[str, Any] = {}

        def keep(name: str, value: Weight) -> None:
            if not isinstance(value, torch.Tensor):
                kept[name] = value

        with tempfile.TemporaryDirectory(dir=self.folder) as work:
            walk = Walk(self.source, self.rows, Path(work), CPU)
            for _ in quantize_layers(
                self.source, walk, Method.TRELLIS, schemes, torch.bfloat16, keep, matters=matters
            ):
                pass
        return kept

    def compared(self, weights: Mapping[str, Any]) -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            tensors = load_file(self.source.path / "model.safetensors")
            tensors |= {name: weight.dequantize() for name, weight in weights.items()}
            for file in self.source.path.glob("*.json"):
                (Path(folder) / file.name).write_bytes(file.read_bytes())
            write_safetensors(Path(folder) / "model.safetensors", tensors, {"format": "pt"})
            against = EvaluationOptions(base=self.source, rounded=False)
            found = evaluate(open_model(Path(folder)), self.windows, against).against
        assert found is not None
        summary = found.summary()
        by_window = found.klds.view(len(self.windows.tokens), -1).mean(1)
        return {
            "kld_mean": round(summary.kld_mean.value, 5),
            "kld_error": round(float(by_window.std()) / len(by_window) ** 0.5, 5),
            "kld_by_window": [round(value, 5) for value in by_window.tolist()],
            "same_top_1_percent": round(summary.same_top_percent.value, 2),
            "perplexity_ratio": round(summary.perplexity_ratio.value, 4),
        }


def write_shuffled(model: Path, folder: Path) -> None:
    """Write a model in 16 bits with the channels of its stream and its MLPs in another order."""
    write_dense(model, folder)
    config = json.loads((folder / "config.json").read_text())
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    tensors = load_file(folder / "model.safetensors")
    drawn = torch.Generator().manual_seed(1)
    stream = torch.randperm(hidden, generator=drawn)
    orders: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "mlp." in name:
            layer = name.partition("mlp.")[0]
            order = orders.setdefault(layer, torch.randperm(middle, generator=drawn))
            moved = tensor[stream][:, order] if "down" in name else tensor[order][:, stream]
        elif name.endswith("o_proj.weight"):
            moved = tensor[stream]
        elif tensor.shape[-1] == hidden:
            moved = tensor[..., stream]
        else:
            moved = tensor
        tensors[name] = moved.contiguous()
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})


if __name__ == "__main__":
    main()
