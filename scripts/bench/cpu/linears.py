"""Time linears of the CPU library beside torch's kernels and the memory's bandwidth.

    scripts/benchmark cpu_linears                              # one thread and all cores
    scripts/benchmark cpu_linears --shapes smollm2 --rows 1 8  # some of them
    scripts/benchmark cpu_linears --isa amx --beside avx512    # another instruction set, too

Calls take turns on so many copies of the weights that no cache of a desktop processor holds them;
with one row the share of the memory's bandwidth counts. Times are the best of many, since other
processes only add to them. A shape is timed only once its result is right.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from appliance.kernels.cpu.library import LIBRARY, load_library, select_isa
from appliance.kernels.cpu.structs import Format, Isa, LinearStruct, Offset, Status
from appliance.kernels.packed_matmul.reference import prepare_linear
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

HUGE_PAGE = 1 << 21
READ_BYTES = 256 << 20
LARGEST_ERROR = 0.02  # of activations rounded to 8 bits, relative, with random weights


@dataclass(frozen=True)
class Shape:
    """One linear of a model."""

    name: str
    out_features: int
    in_features: int
    format: Format = Format.INT4
    kind: Offset = Offset.ADDITIVE
    group: int = 32


def head(model: str, vocabulary: int, hidden: int) -> Shape:
    return Shape(f"{model}-head", vocabulary, hidden, Format.INT8, Offset.CENTERED)


SHAPES = (
    Shape("smollm2-135m-qkv", 960, 576),
    Shape("smollm2-135m-output", 576, 576),
    Shape("smollm2-135m-gate-up", 3072, 576),
    Shape("smollm2-135m-down", 576, 1536),
    head("smollm2-135m", 49152, 576),
    Shape("qwen2.5-0.5b-qkv", 1152, 896),
    Shape("qwen2.5-0.5b-output", 896, 896),
    Shape("qwen2.5-0.5b-gate-up", 9728, 896),
    Shape("qwen2.5-0.5b-down", 896, 4864),
    Shape("gemma-3-270m-qkv", 1536, 640),
    Shape("gemma-3-270m-output", 640, 1024),
    Shape("gemma-3-270m-gate-up", 4096, 640),
    Shape("gemma-3-270m-down", 640, 2048),
    head("gemma-3-270m", 262144, 640),
    Shape("square-4096", 4096, 4096, kind=Offset.ZERO_POINT, group=128),
    Shape("dense-bf16", 3072, 576, Format.BF16, group=0),
    Shape("dense-f16", 3072, 576, Format.F16, group=0),
)


def huge_tensor(nbytes: int) -> Tensor:
    """Allocate bytes in huge pages, where the system has them, and aligned to them."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + nbytes]


def best_seconds(calls: list[Callable[[], object]], seconds: float) -> float:
    """Return the fastest of calls made in turn, several at a time if they are short."""
    for call in calls[:2]:
        call()
    best, turn = float("inf"), 0
    end = time.perf_counter() + seconds
    together = 1
    while turn < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(together):
            calls[turn % len(calls)]()
            turn += 1
        elapsed = time.perf_counter() - begin
        best = min(best, elapsed / together)
        if elapsed < 2e-4:
            together *= 2
    return best


def read_calls() -> list[Callable[[], object]]:
    """Return a product of a float32 matrix and a vector, which is bound by reading memory."""
    matrix = huge_tensor(READ_BYTES).fill_(0).view(torch.float32).view(-1, 4096)
    vector = torch.ones(4096)
    return [lambda: torch.mv(matrix, vector)]


