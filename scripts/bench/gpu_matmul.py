"""Weight matmuls: ours in every weight format, beside cuBLAS, torch's int4, GemLite and Humming."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from gpu_matmul_peers import bf16_calls, fp8_calls, gemlite_calls, humming_calls, int4_calls
from gpu_rows import Contender, Rows, Work, relative_error

from appliance.kernels.backend import select_backend
from appliance.kernels.packed import OffsetKind, PackedWeight

if TYPE_CHECKING:
    from gpu_timing import Bench, Call
    from torch import Tensor

    from appliance.kernels.backend import Linear

# name -> (in_features, out_features); Llama-3-8B's layers, and two that launch time cannot hide
SHAPES = {
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "square": (8192, 8192),
    "large": (8192, 28672),
}
TINY_SHAPES = {"tiny": (256, 192), "ragged": (576, 320)}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
TINY_ROWS = (1, 17, 130)
GROUP = 128
DTYPE = torch.bfloat16
# As far from float64 as torch's own product of the dequantized weight in bf16, and half as much.
ERROR_BESIDE_TORCH = 1.5
CHECKED_ELEMENTS = 1 << 28  # of a weight in float64


@dataclass(frozen=True, slots=True)
class Problem:
    """One shape with some rows; weights are made by `seed`."""

    shape: str
    in_features: int
    out_features: int
    m: int
    device: torch.device

    def x(self, seed: int = 0) -> Tensor:
        """Activations (m, in_features)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (self.m, self.in_features)
        return torch.randn(size, generator=generator, device=self.device).to(DTYPE)

    def work(self, kernel: str, weight_bytes: int) -> Work:
        """Bytes and operations of one product."""
        activations = 2 * self.m * (self.in_features + self.out_features)
        flops = 2 * self.m * self.in_features * self.out_features
        return Work(kernel, self.shape, {"m": self.m}, weight_bytes + activations, flops)


def random_packed(
    problem: Problem, bits: int, group: int, *, symmetric: bool, seed: int
) -> PackedWeight:
    """Codes of every value, scales that differ, integer zero points unless it is symmetric."""
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
    """Our error against float64, and the bound: torch's error in bf16 with some room."""
    x = problem.x()
    rows = max(1, CHECKED_ELEMENTS // problem.in_features)
    weight = weight[:rows]
    expected = x.double() @ weight.double().T
    theirs = relative_error(x @ weight.to(DTYPE).T, expected)
    return relative_error(out[:, :rows], expected), ERROR_BESIDE_TORCH * theirs


def ours(bench: Bench, problem: Problem, bits: int, *, symmetric: bool) -> tuple[int, Contender]:
    """Bytes of the weight as it is laid out, and our kernel."""
    backend = select_backend(bench.device) if bench.is_gpu else _interpreted()
    make = partial(random_packed, problem, bits, GROUP, symmetric=symmetric)
    first = make(seed=0)
    nbytes = backend.prepare_linear(first, None, DTYPE).nbytes

    def calls() -> list[Call]:
        x = problem.x()
        linears: list[Linear] = [
            backend.prepare_linear(make(seed=seed), None, DTYPE)
            for seed in range(bench.copies(nbytes))
        ]
        return [partial(linear, x) for linear in linears]

    def error(call: Call) -> tuple[float, float]:
        out = call()
        assert isinstance(out, torch.Tensor)
        return error_beside_torch(problem, first.dequantize(torch.float32), out)

    return nbytes, Contender("ours", calls, error)


def _interpreted() -> object:
    """Our Triton kernels in the interpreter, to try this script without a GPU."""
    from appliance.kernels.packed_matmul import launch

    class Interpreted:
        prepare_linear = staticmethod(launch.prepare_linear)

    return Interpreted


def measure(bench: Bench, rows: Rows, *, tiny: bool, peers: bool, only: frozenset[str]) -> None:
    """All shapes and numbers of rows."""
    for problem in _problems(bench, tiny=tiny):
        for kernel, bits, symmetric in (
            ("w4a16", 4, False),
            ("w4a16 symmetric", 4, True),
            ("w8a16", 8, False),
        ):
            if only and kernel not in only:
                continue
            nbytes, contender = ours(bench, problem, bits, symmetric=symmetric)
            work = problem.work(kernel, nbytes)
            rows.measure(work, contender)
            if not peers or kernel != "w4a16":
                continue
            dense = 2 * problem.in_features * problem.out_features
            rows.measure(work, Contender("cuBLAS bf16", partial(bf16_calls, bench, problem, dense)))
            if not bench.is_gpu:
                continue
            rows.measure(
                work, Contender("torch int4", partial(int4_calls, bench, problem, GROUP, nbytes))
            )
            if problem.shape in ("gate_up", "square", "large") and problem.m <= 256:
                for name, peer in (("GemLite", gemlite_calls), ("Humming", humming_calls)):
                    rows.measure(
                        work, Contender(name, partial(peer, bench, problem, GROUP, nbytes))
                    )
        if peers and bench.is_gpu and problem.m >= 16 and (not only or "w8a8 fp8" in only):
            work = problem.work("w8a8 fp8", problem.in_features * problem.out_features)
            rows.measure(work, Contender("torch _scaled_mm", partial(fp8_calls, bench, problem)))


def _problems(bench: Bench, *, tiny: bool) -> Iterator[Problem]:
    for m in TINY_ROWS if tiny else ROWS:
        for name, (in_features, out_features) in (TINY_SHAPES if tiny else SHAPES).items():
            yield Problem(name, in_features, out_features, m, bench.device)
