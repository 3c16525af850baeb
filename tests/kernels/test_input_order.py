"""A weight whose columns are in another order than its inputs gives the same product everywhere."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cpu_sections import load_sections, use_isa

from appliance.kernels.backend import CPU, REFERENCE
from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.engine import NativeEngine, check
from appliance.kernels.cpu.library import supported_isas
from appliance.kernels.cpu.structs import Isa
from appliance.kernels.cpu.weights import WeightPacker
from appliance.kernels.operations import Backend
from appliance.kernels.weights.packed import OffsetKind, PackedWeight

LIBRARY = load_sections()
use_isa(LIBRARY, Isa(LIBRARY.ap_current_isa()))


def ordered(
    rows: int = 32, columns: int = 192, bits: int = 4, *, seed: int = 0
) -> tuple[PackedWeight, PackedWeight]:
    """The same codes, once with reordered columns."""
    random = torch.Generator().manual_seed(seed)
    shape = (rows, columns // 64)
    plain = PackedWeight(
        codes=torch.randint(0, 256, (rows, columns * bits // 8), generator=random).byte(),
        scale=torch.rand(shape, generator=random).half(),
        offset=torch.randint(0, 1 << bits, shape, generator=random).half(),
        offset_kind=OffsetKind.ZERO_POINT,
        bits=bits,
        group_size=64,
    )
    order = torch.randperm(columns, generator=random).int()
    return plain, PackedWeight(
        plain.codes, plain.scale, plain.offset, plain.offset_kind, bits, 64, input_order=order
    )


def test_dense_columns_are_those_of_the_inputs() -> None:
    plain, weight = ordered()
    assert weight.input_order is not None
    dense, columns = weight.dequantize(), plain.dequantize()
    for place, column in enumerate(weight.input_order.tolist()):
        assert torch.equal(dense[:, column], columns[:, place])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [REFERENCE, CPU], ids=lambda backend: backend.name)
def test_torch_backends_multiply_inputs_in_their_own_order(
    backend: Backend, dtype: torch.dtype, bits: int
) -> None:
    _, weight = ordered(bits=bits)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    linear = backend.prepare_linear(weight, None, dtype)
    expected = x.double() @ weight.dequantize(torch.float64).T
    error = (linear(x).double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    assert (linear.in_features, linear.out_features) == (192, 32)


@pytest.mark.parametrize("isa", supported_isas(LIBRARY), ids=lambda isa: isa.name.lower())
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_tokens", [1, 3, 14])
def test_the_library_gathers_the_same_bits(isa: Isa, bits: int, num_tokens: int) -> None:
    before = Isa(LIBRARY.ap_current_isa())
    use_isa(LIBRARY, isa)
    plain, weight = ordered(bits=bits)
    assert weight.input_order is not None
    x = torch.randn(num_tokens, 192, generator=torch.Generator().manual_seed(2))
    gathered = x[:, weight.input_order.long()].contiguous()
    try:
        assert torch.equal(forward(weight, x), forward(plain, gathered))
    finally:
        use_isa(LIBRARY, before)


def forward(weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    engine = NativeEngine(LIBRARY, 1)
    arena = Arena()
    struct = WeightPacker(engine, arena, torch.bfloat16).linear(weight)
    out = torch.empty(len(x), weight.shape[0])
    check(
        LIBRARY.section_linear(engine.handle, struct, x.data_ptr(), len(x), False, out.data_ptr())
    )
    return out


def test_the_library_looks_rows_up_in_the_order_of_the_inputs() -> None:
    _, weight = ordered()
    arena = Arena()
    struct = WeightPacker(NativeEngine(LIBRARY, 1), arena, torch.bfloat16).linear(weight)
    index, out = torch.tensor([17, 0, 31]), torch.empty(3, 192)
    for place, row in enumerate(index.tolist()):
        LIBRARY.section_embedding(struct, row, out[place].data_ptr())
    torch.testing.assert_close(out, weight.dequantize()[index], atol=1e-6, rtol=1e-6)


def test_weights_of_one_order_share_it() -> None:
    _, weight = ordered()
    _, other = ordered(seed=1)
    arena = Arena()
    packer = WeightPacker(NativeEngine(LIBRARY, 1), arena, torch.bfloat16)
    first, second, third = (packer.linear(part) for part in (weight, weight.rows(slice(8)), other))
    assert first.input_order == second.input_order != third.input_order


def test_only_weights_of_one_order_are_stacked() -> None:
    plain, weight = ordered()
    _, other = ordered(seed=1)
    assert weight.stacks_with(weight.rows(slice(4)))
    assert not weight.stacks_with(plain)
    assert not plain.stacks_with(weight)
    assert not weight.stacks_with(other)
    stacked = PackedWeight.concatenate([weight, weight.rows(slice(4))])
    assert torch.equal(stacked.dequantize()[32:], weight.dequantize()[:4])
