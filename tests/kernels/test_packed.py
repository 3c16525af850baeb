from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.kernels.weights.packed import OffsetKind, PackedWeight


def packed(
    seed: int,
    *,
    out_features: int = 6,
    groups: int = 3,
    group_size: int = 32,
    bits: int = 4,
    kind: OffsetKind = OffsetKind.ADDITIVE,
) -> tuple[PackedWeight, torch.Tensor]:
    """A random weight and its codes, one per input."""
    random = torch.Generator().manual_seed(seed)
    shape = (out_features, groups * group_size)
    q = torch.randint(0, 1 << bits, shape, generator=random, dtype=torch.uint8)
    codes = q[:, 0::2] | (q[:, 1::2] << 4) if bits == 4 else q
    scale = torch.rand((out_features, groups), generator=random)
    offset = torch.randn((out_features, groups), generator=random)
    return PackedWeight(codes, scale.half(), offset.half(), kind, bits, group_size), q


weights = st.builds(
    packed,
    st.integers(0, 10**6),
    out_features=st.integers(1, 9),
    groups=st.integers(1, 4),
    group_size=st.sampled_from([2, 16, 32, 64]),
    bits=st.sampled_from([4, 8]),
    kind=st.sampled_from(OffsetKind),
)


@settings(max_examples=100, derandomize=True)
@given(weights)
def test_unpack_returns_the_codes(weight: tuple[PackedWeight, torch.Tensor]) -> None:
    packed_weight, q = weight
    assert packed_weight.shape == q.shape
    assert torch.equal(packed_weight.unpack(), q)


@settings(max_examples=100, derandomize=True)
@given(weights)
def test_dequantize_is_the_formula_element_by_element(
    weight: tuple[PackedWeight, torch.Tensor],
) -> None:
    packed_weight, q = weight
    values = packed_weight.dequantize(torch.float64)
    for row, column in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1), (0, q.shape[1] // 2)):
        group = column // packed_weight.group_size
        scale = float(packed_weight.scale[row, group])
        offset = float(packed_weight.offset[row, group])
        code = int(q[row, column])
        if packed_weight.offset_kind is OffsetKind.ADDITIVE:
            expected = code * scale + offset
        else:
            expected = (code - offset) * scale
        assert float(values[row, column]) == pytest.approx(expected, rel=1e-6, abs=1e-5)


@settings(max_examples=50, derandomize=True)
@given(weights, st.data())
def test_rows_select_without_loss(
    weight: tuple[PackedWeight, torch.Tensor], data: st.DataObject
) -> None:
    packed_weight, _ = weight
    index = data.draw(st.lists(st.integers(0, packed_weight.shape[0] - 1), min_size=1, max_size=5))
    selected = packed_weight.rows(torch.tensor(index))
    assert torch.equal(selected.dequantize(), packed_weight.dequantize()[index])


def test_concatenate_stacks_outputs() -> None:
    parts = [packed(seed, out_features=seed + 1)[0] for seed in range(3)]
    whole = PackedWeight.concatenate(parts)
    assert whole.shape == (6, 96)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert whole.nbytes == sum(part.nbytes for part in parts)


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight, _ = packed(0)
    with pytest.raises(AssertionError):
        PackedWeight(weight.codes, weight.scale, weight.offset, weight.offset_kind, 4, 64)
