"""Time weight matmuls in every format beside cuBLAS, torch's int4, GemLite and Humming."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch

from appliance.kernels.fp8_matmul import launch as fp8_launch
from appliance.kernels.fp8_matmul import reference as fp8_reference
from appliance.kernels.fp8_matmul.launch import ActivationKind
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from bench.gpu.backend import our_backend
from bench.gpu.matmul_peers import bf16_calls, fp8_calls, gemlite_calls, humming_calls, int4_calls
from bench.gpu.plan import Amount
from bench.gpu.rows import Contender, Rows, Work, relative_error

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.operations import Linear
    from bench.gpu.plan import Wanted
    from bench.gpu.timing import Bench, Call

# name -> (in_features, out_features); Llama-3-8B's layers, and two that launch time cannot hide
SHAPES = {
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "square": (8192, 8192),
    "large": (8192, 28672),
}
TINY_SHAPES = {"tiny": (256, 192), "ragged": (640, 320)}
FEW = (1, 4, 16, 2, 8)  # rows of x that decoding has
MANY = (256, 512, 2048)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
GROUP = 128
# One and a half times the error of torch's own product of the dequantized weight in bf16.
ERROR_BESIDE_TORCH = 1.5
FP8_BOUND = 4e-3  # beside the product of the quantized activations: rounding of bf16 results
CHECKED_ELEMENTS = 1 << 28  # of a weight in float64


@dataclass(frozen=True, slots=True)
class Problem:
    """One shape with some rows; `seed` makes the weights."""

    shape: str
    in_features: int
    out_features: int
    m: int
    device: torch.device
    dtype: torch.dtype

    def x(self, seed: int = 0) -> Tensor:
        """Return activations (m, in_features)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (self.m, self.in_features)
        return torch.randn(size, generator=generator, device=self.device).to(self.dtype)

    def work(self, kernel: str, weight_bytes: int) -> Work:
        """Return bytes and operations of one product."""
        activations = 2 * self.m * (self.in_features + self.out_features)
        flops = 2 * self.m * self.in_features * self.out_features
        return Work(kernel, self.shape, {"m": self.m}, weight_bytes + activations, flops)


