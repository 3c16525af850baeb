"""One layer's experts alone, for a caller with its own router: against float32, row by row."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from support.kernels.fp4_weights import random_fp4
from torch import Tensor

from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.structs import (
    ExpertsStruct,
    GatingStruct,
    LinearStruct,
    RoutedStruct,
    RouterStruct,
    Status,
)
from appliance.kernels.cpu.weights import WeightPacker
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.kernels.weights.weight import Weight, dense

HIDDEN, MIDDLE, COUNT, TOP_K = 128, 96, 7, 3
CLAMPED_SWIGLU, RELU_SQUARED = GatingStruct(2, 1.5, 1.7), GatingStruct(3)
ROWS = (1, 2, 5, 16, 33, 64, 300)


def weight_of(form: str, out_features: int, in_features: int, seed: int) -> Weight:
    random = torch.Generator().manual_seed(seed)
    if form == "mxfp4":
        return random_fp4(out_features, in_features, torch.float8_e8m0fnu)
    if form != "int4":
        spread = torch.randn(out_features, in_features, generator=random)
        dtype = torch.float32 if form == "float32" else torch.bfloat16
        return (spread / math.sqrt(in_features)).to(dtype)
    codes = torch.randint(
        0, 256, (out_features, in_features // 2), dtype=torch.uint8, generator=random
    )
    scale = torch.rand(out_features, in_features // 32, generator=random) * 0.02
    middle = torch.full_like(scale, 8)
    return PackedWeight(codes, scale, middle, OffsetKind.ZERO_POINT, 4, 32)


@dataclass
class Experts:
    """Experts in the library, and as dense float32 weights with their biases."""

    engine: NativeEngine
    arena: Arena
    struct: ExpertsStruct
    gating: GatingStruct
    linears: list[list[tuple[Tensor, Tensor] | None]]

    @classmethod
    def of(cls, engine: NativeEngine, form: str, gating: GatingStruct, *, gated: bool) -> Experts:
        arena = Arena()
        packer = WeightPacker(engine, arena, torch.float32 if form == "int4" else torch.bfloat16)
        if form == "float32":
            packer = WeightPacker(engine, arena, torch.float32)
        shapes = [(MIDDLE, HIDDEN), (MIDDLE, HIDDEN) if gated else None, (HIDDEN, MIDDLE)]
        structs: list[list[LinearStruct]] = [[], [], []]
        linears: list[list[tuple[Tensor, Tensor] | None]] = []
        for expert in range(COUNT):
            linears.append([])
            for place, shape in enumerate(shapes):
                if shape is None:
                    linears[-1].append(None)
                    continue
                seed = 10 * expert + place
                weight = weight_of(form, *shape, seed=seed)
                bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(seed))
                structs[place].append(packer.linear(weight, bias))
                linears[-1].append((dense(weight, "float32"), bias))
        gate, up, down = (packer.structs(LinearStruct, each) if each else None for each in structs)
        router = RouterStruct(num_experts=COUNT, top_k=TOP_K)
        struct = ExpertsStruct(router=router, num_here=COUNT, gate=gate, up=up, down=down)
        return cls(engine, arena, struct, gating, linears)

    def of_rank(self, here: range) -> Experts:
        """A rank's experts, with the same router."""
        own, begin = self.struct, here.start * ctypes.sizeof(LinearStruct)
        struct = ExpertsStruct(
            router=own.router,
            first_expert=here.start,
            num_here=len(here),
            gate=own.gate + begin,
            up=own.up + begin,
            down=own.down + begin,
        )
        return replace(self, struct=struct)

    def run(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[int, Tensor]:
        out = torch.full((len(hidden) + 1, HIDDEN), 7.0)
        routed = RoutedStruct(
            len(hidden), hidden.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr()
        )
        status = self.engine.library.ap_run_experts(
            self.engine.handle,
            ctypes.byref(self.struct),
            ctypes.byref(self.gating),
            ctypes.byref(routed),
        )
        assert torch.all(out[-1] == 7)  # nothing else is written
        return status, out[:-1]

    def expected(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for row in range(len(hidden)):
            for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
                total[row] += weight * self._one(hidden[row], expert)
        return total

    def _one(self, x: Tensor, expert: int) -> Tensor:
        gate, up, down = self.linears[expert]
        assert gate is not None
        assert down is not None
        g = gate[0] @ x + gate[1]
        if up is None:
            middle = g.relu().square()
        else:
            u = up[0] @ x + up[1]
            g, u = g.clamp(max=1.5), u.clamp(-1.5, 1.5)
            middle = g * (1.7 * g).sigmoid() * (u + 1)
        return down[0] @ middle + down[1]


def choices(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=random)
    ids = torch.rand(rows, COUNT, generator=random).topk(TOP_K).indices
    return hidden, ids, torch.rand(rows, TOP_K, generator=random)


@pytest.fixture
def two_threads(library: ctypes.CDLL) -> Iterator[NativeEngine]:
    """An engine, with each instruction set in turn."""
    made = NativeEngine(library, 2)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("form", "most"), [("float32", 1e-5), ("bfloat16", 1e-5), ("int4", 0.03), ("mxfp4", 0.03)]
)
@pytest.mark.parametrize("gated", [True, False], ids=["clamped", "relu2"])
def test_rows_are_what_their_experts_say_whatever_is_beside_them(
    two_threads: NativeEngine, form: str, most: float, gated: bool
) -> None:
    gating = CLAMPED_SWIGLU if gated else RELU_SQUARED
    experts = Experts.of(two_threads, form, gating, gated=gated)
    hidden, ids, weights = choices(ROWS[-1])
    status, whole = experts.run(hidden, ids, weights)
    assert status == Status.OK
    expected = experts.expected(hidden, ids, weights)
    assert float((whole - expected).norm() / expected.norm()) < most
    for rows in ROWS:
        status, some = experts.run(hidden[-rows:], ids[-rows:], weights[-rows:])
        assert status == Status.OK
        assert torch.equal(some, whole[-rows:]), rows


def test_an_expert_that_is_not_there_is_refused(loaded: ctypes.CDLL) -> None:
    experts = Experts.of(NativeEngine(loaded, 1), "float32", RELU_SQUARED, gated=False)
    hidden, ids, weights = choices(2)
    for wrong in (-1, COUNT):
        ids[1, 2] = wrong
        status, out = experts.run(hidden, ids, weights)
        assert status == Status.BAD_ARGUMENT
        assert torch.all(out == 7)


@pytest.mark.parametrize("form", ["float32", "int4"])
def test_experts_of_several_ranks_add_up(two_threads: NativeEngine, form: str) -> None:
    """Most rows do not choose the first rank's only expert."""
    experts = Experts.of(two_threads, form, CLAMPED_SWIGLU, gated=True)
    hidden, ids, weights = choices(33)
    _, whole = experts.run(hidden, ids, weights)
    parts = []
    for here in (range(1), range(1, 4), range(4, COUNT)):
        status, part = experts.of_rank(here).run(hidden, ids, weights)
        assert status == Status.OK
        is_chosen = ((ids >= here.start) & (ids < here.stop)).any(dim=1)
        assert torch.equal(part.abs().sum(dim=1) > 0, is_chosen)
        parts.append(part)
    torch.testing.assert_close(sum(parts), whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("here", [range(0), range(3, COUNT + 1)])
def test_a_rank_without_experts_or_with_others_is_refused(loaded: ctypes.CDLL, here: range) -> None:
    experts = Experts.of(NativeEngine(loaded, 1), "float32", CLAMPED_SWIGLU, gated=True)
    status, _ = experts.of_rank(here).run(*choices(2))
    assert status == Status.BAD_ARGUMENT


def test_no_rows_are_no_work(loaded: ctypes.CDLL) -> None:
    experts = Experts.of(NativeEngine(loaded, 1), "float32", RELU_SQUARED, gated=False)
    status, out = experts.run(*choices(0))
    assert (status, len(out)) == (Status.OK, 0)
