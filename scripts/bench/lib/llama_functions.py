"""llama.cpp's losses on given tokens, and its quantizer: C functions in the package xllamacpp.

The interfaces are llama.h's and ggml.h's. The sizes of settings structs change between versions, so
these are passed on whole, in larger buffers than they need. `python llama_functions.py FOLDER MODEL
THREADS` reads lists of token ids as JSON and writes their losses.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROOM = 2048  # bytes for a struct of settings, of which llama.h's have some hundred
BATCH = 512  # tokens that a context of default settings holds


class Settings(ctypes.Structure):
    """A struct of defaults that is only passed on."""

    _fields_ = (("content", ctypes.c_char * ROOM),)


class Batch(ctypes.Structure):
    """`llama_batch` of llama.h."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def library(folder: Path) -> Any:
    """Load llama.cpp out of the package xllamacpp in a folder."""
    try:
        (path,) = Path(folder).glob("xllamacpp/xllamacpp*.so")
    except ValueError:
        sys.exit(f"the package xllamacpp is not in {folder}")
    loaded = ctypes.CDLL(str(path))
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
    for name, result, arguments in (
        ("llama_backend_init", None, ()),
        ("llama_model_default_params", Settings, ()),
        ("llama_context_default_params", Settings, ()),
        ("llama_model_load_from_file", pointer, (text, Settings)),
        ("llama_init_from_model", pointer, (pointer, Settings)),
        ("llama_set_n_threads", None, (pointer, number, number)),
        ("llama_model_get_vocab", pointer, (pointer,)),
        ("llama_vocab_n_tokens", number, (pointer,)),
        ("llama_get_memory", pointer, (pointer,)),
        ("llama_memory_clear", None, (pointer, ctypes.c_bool)),
        ("llama_batch_init", Batch, (number, number, number)),
        ("llama_decode", number, (pointer, Batch)),
        ("llama_get_logits", ctypes.POINTER(ctypes.c_float), (pointer,)),
        (
            "ggml_quantize_chunk",
            ctypes.c_size_t,
            (number, pointer, pointer, *[ctypes.c_int64] * 3, pointer),
        ),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    loaded.llama_backend_init()
    return loaded


def quantize(
    llama: Any, values: NDArray[np.float32], kind: int, row_bytes: int, threads: int
) -> NDArray[np.uint8]:
    """Quantize values (rows, columns) to a GGML type: (rows, row_bytes)."""
    values = np.ascontiguousarray(values)
    rows, columns = values.shape
    found = np.empty((rows, row_bytes), dtype=np.uint8)
    places = values.ctypes.data, found.ctypes.data

    def part(bounds: tuple[int, int]) -> None:
        begin, end = bounds
        llama.ggml_quantize_chunk(kind, *places, begin * columns, end - begin, columns, None)

    ends = [rows * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, pairwise(ends)))
    return found


def losses_of(
    folder: Path, model: Path, windows: list[list[int]], threads: int
) -> list[list[float]]:
    """Return nats of each window's tokens but the first, computed in a process of its own.

    Args:
        folder: has the package xllamacpp.
        windows: of at most `BATCH` tokens.
    """
    assert max(map(len, windows)) <= BATCH
    ended = subprocess.run(
        [sys.executable, __file__, str(folder), str(model), str(threads)],
        input=json.dumps(windows),
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.exit(f"llama.cpp ended with status {ended.returncode}: {ended.stderr[-2000:]}")
    found: list[list[float]] = json.loads(ended.stdout)
    return found


def losses(folder: Path, model: str, threads: int, windows: list[list[int]]) -> list[list[float]]:
    """Decode each window as one batch."""
    llama = library(folder)
    loaded = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
    if not loaded:
        sys.exit(f"llama.cpp does not load {model}")
    context = llama.llama_init_from_model(loaded, llama.llama_context_default_params())
    llama.llama_set_n_threads(context, threads, threads)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded))
    batch = llama.llama_batch_init(BATCH, 0, 1)
    found = []
    for window in windows:
        batch.n_tokens = len(window)
        for place, token in enumerate(window):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        if status := llama.llama_decode(context, batch):
            sys.exit(f"llama_decode ended with status {status}")
        shape = len(window), vocabulary
        logits = np.ctypeslib.as_array(llama.llama_get_logits(context), shape)[:-1]
        wanted = np.take_along_axis(logits, np.array(window[1:])[:, None], 1)[:, 0]
        highest = logits.max(1).astype(np.float64)
        sums = np.exp(logits - highest[:, None]).sum(1)
        found.append((highest + np.log(sums) - wanted).tolist())
    return found


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    print(json.dumps(losses(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), asked)))
