"""Compare our GPTQ and AWQ with llm-compressor's: same weights, calibration rows and text.

    scripts/benchmark quantize_peers --peer-python ENV/bin/python --text prose.txt

The model is written as a bfloat16 folder that both read. llm-compressor has to have an environment
of its own, as it pins transformers: python -m venv ENV && ENV/bin/pip install
"llmcompressor==0.14.0.1" "torch==2.13.0". Without --peer-python only our rows are measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from appliance.config import cache_dir
from appliance.hub import resolve_model
from appliance.model.source import open_model
from appliance.model_files.checkpoint import write_safetensors
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.run.tokenizer_files import write_tokenizer_files
from appliance.quant.text.calibration import Calibration, CalibrationText
from appliance.quant.text.held_out import HeldOutText
from appliance.tokenizer import Tokenizer
from bench.lib.closeness import compare
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

SCRIPT = Path(__file__).parent / "llmcompressor.py"
METHODS = ("gptq", "awq")


@dataclass(frozen=True, slots=True)
class GivenRows(CalibrationText):
    """Calibration rows that exist already."""

    given: Calibration | None = None

    def rows_of(
        self, model_path: Path, *, device: str = "cpu", max_ram: int | None = None
    ) -> Calibration:
        assert self.given is not None
        return self.given


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--peer-python", type=Path, help="of an environment with llmcompressor")
    parser.add_argument("--text", type=Path, help="default: help topics, held out")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--symmetry", nargs="+", choices=("sym", "asym"), default=["sym", "asym"])
    options = parser.parse_args()
    model = resolve_model(options.model, cache_dir=cache_dir()).path
    result: dict[str, Any] = {
        "benchmark": "quantize_peers",
        "conditions": conditions(),
        "model": model.stem,
        "rows": {},
    }
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        dense = Path(folder) / "dense"
        write_dense(model, dense)
        rows = CalibrationText(num_tokens=options.calibration_tokens).rows_of(dense)
        result["calibration"] = str(rows)
        (Path(folder) / "rows.json").write_text(json.dumps(rows.rows.tolist()))
        held_out = HeldOutText(options.text, options.tokens, options.window)
        windows = held_out.windows_of(Tokenizer.from_path(dense))
        result |= {"text": windows.source, "fingerprint": windows.fingerprint}
        base = open_model(dense)
        for method in options.methods:
            for symmetry in options.symmetry:
                name = f"{method} 4 bits g64 {symmetry}"
                ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
                found = {"appliance": _ours(dense, ours, rows, method, symmetry)}
                found["appliance"] |= compare(base, ours, windows)
                if options.peer_python is not None:
                    arguments = [dense, Path(folder) / "rows.json", theirs, method, symmetry]
                    command = [options.peer_python, SCRIPT, *arguments]
                    found["llm-compressor"] = _theirs([str(part) for part in command])
                    found["llm-compressor"] |= compare(base, theirs, windows)
                print(name, found, file=sys.stderr)
                result["rows"][name] = found
                write_result(options.out, result, quiet=True)
    write_result(options.out, result)


def write_dense(model: Path, folder: Path) -> None:
    """Write a model as a folder of bfloat16 weights that transformers reads."""
    source = open_model(model)
    folder.mkdir()
    tensors = {}
    for slot in source.slots():
        weight = source.weights.load(slot.name)
        full = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
        tensors[slot.name] = full.to(torch.bfloat16)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    config = source.config | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer_files(model, folder)


def _ours(dense: Path, out: Path, rows: Calibration, method: str, symmetry: str) -> dict[str, Any]:
    scheme = WeightScheme(4, 64, symmetric=symmetry == "sym")
    text = GivenRows(given=rows)
    started = time.process_time()
    options = QuantizeOptions(scheme, Method.parse(method), text, overwrite=True)
    quantize_model(dense, out, options)
    return {"cpu_seconds": round(time.process_time() - started, 1)}


def _theirs(command: list[str]) -> dict[str, Any]:
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        raise SystemExit(child.stderr[-4000:])
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found