def random_weight(shape: Shape) -> PackedWeight | Tensor:
    random = torch.Generator().manual_seed(shape.out_features + shape.in_features)
    size = (shape.out_features, shape.in_features)
    if not shape.group:
        dtype = torch.bfloat16 if shape.format == Format.BF16 else torch.float16
        return torch.randn(size, generator=random, dtype=dtype) * 0.05
    bits = 4 if shape.format == Format.INT4 else 8
    q = torch.randint(0, 256, (size[0], size[1] * bits // 8), generator=random, dtype=torch.uint8)
    groups = (size[0], size[1] // shape.group)
    scale = 0.01 + 0.01 * torch.rand(groups, generator=random)
    offset = torch.full(groups, float(1 << (bits - 1)))
    kind = OffsetKind.ZERO_POINT
    if shape.kind == Offset.ADDITIVE:
        offset, kind = -offset * scale, OffsetKind.ADDITIVE
    return PackedWeight(q, scale.half(), offset.half(), kind, bits, shape.group)


class OwnLinears:
    """Copies of one weight in the library's tiles."""

    def __init__(self, library: ctypes.CDLL, shape: Shape, weight: PackedWeight | Tensor) -> None:
        self.library, self.shape = library, shape
        padded = -(-shape.out_features // 16) * 16
        bits = {Format.INT4: 4, Format.INT8: 8}.get(shape.format, 16)
        scale_bytes = padded * (shape.in_features // shape.group) * 2 if shape.group else 0
        offset_bytes = 0 if shape.kind == Offset.CENTERED else scale_bytes
        self.parts = (padded * shape.in_features * bits // 8, scale_bytes, offset_bytes)
        self.weight = weight

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return sum(self.parts)

    def make(self, engine: int, copies: int) -> list[LinearStruct]:
        """Pack the weight once and copy the tiles."""
        whole = tuple(huge_tensor(max(1, nbytes * copies)) for nbytes in self.parts)
        structs, first = [], list[Tensor]()
        for copy in range(copies):
            pieces = [
                memory[nbytes * copy : nbytes * (copy + 1)]
                for memory, nbytes in zip(whole, self.parts, strict=True)
            ]
            shape = self.shape
            struct = LinearStruct(
                shape.format,
                shape.kind,
                Format.F16,
                shape.group,
                shape.in_features,
                shape.out_features,
                *(piece.data_ptr() if len(piece) else None for piece in pieces),
            )
            if first:
                for piece, original in zip(pieces, first, strict=True):
                    piece.copy_(original)
            else:
                first = pieces
                self._pack(engine, struct)
            structs.append(struct)
        self.memory = whole
        return structs

    def _pack(self, engine: int, struct: LinearStruct) -> None:
        weight = self.weight
        sources = (
            (weight,) if isinstance(weight, Tensor) else (weight.codes, weight.scale, weight.offset)
        )
        pointers = [tensor.data_ptr() for tensor in sources] + [None, None]
        status = self.library.ap_linear_pack(
            engine, struct, *pointers[:3], Format.F16, self.shape.group
        )
        assert status == Status.OK, Status(status)


def dequantized(weight: PackedWeight | Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def check(shape: Shape, out: Tensor, x: Tensor, weight: PackedWeight | Tensor) -> None:
    """Compare some columns with the exact product."""
    columns = slice(0, min(512, shape.out_features))
    part = weight[columns] if isinstance(weight, Tensor) else weight.rows(columns)
    exact = x.double() @ dequantized(part).double().t()
    error = float((out[:, columns] - exact).norm() / exact.norm())
    assert error < LARGEST_ERROR, f"{shape.name}: relative error {error}"


@dataclass(frozen=True)
class Options:
    """Settings that all measurements share."""

    library: ctypes.CDLL
    read: list[Callable[[], object]]
    megabytes: int
    seconds: float
    peers: bool
    isa: Isa
    beside: Isa | None


def measure(
    options: Options, shape: Shape, row_counts: list[int], threads: int
) -> list[dict[str, Any]]:
    weight = random_weight(shape)
    engine = options.library.ap_engine_create(threads, 0)
    own = OwnLinears(options.library, shape, weight)
    copies = max(1, options.megabytes * 1_000_000 // own.nbytes)
    structs = own.make(engine, copies)
    torch.set_num_threads(threads)
    # beside each shape: on a shared machine it changes from minute to minute
    rate = READ_BYTES / best_seconds(options.read, options.seconds)
    results = []
    for rows in row_counts:
        x = torch.randn((rows, shape.in_features), generator=torch.Generator().manual_seed(rows))
        out = torch.empty((rows, shape.out_features))
        arguments = x.data_ptr(), rows, out.data_ptr()
        calls = [[engine, struct, *arguments] for struct in structs]
        assert options.library.ap_multiply(*calls[0]) == Status.OK
        check(shape, out, x, weight)
        seconds = own_seconds(options, options.isa, calls)
        operations = 2 * rows * shape.out_features * shape.in_features
        result = {
            "shape": shape.name,
            "size": [shape.out_features, shape.in_features],
            "rows": rows,
            "threads": threads,
            "microseconds": round(seconds * 1e6, 1),
            "gigabytes_per_second": round(own.nbytes / seconds / 1e9, 1),
            "read_gigabytes_per_second": round(rate / 1e9, 1),
            "giga_operations_per_second": round(operations / seconds / 1e9),
        }
        if options.beside is not None:
            other = own_seconds(options, options.beside, calls)
            result["beside_microseconds"] = round(other * 1e6, 1)
        if options.peers:
            result.update(peers(options, weight, x, own.nbytes))
        results.append(result)
        print("  ".join(f"{key} {value}" for key, value in result.items()), file=sys.stderr)
    options.library.ap_engine_destroy(engine)
    return results


def own_seconds(options: Options, isa: Isa, calls: list[list[Any]]) -> float:
    """Time calls of the library with an instruction set."""
    select_isa(options.library, isa.name.lower())
    seconds = best_seconds(
        [partial(options.library.ap_multiply, *arguments) for arguments in calls],
        options.seconds,
    )
    select_isa(options.library, options.isa.name.lower())
    return seconds


def peers(
    options: Options, weight: PackedWeight | Tensor, x: Tensor, nbytes: int
) -> dict[str, float]:
    """Time torch's packed kernel for the same codes and its dense bfloat16 one, in us."""
    x = x.bfloat16()
    forms: dict[str, PackedWeight | Tensor] = {"torch_bfloat16": dequantized(weight)}
    if isinstance(weight, PackedWeight) and weight.bits == 4:
        forms["torch_int4"] = weight
    result = {}
    for name, form in forms.items():
        first = prepare_linear(form, None, torch.bfloat16)
        # the copies need not be equal, only apart from each other
        copies = max(1, min(options.megabytes * 1_000_000 // nbytes, 64))
        linears = [first] + [prepare_linear(form, None, torch.bfloat16) for _ in range(copies - 1)]
        calls: list[Callable[[], object]] = [partial(linear, x) for linear in linears]
        result[f"{name}_microseconds"] = round(best_seconds(calls, options.seconds) * 1e6, 1)
    return result


def main() -> None:
    cores = os.cpu_count() or 1
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--beside", default="", help="another instruction set, timed in turn")
    parser.add_argument("--library", type=Path, default=LIBRARY, help="another")
    parser.add_argument("--megabytes", type=int, default=256, help="of weights, in turn")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    parser.add_argument("--no-torch", action="store_true", help="leave torch's kernels out")
    arguments = parser.parse_args()
    library = load_library(arguments.library)
    beside = select_isa(library, arguments.beside) if arguments.beside else None
    isa = select_isa(library, arguments.isa)
    options = Options(
        library,
        read_calls(),
        arguments.megabytes,
        arguments.seconds,
        not arguments.no_torch,
        isa,
        beside,
    )
    result: dict[str, Any] = {
        "benchmark": "cpu_linears",
        "conditions": conditions(),
        "isa": isa.name.lower(),
        "beside": arguments.beside,
        "megabytes": arguments.megabytes,
        "linears": [],
    }
    for threads in arguments.threads:
        for shape in SHAPES:
            if shape.name.startswith(tuple(arguments.shapes)):
                result["linears"] += measure(options, shape, arguments.rows, threads)
    write_result(arguments.out, result)
