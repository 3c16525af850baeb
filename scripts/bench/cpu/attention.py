"""Time paged attention of the CPU library, one layer of real models, beside torch's SDPA.

    scripts/benchmark cpu_attention  # all shapes, INT8 and INT4, one thread
    scripts/benchmark cpu_attention --shapes smollm2-decode-16x350 --formats int8 bf16 --threads 2

Calls take turns on several layers, as in a model, so that keys and values come from beyond the L2
cache. SDPA reads contiguous keys and values in float32 and bfloat16. A shape is timed only once its
result is close to SDPA's.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.kernels.cpu_sections import load_sections, use_isa

from appliance.kernels.cpu.step_structs import BatchStruct, CacheLayerStruct, CacheStruct
from appliance.kernels.cpu.structs import AttentionStruct, Format, Isa, Status
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

BLOCK_SIZE = 16
CACHE_BYTES = 64 << 20  # of all layers together, at least
MOST_LAYERS = 32
FP8_SCALE = 0.02  # random tokens stay below 448 times this
SEALED = (Format.SEALED, Format.K8V4)  # the open blocks that they need are not laid out here
TOLERANCE = {Format.FP8: 0.1, Format.INT4: 0.2, Format.INT8: 0.02, Format.BF16: 0.01}


@dataclass(frozen=True)
class Shape:
    """Equal sequences, each with `rows` new tokens at its end."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int
    context: int
    rows: int = 1
    window: int = 0


def _of_model(heads: int, kv_heads: int, dim: int, window: int = 0) -> dict[str, Shape]:
    def shape(batch: int, context: int, rows: int = 1) -> Shape:
        return Shape(heads, kv_heads, dim, batch, context, rows, window)

    return {
        "decode-1x350": shape(1, 350),
        "decode-16x350": shape(16, 350),
        "decode-1x4096": shape(1, 4096),
        "prefill-512": shape(1, 512, 512),
    }


MODELS = {
    "smollm2": _of_model(9, 3, 64),
    "qwen2.5-0.5b": _of_model(14, 2, 64),
    "gemma3-270m": _of_model(4, 1, 256, window=512),
    "llama-8b": _of_model(32, 8, 128),
}
SHAPES = {f"{model}-{name}": s for model, shapes in MODELS.items() for name, s in shapes.items()}


