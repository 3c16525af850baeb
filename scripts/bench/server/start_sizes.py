"""How soon models of several sizes are ready: the first start, later ones, and reading the bytes.

Files have random weights. First: the model is in the system's cache, and nothing is packed. Warm:
the packed weights are in that cache. Cold: neither is; both come from the disk.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from appliance.engine.packed_models import SUFFIX
from bench.lib.llama_peer import Peer
from bench.lib.model_shapes import LLAMA_1B, LLAMA_3_8B
from bench.lib.synthetic_gguf import write_model
from bench.server.start import APPLIANCE, read_stages

# By the gigabytes of the file: a shape and the type of its matrices.
SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "0.1": ({**LLAMA_1B, "num_hidden_layers": 2}, "Q4_K"),
    "0.5": ({**LLAMA_1B, "num_hidden_layers": 18}, "Q4_K"),
    "4": ({**LLAMA_3_8B, "num_hidden_layers": 30}, "Q4_K"),
    "12": (
        {
            **LLAMA_3_8B,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_attention_heads": 40,
            "num_hidden_layers": 46,
            "vocab_size": 152064,
        },
        "Q6_K",
    ),
}
_PIECE = 8 << 20


def measure(size: str, folder: Path, peer: Path | None, port: int, repeats: int) -> dict[str, Any]:
    """Measure one size; its files lie in `folder` and its packed weights are made anew."""
    shape, type_name = SIZES[size]
    model, packed = folder / f"start-{size}.gguf", folder / f"packed-{size}"
    if not model.exists():
        heads = shape["hidden_size"] // shape["num_attention_heads"]
        write_model(model, shape | {"head_dim": heads}, lambda slot: type_name)
    shutil.rmtree(packed, ignore_errors=True)
    threads = os.cpu_count() or 1
    _drop(model)
    found: dict[str, Any] = {"bytes": model.stat().st_size, "read_cold": _read(model, threads)}
    found["read_warm"] = _spread(_read(model, threads) for _ in range(repeats))
    first, packed_in = _start(model, packed, port, until_kept=True)
    found["first"], found["packed_in_background"] = first, packed_in
    (kept,) = packed.iterdir()
    _drop(model, kept)
    found["cold"] = _start(model, packed, port)[0]
    warm = [_start(model, packed, port)[0] for _ in range(repeats)]
    found["warm"] = {name: _spread(one[name] for one in warm) for name in warm[0]}
    if peer is not None:
        _drop(model)
        found["peer_cold"] = _peer(peer, model, threads)
        found["peer_warm"] = _spread(_peer(peer, model, threads) for _ in range(repeats))
    shutil.rmtree(packed)
    return found


def _start(
    model: Path, packed: Path, port: int, *, until_kept: bool = False
) -> tuple[dict[str, float], float]:
    """Start a server; return its stages with the whole, and seconds until the packed are kept."""
    command = [*APPLIANCE, "serve", str(model), "--port", str(port), "--kv-disk", "off"]
    command += ["--packed-weights", str(packed), "--max-model-len", "2048", "--log-level", "info"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = next(one for one in server.stderr if one.strip().startswith("started in"))
            whole = time.perf_counter() - begin
            if until_kept:
                next(one for one in server.stderr if one.rstrip().endswith(SUFFIX))
            kept = time.perf_counter() - begin - whole
        finally:
            server.terminate()
            server.communicate()
    return {"ready": round(whole, 3), **read_stages(line)}, round(kept, 2)


def _peer(folder: Path, model: Path, threads: int) -> float:
    """Return the seconds until llama.cpp, started in its own process, has loaded."""
    begin = time.perf_counter()
    peer = Peer(folder, model, threads, 1)
    took = time.perf_counter() - begin
    peer.close()
    return took


def _spread(seconds: Iterable[float]) -> dict[str, float]:
    found = sorted(seconds)
    middle = round(statistics.median(found), 3)
    return {"median": middle, "min": round(found[0], 3), "max": round(found[-1], 3)}


def _drop(*files: Path) -> None:
    """Take files out of the system's cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _read(file: Path, threads: int) -> float:
    """Return the seconds that reading a file with all threads takes."""

    def read(number: int) -> None:
        piece = bytearray(_PIECE)
        with file.open("rb", buffering=0) as source:
            for at in range(number * _PIECE, file.stat().st_size, threads * _PIECE):
                source.seek(at)
                source.readinto(piece)

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    return time.perf_counter() - begin
