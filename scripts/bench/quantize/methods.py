"""Measure quality, time and memory of each way to quantize a model.

    scripts/benchmark quantize --text prose.txt  # every row, the packaged model
    scripts/benchmark quantize --text prose.txt --only gptq awq
    scripts/benchmark quantize --model gemma.gguf --tokens 2048

Each row runs `appliance quantize` in a process and takes its CPU seconds and peak memory. The
result is compared with the original, both in float32, on windows of a text that calibration leaves
out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from appliance.config import cache_dir
from appliance.hub import resolve_model
from appliance.model.source import open_model
from appliance.quant.text.held_out import HeldOutText
from appliance.tokenizer import Tokenizer
from bench.lib.closeness import compare
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import ROOT, conditions

ASYMMETRIC = ["--no-symmetric"]
ROWS: dict[str, list[str]] = {
    "fp8": ["--method", "fp8"],
    "fp8 block": ["--method", "fp8", "--group-size", "block"],
    "int8": ["--method", "int8"],
    "int8 g64": ["--method", "int8", "--group-size", "64"],
    "rtn 4 sym": ["--method", "rtn"],
    "rtn 4 asym": ["--method", "rtn", *ASYMMETRIC],
    "rtn 4 g32 asym": ["--method", "rtn", "--group-size", "32", *ASYMMETRIC],
    "rtn 3 asym": ["--method", "rtn", "--bits", "3", *ASYMMETRIC],
    "awq 4 sym": ["--method", "awq"],
    "awq 4 asym": ["--method", "awq", *ASYMMETRIC],
    "gptq 4 sym": ["--method", "gptq"],
    "gptq 4 asym": ["--method", "gptq", *ASYMMETRIC],
    "awq+gptq 4 sym": ["--method", "awq+gptq"],
    "awq+gptq 4 asym": ["--method", "awq+gptq", *ASYMMETRIC],
    "awq+gptq 3 asym": ["--method", "awq+gptq", "--bits", "3", *ASYMMETRIC],
    "rtn 4 sym, head 8": ["--method", "rtn", "--head", "8"],
    "rtn 4.25 mixed": ["--method", "rtn", "--mixed", "4.25"],
    "awq+gptq 4.25 mixed": ["--method", "awq+gptq", "--mixed", "4.25"],
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--text", type=Path, help="default: help topics, held out")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rows whose name holds one of these"
    )
    parser.add_argument("--calibration", type=Path, help="default: what the command takes")
    parser.add_argument("--calibration-tokens", type=int)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = resolve_model(options.model, cache_dir=cache_dir()).path
    held_out = HeldOutText(options.text, options.tokens, options.window)
    windows = held_out.windows_of(Tokenizer.from_path(model))
    extra = [] if options.calibration is None else ["--calibration", str(options.calibration)]
    if options.calibration_tokens is not None:
        extra += ["--calibration-tokens", str(options.calibration_tokens)]
    base = open_model(model)
    result: dict[str, Any] = {
        "benchmark": "quantize",
        "conditions": conditions(),
        "model": model.stem,
        "text": windows.source,
        "fingerprint": windows.fingerprint,
        "windows": len(windows.tokens),
        "window": options.window,
        "calibration": extra,
        "rows": {},
    }
    for name, arguments in ROWS.items():
        if not any(word in name for word in options.only):
            continue
        with tempfile.TemporaryDirectory(prefix="bench-quantize-") as folder:
            out = Path(folder) / "out"
            row = _quantize(model, out, [*arguments, *extra], len(base.spec.layers))
            row |= compare(base, out, windows)
            row["megabytes"] = round(sum(p.stat().st_size for p in out.rglob("*")) / 1e6, 1)
        print(name, row, file=sys.stderr)
        result["rows"][name] = row
        write_result(options.out, result, quiet=True)
    write_result(options.out, result)


def _quantize(model: Path, out: Path, arguments: list[str], layers: int) -> dict[str, Any]:
    """Run the command; return its CPU seconds, peak memory and what it said."""
    command = [sys.executable, "-m", "appliance", "quantize", str(model), "--out", str(out)]
    command += ["--no-card", *arguments]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)
        peak = 0
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            peak = max(peak, _peak_kibibytes(process.pid))
            time.sleep(0.02)
        _, status, usage = ended
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        lines = said.read().splitlines()
    if process.returncode:
        raise SystemExit("\n".join(lines))
    seconds = usage.ru_utime + usage.ru_stime
    return {
        "arguments": arguments,
        "cpu_seconds": round(seconds, 1),
        "cpu_seconds_per_layer": round(seconds / layers, 2),
        "peak_mebibytes": round(peak / 1024),
        "sizes": next((line for line in lines if "bits per quantized weight" in line), "").replace(
            f"{out}: ", ""
        ),
        "notes": [line for line in lines if line.startswith("note: ")],
    }


def _peak_kibibytes(pid: int) -> int:
    """Return a process's peak; `ru_maxrss` of a child begins with its parent's."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it ended
        return 0
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(found[1]) if found else 0