def random_packed(
    problem: Problem, bits: int, group: int, *, symmetric: bool, seed: int
) -> PackedWeight:
    """Return codes of every value, varied scales, and zero points unless it is symmetric."""
    generator = torch.Generator(problem.device).manual_seed(seed)
    rows, columns = problem.out_features, problem.in_features
    codes = torch.randint(
        0,
        256,
        (rows, columns * bits // 8),
        dtype=torch.uint8,
        device=problem.device,
        generator=generator,
    )
    shape = (rows, columns // group)
    noise = torch.rand(shape, device=problem.device, generator=generator)
    scale = ((0.5 + noise) * columns**-0.5 / 2 ** (bits - 1)).to(torch.float16)
    middle = 2 ** (bits - 1)
    if symmetric:
        return PackedWeight(codes, scale, -middle * scale, OffsetKind.ADDITIVE, bits, group)
    spread = torch.randint(-2, 3, shape, device=problem.device, generator=generator)
    zero = (middle + spread).to(torch.float16)
    return PackedWeight(codes, scale, zero, OffsetKind.ZERO_POINT, bits, group)


def error_beside_torch(problem: Problem, weight: Tensor, out: Tensor) -> tuple[float, float]:
    """Return our error against float64, and the bound: torch's error in bf16 with some room."""
    x = problem.x()
    rows = max(1, CHECKED_ELEMENTS // problem.in_features)
    weight = weight[:rows]
    expected = x.double() @ weight.double().T
    theirs = relative_error(x @ weight.to(problem.dtype).T, expected)
    return relative_error(out[:, :rows], expected), ERROR_BESIDE_TORCH * theirs


def ours(bench: Bench, problem: Problem, bits: int, *, symmetric: bool) -> tuple[int, Contender]:
    """Return bytes of the packed weight, and our kernel."""
    backend = our_backend(bench)
    make = partial(random_packed, problem, bits, GROUP, symmetric=symmetric)
    first = make(seed=0)
    nbytes = backend.prepare_linear(first, None, problem.dtype).nbytes

    def calls() -> list[Call]:
        x = problem.x()
        linears: list[Linear] = [
            backend.prepare_linear(make(seed=seed), None, problem.dtype)
            for seed in range(bench.copies(nbytes))
        ]
        return [partial(linear, x) for linear in linears]

    def error(call: Call) -> tuple[float, float]:
        out = call()
        assert isinstance(out, torch.Tensor)
        return error_beside_torch(problem, first.dequantize(torch.float32), out)

    return nbytes, Contender("ours", calls, error)


def fp8(bench: Bench, problem: Problem, activations: ActivationKind) -> tuple[int, Contender]:
    """Return the same for FP8 weights with a scale per output."""

    def make(seed: int) -> Fp8Weight:
        generator = torch.Generator(bench.device).manual_seed(seed)
        shape = (problem.out_features, problem.in_features)
        noise = torch.randn(shape, device=bench.device, generator=generator)
        scale = torch.rand(shape[0], device=bench.device, generator=generator) / shape[1]
        return Fp8Weight((100 * noise).clamp(-448, 448).to(torch.float8_e4m3fn), scale)

    def prepare(weight: Fp8Weight) -> Linear:
        return fp8_launch.prepare_linear(weight, None, problem.dtype, activations)

    first = make(0)
    nbytes = prepare(first).nbytes

    def calls() -> list[Call]:
        x = problem.x()
        return [partial(prepare(make(seed)), x) for seed in range(bench.copies(nbytes))]

    def error(call: Call) -> tuple[float, float]:
        out = call()
        assert isinstance(out, torch.Tensor)
        if activations is ActivationKind.SAME:
            return error_beside_torch(problem, first.dequantize(), out)
        codes, scales = fp8_reference.quantize_rows(problem.x())
        x = codes.double() * scales.double().view(-1, 1)
        return relative_error(out, x @ first.dequantize(torch.float64).T), FP8_BOUND

    return nbytes, Contender("ours", calls, error)


def measure(rows: Rows, wanted: Wanted) -> None:
    """Measure all contests, those of the goals first."""
    for kernel, shape, m in contests(wanted.amount):
        if wanted.only and kernel not in wanted.only:
            continue
        sizes = (TINY_SHAPES if wanted.amount is Amount.TINY else SHAPES)[shape]
        _contest(
            rows, Problem(shape, *sizes, m, rows.bench.device, rows.bench.dtype), kernel, wanted
        )


def contests(amount: Amount) -> list[tuple[str, str, int]]:
    """Return kernel, shape and rows of all measurements, without repeats."""
    if amount is Amount.TINY:
        return [("w4a16", "tiny", 1), ("w4a16", "tiny", 256), ("w8a16", "ragged", 3)]
    first = [
        *product(("w4a16",), ("gate_up", "large"), FEW),
        *product(("w4a16",), ("gate_up", "qkv"), MANY),
        *product(("w4a16",), ("qkv", "o", "down", "square"), (1, 16)),
        *product(("w8a8 fp8",), ("gate_up", "down"), (16, 256, 2048)),
        *product(("w4a16",), ("gate_up",), (32, 64, 128)),
        *product(("w4a16 symmetric", "w8a16", "w8a16 fp8"), ("gate_up",), (1, 16)),
    ]
    if amount is Amount.FIRST:
        return first
    return list(dict.fromkeys([*first, *product(KERNELS, SHAPES, ROWS)]))


def _contest(rows: Rows, problem: Problem, kernel: str, wanted: Wanted) -> None:
    def measure() -> None:
        nbytes, contender = KERNELS[kernel](rows.bench, problem)
        work = problem.work(kernel, nbytes)
        rows.measure(work, contender)
        for peer in _peers(rows.bench, problem, kernel, nbytes) if wanted.peers else ():
            rows.measure(work, peer)

    rows.prepare(kernel, problem.shape, {"m": problem.m}, measure)


def _peers(bench: Bench, problem: Problem, kernel: str, nbytes: int) -> Iterator[Contender]:
    dense = 2 * problem.in_features * problem.out_features
    if kernel in ("w4a16", "w8a8 fp8"):
        yield Contender("cuBLAS bf16", partial(bf16_calls, bench, problem, dense))
    if not bench.is_gpu:
        return
    if kernel == "w8a8 fp8":
        yield Contender("torch _scaled_mm", partial(fp8_calls, bench, problem))
    if kernel == "w4a16":
        yield Contender("torch int4", partial(int4_calls, bench, problem, GROUP, nbytes))
        for name, package, peer in (
            ("GemLite", "gemlite", gemlite_calls),
            ("Humming", "humming", humming_calls),
        ):
            if importlib.util.find_spec(package) is not None:
                yield Contender(name, partial(peer, bench, problem, GROUP, nbytes))


KERNELS: dict[str, Callable[[Bench, Problem], tuple[int, Contender]]] = {
    "w4a16": partial(ours, bits=4, symmetric=False),
    "w4a16 symmetric": partial(ours, bits=4, symmetric=True),
    "w8a16": partial(ours, bits=8, symmetric=False),
    "w8a16 fp8": partial(fp8, activations=ActivationKind.SAME),
    "w8a8 fp8": partial(fp8, activations=ActivationKind.FP8),
}
