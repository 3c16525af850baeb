"""Measure quality, time and memory of each way to quantize a model.

    scripts/benchmark quantize --text prose.txt  # every row, the packaged model
    scripts/benchmark quantize --text prose.txt --only gptq awq
    scripts/benchmark quantize --model gemma.gguf --tokens 2048

The model is written in 16 bits with its channels in another order, which hides the grid of a packed
base, or with `--as-stored` taken as it is. Calibration text is made once for all rows. Each row
quantizes in a process of its own, whose CPU seconds and peak memory it has. The result is compared
with the original, both in float32, on windows of a text that calibration leaves out. Errors are
standard errors over windows; rows have the same windows, so that their differences are paired.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from appliance.config import cache_dir
from appliance.hub import resolve_model
from appliance.model.source import open_model
from appliance.quant.methods import gptq
from appliance.quant.run.options import Method, QuantizeOptions, read_asked
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import (
    ROWS_NAME,
    Calibration,
    CalibrationText,
    load_rows,
    save_rows,
)
from appliance.quant.text.held_out import HeldOutText
from appliance.runtime import limit_spinning
from appliance.tokenizer import Tokenizer
from bench.lib.closeness import compare
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.quantize.peers import GivenRows
from bench.quantize.trellis import write_shuffled

Row = dict[str, Any]  # arguments of `read_asked`; head and mixed of the options; doubt of GPTQ
ROWS: dict[str, Row] = {
    "fp8": {"method": "fp8"},
    "fp8 block": {"method": "fp8", "group_size": "block"},
    "int8": {"method": "int8"},
    "int8 g64": {"method": "int8", "group_size": "64"},
    "rtn 4 sym": {"method": "rtn"},
    "rtn 4 asym": {"method": "rtn", "symmetric": False},
    "rtn 4 g32 asym": {"method": "rtn", "group_size": "32", "symmetric": False},
    "rtn 3 asym": {"method": "rtn", "bits": 3, "symmetric": False},
    "awq 4 sym": {"method": "awq"},
    "awq 4 asym": {"method": "awq", "symmetric": False},
    "gptq 4 sym": {"method": "gptq"},
    "gptq 4 asym": {"method": "gptq", "symmetric": False},
    "awq+gptq 4 sym": {"method": "awq+gptq"},
    "awq+gptq 4 asym": {"method": "awq+gptq", "symmetric": False},
    "awq+gptq 3 asym": {"method": "awq+gptq", "bits": 3, "symmetric": False},
    "gptq doubt 0.2 asym": {"method": "gptq", "symmetric": False, "doubt": 0.2},
    "rtn 4 sym, head 8": {"method": "rtn", "head": 8},
    "rtn 4.25 mixed": {"method": "rtn", "mixed": 4.25},
    "awq+gptq 4.25 mixed": {"method": "awq+gptq", "mixed": 4.25},
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--as-stored", action="store_true", help="keep the order of channels")
    parser.add_argument("--text", type=Path, help="default: help topics, held out")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rows whose name holds one of these, in this order"
    )
    parser.add_argument("--calibration", help="default: what the command takes")
    parser.add_argument("--calibration-tokens", type=int)
    parser.add_argument("--rows", type=Path, help="folder that keeps calibration rows for later")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    limit_spinning()  # of the processes that quantize
    torch.set_num_threads(options.threads)
    model = resolve_model(options.model, cache_dir=cache_dir()).path
    names = dict.fromkeys(name for word in options.only for name in ROWS if word in name)
    with tempfile.TemporaryDirectory(prefix="bench-quantize-") as folder:
        base = model if options.as_stored else Path(folder) / "base"
        if not options.as_stored:
            write_shuffled(model, base)
        held_out = HeldOutText(options.text, options.tokens, options.window)
        windows = held_out.windows_of(Tokenizer.from_path(base))
        text = CalibrationText.parse(options.calibration, options.calibration_tokens, seed=0)
        rows = rows_of(text, base, options.rows)
        result: dict[str, Any] = {
            "benchmark": "quantize",
            "conditions": conditions(),
            "model": model.stem,
            "channels": "as stored" if options.as_stored else "in another order",
            "text": windows.source,
            "fingerprint": windows.fingerprint,
            "windows": len(windows.tokens),
            "window": options.window,
            "calibration": str(rows),
            "threads": options.threads,
            "rows": {},
        }
        for name in names:
            out = Path(folder) / name
            # A new process, whose peak is that of this row.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                job = pool.submit(quantize_row, base, out, ROWS[name], rows, options.threads)
                row = job.result()
            row |= compare(open_model(base), out, windows)
            row["megabytes"] = round(sum(p.stat().st_size for p in out.rglob("*")) / 1e6, 1)
            print(name, row, file=sys.stderr)
            result["rows"][name] = row
            write_result(options.out, result, quiet=True)
    write_result(options.out, result)


def rows_of(text: CalibrationText, model: Path, kept: Path | None) -> Calibration:
    """Make calibration rows, or take those of an earlier call with the same arguments."""
    if kept is not None and (kept / ROWS_NAME).exists():
        return load_rows(kept)
    rows = text.rows_of(model)
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        save_rows(rows, kept)
    return rows


def quantize_row(
    base: Path, out: Path, row: Row, rows: Calibration, threads: int
) -> dict[str, Any]:
    """Quantize in this process; return its CPU seconds, peak memory and what it said."""
    torch.set_num_threads(threads)
    method = Method.parse(row["method"])
    asked = read_asked(
        method, row.get("bits"), row.get("group_size"), symmetric=row.get("symmetric")
    )
    options = QuantizeOptions(
        asked.scheme,
        method,
        GivenRows(num_tokens=rows.rows.numel(), given=rows),
        head=row.get("head"),
        mixed=row.get("mixed"),
    )
    doubting = partial(gptq.quantize, doubt=row.get("doubt", gptq.DOUBT))
    started = time.process_time()
    with mock.patch.object(gptq, "quantize", doubting):
        report = quantize_model(base, out, options)
    seconds = time.process_time() - started
    return {
        "arguments": row,
        "cpu_seconds": round(seconds, 1),
        "cpu_seconds_per_layer": round(seconds / len(open_model(base).spec.layers), 2),
        "peak_mebibytes": _peak_kibibytes() // 1024,
        "bits_per_weight": round(report.quantized_bits_per_weight, 3),
        "notes": list(report.notes),
    }


def _peak_kibibytes() -> int:
    """Return this process's peak; `ru_maxrss` of a child begins with its parent's."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    main()