def _address(array: np.ndarray[Any, Any]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


class Run:
    """A cache of several layers with random tokens, and one step's batch."""

    def __init__(
        self,
        library: ctypes.CDLL,
        engine: int,
        shape: Shape,
        format: Format,
        most_layers: int,
    ) -> None:
        self.library, self.engine, self.shape = library, engine, shape
        page = library.ap_page_bytes(format, shape.head_dim)
        per_layer = page * shape.num_kv_heads * (BLOCK_SIZE // 16)
        blocks = -(-shape.context // BLOCK_SIZE)
        num_blocks = blocks * shape.batch
        self.num_layers = min(most_layers, -(-CACHE_BYTES // (per_layer * num_blocks)))
        self.arena = torch.zeros(num_blocks * self.num_layers * per_layer + 64, dtype=torch.uint8)
        base = -(-self.arena.data_ptr() // 64) * 64
        self.head_scales = np.full(2 * shape.num_kv_heads, FP8_SCALE, np.float32)
        self.layers = (CacheLayerStruct * self.num_layers)(
            *(
                CacheLayerStruct(
                    offset=i * per_layer, head_scales=_address(self.head_scales), format=format
                )
                for i in range(self.num_layers)
            )
        )
        self.cache = CacheStruct(
            base=base,
            block_bytes=self.num_layers * per_layer,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            layers=self.layers,
        )
        self.attention = AttentionStruct(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
            scale=shape.head_dim**-0.5,
        )
        random = np.random.default_rng(0)
        tables = random.permutation(num_blocks).reshape(shape.batch, blocks).astype(np.int32)
        tokens = np.arange(shape.context)
        slots = tables[:, tokens // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
        self.slots = np.ascontiguousarray(slots)  # (batch, context)
        size = (shape.batch, shape.context, shape.num_kv_heads, shape.head_dim)
        self.key, self.value = random.standard_normal((2, *size), np.float32)
        total = shape.batch * shape.rows
        self.query = random.standard_normal((total, shape.num_heads, shape.head_dim), np.float32)
        self.out = np.empty_like(self.query)
        self.kept = (
            np.arange(shape.batch + 1, dtype=np.int32) * shape.rows,
            np.full(shape.batch, shape.context, np.int32),
            tables,
        )
        self.batch = BatchStruct(
            num_tokens=total,
            num_seqs=shape.batch,
            table_width=blocks,
            query_start=_address(self.kept[0]),
            context_lens=_address(self.kept[1]),
            block_tables=_address(self.kept[2]),
        )
        self.last_slots = np.ascontiguousarray(self.slots[:, -shape.rows :])
        self.last_key = np.ascontiguousarray(self.key[:, -shape.rows :])
        self.last_value = np.ascontiguousarray(self.value[:, -shape.rows :])
        for layer in range(self.num_layers):
            self._write(layer, self.key, self.value, self.slots)

    def _write(self, layer: int, key: Any, value: Any, slots: Any) -> None:
        self.library.section_write(
            self.engine, self.attention, self.cache, layer,
            _address(key), _address(value), slots.size, _address(slots),
        )  # fmt: skip

    def write(self, call: int) -> None:
        """Write this step's keys and values into one of the layers."""
        self._write(call % self.num_layers, self.last_key, self.last_value, self.last_slots)

    def attend(self, call: int) -> None:
        """Attend in one of the layers."""
        status = self.library.section_attend(
            self.engine, self.attention, self.cache, call % self.num_layers,
            self.batch, _address(self.query), _address(self.out),
        )  # fmt: skip
        assert status == Status.OK

    @property
    def bytes_read(self) -> int:
        """Count the bytes of the cache that one call reads."""
        shape = self.shape
        seen = min(shape.context, shape.window + shape.rows) if shape.window else shape.context
        page = self.library.ap_page_bytes(self.layers[0].format, shape.head_dim)
        return int(-(-seen // 16) * page * shape.num_kv_heads * shape.batch)


def sdpa(run: Run, dtype: torch.dtype, layers: int) -> Callable[[int], torch.Tensor]:
    """Return torch's attention over the same contiguous tokens, (batch, heads, tokens, dim)."""
    shape = run.shape
    seen = min(shape.context, shape.window) if shape.window and shape.rows == 1 else shape.context
    query = torch.from_numpy(run.query).unflatten(0, (shape.batch, shape.rows))
    query = query.transpose(1, 2).to(dtype).contiguous()
    key, value = (
        torch.from_numpy(x[:, -seen:]).transpose(1, 2).to(dtype).contiguous()
        for x in (run.key, run.value)
    )
    copies = [(key.clone(), value.clone()) for _ in range(layers)]

    def call(number: int) -> torch.Tensor:
        key, value = copies[number % layers]
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=shape.rows > 1, enable_gqa=True
        )

    return call


def microseconds(call: Callable[[int], object], seconds: float) -> dict[str, float]:
    """Time calls for about that many seconds."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        call(len(times))
        times.append(1e6 * (time.perf_counter() - begin))
    return {"best": round(min(times), 1), "median": round(float(np.median(times)), 1)}


def measure(
    library: ctypes.CDLL, engine: int, shape: Shape, format: Format, options: argparse.Namespace
) -> dict[str, Any]:
    """Check one shape and format against SDPA, then time it."""
    run = Run(library, engine, shape, format, options.layers)
    run.attend(0)
    expected = sdpa(run, torch.float32, 1)(0).transpose(1, 2).flatten(0, 1)
    out = torch.from_numpy(run.out)
    error = float((out - expected).norm() / expected.norm())
    assert error < TOLERANCE.get(format, 1e-3), error
    times = microseconds(run.attend, options.seconds)
    return {
        "attention_us": times,
        "gigabytes_per_second": round(run.bytes_read / times["best"] / 1e3, 1),
        "write_us": microseconds(run.write, options.seconds / 4),
        "layers": run.num_layers,
        "error_to_float32": round(error, 6),
    }


def measure_sdpa(
    library: ctypes.CDLL, engine: int, shape: Shape, options: argparse.Namespace
) -> dict[str, Any]:
    run = Run(library, engine, shape, Format.BF16, options.layers)
    return {
        f"sdpa_{name}_us": microseconds(sdpa(run, dtype, run.num_layers), options.seconds)
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument(
        "--formats",
        nargs="+",
        default=["int8", "int4"],
        choices=[format.name.lower() for format in Format if format not in SEALED],
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=[isa.name.lower() for isa in Isa], default=None)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument(
        "--layers", type=int, default=MOST_LAYERS, help="at most; 1: the cache stays in L2"
    )
    parser.add_argument("--no-sdpa", action="store_true")
    parser.add_argument("--library", type=Path, help="another, with sections")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = load_sections(options.library)
    isa = Isa[options.isa.upper()] if options.isa else Isa(library.ap_current_isa())
    use_isa(library, isa)
    engine = library.ap_engine_create(options.threads, 0)
    result: dict[str, Any] = {
        "benchmark": "cpu_attention",
        "conditions": conditions(),
        "isa": isa.name.lower(),
        "threads": options.threads,
    }
    for name in options.shapes:
        shape = SHAPES[name]
        rows = {
            format: measure(library, engine, shape, Format[format.upper()], options)
            for format in options.formats
        }
        if not options.no_sdpa:
            rows |= measure_sdpa(library, engine, shape, options)
        result[name] = rows
    library.ap_engine_destroy(engine)
    write_result(options.out, result)
