from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_machine.inline import evaluate
from support.kernels.fp4_weights import random_fp4
from torch import Tensor

from appliance.errors import UnsupportedModelError
from appliance.kernels.packed_matmul.tiled import (
    FLIP,
    MOST_ZERO_POINT,
    Params,
    TiledWeight,
    interleaved_gate_up,
    pad_bias,
    tile_fp4,
    tile_fp8,
    tile_packed,
)
from appliance.kernels.weight_codes import ptx
from appliance.kernels.weight_codes.order import TILE_N, TileOrder
from appliance.kernels.weights.fp4 import GROUPS, VALUES
from appliance.kernels.weights.ggml_types import (
    IQ1_VALUES,
    IQ2_VALUES,
    IQ3_S_VALUES,
    IQ3_XXS_VALUES,
    IQ4_VALUES,
)
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.kernels.weights.trellis import BITS, STATE_BITS, TABLES, places_of

BF16, FP16 = torch.bfloat16, torch.float16


def bits_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of numbers rounded to a 16-bit dtype, as int64."""
    return torch.bitwise_and(x.to(dtype).view(torch.int16).to(torch.int64), 0xFFFF)


def planes_of(text: str, words: Tensor, count: int) -> list[Tensor]:
    """The 16-bit results $0, $1, ... of a PTX text as int64, given its last operand."""
    planes = evaluate(text, [16] * count, words.numpy().astype(np.uint32))
    return [torch.from_numpy(plane.astype(np.int64)) for plane in planes]


def words_of_all_codes(bits: int) -> Tensor:
    """Every code in every place of a word, with random neighbours."""
    random = torch.Generator().manual_seed(0)
    codes, places = 1 << bits, 32 // bits
    words = torch.randint(0, 1 << 32, (codes * places,), generator=random)
    shift = torch.arange(places).repeat_interleave(codes) * bits
    return words & ~((codes - 1) << shift) | torch.arange(codes).repeat(places) << shift


@pytest.mark.parametrize(
    ("text", "kind", "dtype"),
    [
        (ptx.INT4_BF16, "int4", BF16),
        (ptx.INT4_FP16, "int4", FP16),
        (ptx.INT8_BF16, "int8", BF16),
        (ptx.INT8_FP16, "int8", FP16),
        (ptx.FP8_BF16, "fp8", BF16),
        (ptx.FP8_FP16, "fp8", FP16),
    ],
)
def test_every_code_widens_bit_for_bit(text: str, kind: str, dtype: torch.dtype) -> None:
    bits = 4 if kind == "int4" else 8
    words = words_of_all_codes(bits)
    places = TileOrder(bits).places()
    planes = planes_of(text, words, len(places))
    for found, place in zip(planes, places, strict=True):
        codes = words >> place * bits & (1 << bits) - 1
        assert len(codes.unique()) == 1 << bits
        if kind == "fp8":
            expected = codes.to(torch.uint8).view(torch.float8_e4m3fn).to(dtype)
            # The NaN codes, which are refused at load.
            expected = torch.where(expected.isnan(), torch.where(codes > 127, -480, 480), expected)
        elif kind == "int8":
            expected = (codes ^ FLIP) - 128
        else:
            expected = codes - 8
        assert torch.equal(found, bits_of(expected, dtype))


@pytest.mark.parametrize(
    ("text", "prepare", "dtype"),
    [
        (ptx.INT4_ZERO_BF16, ptx.ZERO_BF16, BF16),
        (ptx.INT4_ZERO_FP16, ptx.ZERO_FP16, FP16),
    ],
)
def test_every_code_less_every_zero_point(text: str, prepare: str, dtype: torch.dtype) -> None:
    words = words_of_all_codes(4)
    scale = torch.randint(0, 1 << 16, words.shape, generator=torch.Generator().manual_seed(1))
    for first, second in ((0, 16), (7, 9), (15, MOST_ZERO_POINT)):
        rows = [
            evaluate(prepare, [32], (scale | zero << 16).numpy().astype(np.uint32))[0]
            for zero in (first, second)
        ]
        found = evaluate(text, [16] * 8, words.numpy().astype(np.uint32), *rows)
        for plane, place in zip(range(8), TileOrder(4).places(), strict=True):
            codes = words >> place * 4 & 15
            expected = codes - (first if plane < 4 else second)
            assert np.array_equal(found[plane], bits_of(expected, dtype).numpy())


@pytest.mark.parametrize(
    ("text", "dtype"), [(ptx.INT4_SCALED_BF16, BF16), (ptx.INT4_SCALED_FP16, FP16)]
)
def test_every_code_with_scale_and_offset(text: str, dtype: torch.dtype) -> None:
    words = words_of_all_codes(4)
    pairs = ((0.0173, -0.071), (0.0008, 0.02))  # of the first row, and of the second
    numbers = [np.full(len(words), number, np.float32) for pair in pairs for number in pair]
    rows = [row.view(np.uint32) for row in numbers]
    found = evaluate(text, [16] * 8, words.numpy().astype(np.uint32), *rows)
    for plane, place in zip(range(8), TileOrder(4).places(), strict=True):
        codes = words >> place * 4 & 15
        scale, offset = pairs[plane // 4]
        exact = (codes - 8).double() * scale + offset
        values = torch.from_numpy(found[plane].astype(np.int32)).to(torch.int16).view(dtype)
        rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((values.double() - exact).abs() <= rounding + 2**-12 * scale).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("low", "high"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2)])
def test_every_pair_of_codes_with_scale_and_offset(low: int, high: int, dtype: torch.dtype) -> None:
    random = np.random.default_rng(low + 8 * high)
    words, upper = (random.integers(0, 1 << 32, 4096, dtype=np.uint32) for _ in range(2))
    text = ptx.scaled_pairs("bf16" if dtype is BF16 else "f16", low, high)
    bits = low + high
    pairs = ((0.0173, -0.071), (-0.0008, 0.02))  # of the first row, and of the second
    excess = 128 + (0x4300 + ((1 << bits) - 1) / 2) / 65536  # as the kernel subtracts it
    numbers = [(scale, offset - excess * scale) for scale, offset in pairs]
    rows = [
        np.full(4096, number, np.float32).view(np.uint32) for pair in numbers for number in pair
    ]
    found = evaluate(text, [16] * 8, words, *([upper] if high else []), *rows)
    for plane in range(8):
        half, place = plane % 2 * 16, plane // 2
        codes = words >> half + place * low & (1 << low) - 1
        if high:
            codes |= (upper >> half + place * high & (1 << high) - 1) << low
        scale, offset = pairs[plane // 4]
        exact = torch.from_numpy(codes.astype(np.float64)) * scale + offset
        values = torch.from_numpy(found[plane].astype(np.int32)).to(torch.int16).view(dtype)
        rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((values.double() - exact).abs() <= rounding + 2**-10.9 * abs(scale)).all()


@pytest.mark.parametrize(
    ("text", "dtype", "power"), [(ptx.FP4_BF16, BF16, 126), (ptx.FP4_FP16, FP16, 14)]
)
def test_every_code_of_four_bit_floats_times_its_scale(
    text: str, dtype: torch.dtype, power: int
) -> None:
    words = words_of_all_codes(4)
    values = torch.tensor((*VALUES, *(-value for value in VALUES)))
    pairs = ((0.875, 2.0**-18), (1.0, 1.0), (2.0**-9, 0.4375))  # of e4m3 and powers of two
    for first, second in pairs:
        halves = [int(bits_of(torch.tensor([s * 2.0**power]), dtype)) for s in (first, second)]
        rows = [np.full(len(words), half | half << 16, np.uint32) for half in halves]
        found = evaluate(text, [16] * 8, words.numpy().astype(np.uint32), *rows)
        for plane, place in zip(range(8), TileOrder(4).places(), strict=True):
            codes = words >> place * 4 & 15
            exact = values[codes] * (first if plane < 4 else second)
            assert torch.equal(exact.to(dtype).float(), exact)  # the product is exact
            assert np.array_equal(found[plane], bits_of(exact, dtype).numpy())


def test_halves_twice() -> None:
    word = np.array([0xABCD1234], np.uint32)
    assert evaluate(ptx.LOW_TWICE, [32], word)[0] == 0x12341234
    assert evaluate(ptx.HIGH_TWICE, [32], word)[0] == 0xABCDABCD


PLANES = {2: (2, 0), 3: (2, 1), 5: (4, 1), 6: (4, 2)}  # bits of a code in its two words


@pytest.mark.parametrize("bits", PLANES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_code_whose_bits_lie_in_planes(bits: int, dtype: torch.dtype) -> None:
    low, high = PLANES[bits]
    texts = ptx.PLANES_BF16 if dtype is BF16 else ptx.PLANES_FP16
    text = texts[list(PLANES).index(bits)]
    random = np.random.default_rng(0)
    words = random.integers(0, 1 << 32, (1 + (high > 0), 4096), dtype=np.uint32)
    found = evaluate(text, [16] * 8, *words)
    for plane in range(8):
        pair, half = divmod(plane, 2)
        codes = words[0] >> (16 * half + low * pair) & ((1 << low) - 1)
        if high:
            codes |= (words[1] >> (16 * half + high * pair) & ((1 << high) - 1)) << low
        assert len(np.unique(codes)) == 1 << bits
        expected = torch.from_numpy(codes.astype(np.int64)) - (1 << (bits - 1))
        assert np.array_equal(found[plane], bits_of(expected, dtype).numpy())


@pytest.mark.parametrize(("texts", "dtype"), [(ptx.PLANES_BF16, BF16), (ptx.PLANES_FP16, FP16)])
@pytest.mark.parametrize(
    ("kind", "named"), [(4, IQ4_VALUES), (5, IQ3_S_VALUES), (6, IQ3_XXS_VALUES)]
)
def test_every_code_of_4_bits_that_names_a_value(
    texts: tuple[str, ...], dtype: torch.dtype, kind: int, named: tuple[int, ...]
) -> None:
    words = words_of_all_codes(4)
    found = evaluate(texts[kind], [16] * 8, words.numpy().astype(np.uint32))
    values = torch.tensor(named)
    for plane, place in zip(range(8), TileOrder(4).places(), strict=True):
        expected = bits_of(values[words >> place * 4 & 15], dtype)
        assert np.array_equal(found[plane], expected.numpy())


@pytest.mark.parametrize(("texts", "dtype"), [(ptx.PLANES_BF16, BF16), (ptx.PLANES_FP16, FP16)])
@pytest.mark.parametrize(("kind", "named"), [(7, IQ2_VALUES), (8, IQ1_VALUES)])
def test_every_code_of_3_bits_that_names_a_value(
    texts: tuple[str, ...], dtype: torch.dtype, kind: int, named: tuple[int, ...]
) -> None:
    random = np.random.default_rng(0)
    words, upper = random.integers(0, 1 << 32, (2, 4096), dtype=np.uint32)
    found = evaluate(texts[kind], [16] * 8, words, upper)
    values = torch.tensor(named)
    for plane in range(8):
        pair, half = divmod(plane, 2)
        codes = words >> (16 * half + 2 * pair) & 3 | (upper >> (16 * half + pair) & 1) << 2
        expected = values[torch.from_numpy(codes.astype(np.int64))]
        assert np.array_equal(found[plane], bits_of(expected, dtype).numpy())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_tile_is_a_permutation(bits: int) -> None:
    order = TileOrder(bits)
    assert sorted(order.storage_bits) == sorted(order.weight_bits)
    random = torch.Generator().manual_seed(0)
    shape = (3, 2, TILE_N, order.tile_k)
    codes = torch.randint(0, 1 << bits, shape, generator=random, dtype=torch.uint8)
    words = order.pack(codes)
    assert words.shape == (3, 2, order.words)
    assert torch.equal(order.unpack(words), codes)
    assert order.words * 4 * 8 == TILE_N * order.tile_k * bits  # a warp's lanes load 16 bytes each
    assert order.words == sum(TILE_N * order.tile_k * part // 32 for part in order.parts)
    # No two codes share a place.
    one = torch.eye(TILE_N * order.tile_k, dtype=torch.uint8).view(-1, TILE_N, order.tile_k)
    assert len(order.pack(one).unique(dim=0)) == TILE_N * order.tile_k


@pytest.mark.parametrize(("bits", "groups"), [(4, 1), (4, 2), (4, 4), (8, 1), (8, 2)])
def test_the_axes_of_the_kernel_undo_the_order(bits: int, groups: int) -> None:
    order = TileOrder(bits)
    axes = order.kernel_axes(groups=groups)
    assert sorted(axes) == list(range(len(axes)))
    codes = torch.arange(TILE_N * order.tile_k, dtype=torch.int64) % (1 << bits)
    codes = codes.to(torch.uint8).view(TILE_N, order.tile_k)
    words = order.pack(codes)
    # A lane's words for the first part of the inputs.
    words = words.view(-1, groups, 4 // groups)[:, 0].flatten()
    codes = codes[:, : order.tile_k // groups]
    planes = [words >> place * bits & (1 << bits) - 1 for place in order.places()]
    joined = planes
    while len(joined) > 1:  # as tl.join does it
        joined = [torch.stack(joined[i : i + 2], -1) for i in range(0, len(joined), 2)]
    bits_of_words = joined[0].reshape(1, 1, *[2] * (len(axes) - 2))
    weights = bits_of_words.permute(axes).reshape(codes.shape)
    assert torch.equal(weights.to(torch.uint8), codes)


def exact_weights(tiled: TiledWeight) -> Tensor:
    """(out_features, in_features) float64, slowly read from the tiles."""
    codes = tiled.order.unpack(tiled.codes).transpose(1, 2).flatten(2).flatten(0, 1)
    q = codes.double() - 8 if tiled.kind.bits == 4 else (codes ^ FLIP).double() - 128
    assert tiled.params is not None
    params = tiled.params
    if tiled.params_kind is Params.FP16_ZERO:
        halves = params.unsqueeze(-1).contiguous().view(torch.int16)
        scale = halves[..., 0].contiguous().view(torch.float16).double()
        offset = scale * (8 - halves[..., 1].double())
    elif tiled.params_kind is Params.FP16_OFFSET:
        both = params.unsqueeze(-1).contiguous().view(torch.float16).double()
        scale, offset = both[..., 0], both[..., 1]
    elif tiled.params_kind is Params.FP32_OFFSET:
        scale, offset = params.contiguous().view(torch.float32).double().unbind(2)
    else:
        scale = params.view(torch.float32).double()
        offset = torch.zeros_like(scale)
    scale, offset = (
        x.transpose(1, 2).flatten(0, 1).repeat_interleave(tiled.group_size, 1)
        for x in (scale, offset)
    )
    # Padding must add nothing.
    assert not scale[tiled.out_features :].any()
    assert not scale[:, tiled.in_features :].any()
    return (q * scale + offset)[: tiled.out_features, : tiled.in_features]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", OffsetKind)
@pytest.mark.parametrize(
    ("out_features", "in_features", "group_size"),
    [(576, 576, 32), (192, 576, 64), (130, 1536, 32), (64, 128, 128), (1, 96, 32), (70, 576, 576)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_repacking_loses_nothing(
    out_features: int,
    in_features: int,
    group_size: int,
    bits: int,
    kind: OffsetKind,
    dtype: torch.dtype,
) -> None:
    random = torch.Generator().manual_seed(out_features)
    codes = torch.randint(
        0, 256, (out_features, in_features * bits // 8), generator=random, dtype=torch.uint8
    )
    shape = (out_features, in_features // group_size)
    scale = (torch.randn(shape, generator=random) / 50).to(dtype)
    zero = torch.randint(0, 1 << bits, shape, generator=random)
    offset = (-zero * scale if kind is OffsetKind.ADDITIVE else zero).to(dtype)
    weight = PackedWeight(codes, scale, offset, kind, bits, group_size)
    tiled = tile_packed(weight)
    wide = dtype == torch.float32
    is_folded = bits == 4 and kind is OffsetKind.ZERO_POINT and not wide
    narrow = Params.FP16_ZERO if is_folded else Params.FP16_OFFSET
    assert tiled.params_kind is (Params.FP32_OFFSET if wide else narrow)
    q = weight.unpack().double()
    scales, offsets = (x.double().repeat_interleave(group_size, 1) for x in (scale, offset))
    expected = (q - offsets) * scales if kind is OffsetKind.ZERO_POINT else q * scales + offsets
    error = (exact_weights(tiled) - expected).abs()
    # Codes and scales are exact; only the offset around the middle code was rounded.
    largest = (scales.abs() * (1 << bits)).clamp(min=1e-9)
    assert (error <= largest * (0 if is_folded else 2**-22 if wide else 2**-11)).all()


@pytest.mark.parametrize("kind", OffsetKind)
def test_a_symmetric_weight_has_no_offset(kind: OffsetKind) -> None:
    codes = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    scale = (torch.rand(64, 4) / 10).half()
    offset = -8 * scale if kind is OffsetKind.ADDITIVE else torch.full_like(scale, 8)
    weight = PackedWeight(codes, scale, offset, kind, 4, 32)
    tiled = tile_packed(weight)
    assert tiled.params_kind is Params.FP32
    assert torch.equal(exact_weights(tiled), weight.dequantize(torch.float64))
    assert tiled.nbytes < 2 * (weight.nbytes + codes.nbytes)  # 64 rows are padded to 128


@pytest.mark.parametrize("zero", [7.5, -1.0, 128.0])
def test_zero_points_that_are_no_small_integers_become_offsets(zero: float) -> None:
    codes = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    scale = torch.full((64, 4), 0.25).half()
    offset = torch.full_like(scale, zero)
    weight = PackedWeight(codes, scale, offset, OffsetKind.ZERO_POINT, 4, 32)
    assert tile_packed(weight).params_kind is Params.FP16_OFFSET


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("form", [getattr(torch, name) for name in GROUPS])
def test_tiles_of_four_bit_floats_hold_every_scale(form: torch.dtype, dtype: torch.dtype) -> None:
    weight = random_fp4(70, 192, form)
    tiled = tile_fp4(weight, dtype)
    stored = tiled.order.unpack(tiled.codes).transpose(1, 2).flatten(2).flatten(0, 1)
    assert torch.equal(stored[:70, :192], weight.unpack())
    assert tiled.params is not None
    assert tiled.channel_scale is not None
    # (tiles in n, tiles in k, words, features, two scales) -> (features, scales)
    scales = tiled.params.unsqueeze(-1).contiguous().view(dtype).permute(0, 3, 1, 2, 4)
    scales = scales.flatten(0, 1).flatten(1)
    power = 2.0 ** (126 if dtype is BF16 else 14)
    found = scales.double() / power * tiled.channel_scale.double()[:, None]
    exact = weight.scale.double() * weight.row_scale.double()[:, None]
    assert torch.equal(found[:70, : exact.shape[1]], exact)
    assert not found[70:].any()


def test_powers_too_far_apart_for_float16_are_refused() -> None:
    weight = random_fp4(64, 64, torch.float8_e8m0fnu)
    weight.scale.view(torch.uint8)[3] = torch.tensor([90, 120], dtype=torch.uint8)
    assert tile_fp4(weight, BF16).group_size == 32
    with pytest.raises(UnsupportedModelError, match=r"too far apart for torch.float16.*bfloat16"):
        tile_fp4(weight, FP16)


def test_fp8_tiles() -> None:
    codes = torch.randint(0, 256, (70, 256), dtype=torch.uint8)
    tiled = tile_fp8(codes, torch.ones(70, 2), 128)
    stored = tiled.order.unpack(tiled.codes).transpose(1, 2).flatten(2).flatten(0, 1)
    assert torch.equal(stored[:70], codes)
    channels = tile_fp8(codes, torch.arange(70.0), 0)
    assert channels.params is None
    assert channels.channel_scale is not None
    assert channels.channel_scale.tolist() == [*range(70), *[0] * 58]


def test_gate_and_up_in_turns_of_eight() -> None:
    rows = interleaved_gate_up(48)
    assert rows.tolist()[:24] == [*range(8), *range(24, 32), *range(8, 16)]
    assert sorted(rows.tolist()) == list(range(48))
    padded = pad_bias(torch.ones(3, dtype=BF16))
    assert padded is not None
    assert (float(padded.sum()), padded.dtype, len(padded)) == (3.0, torch.float32, 128)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("bits", BITS)
def test_every_state_of_a_trellis_widens_to_its_sum(bits: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    symbols = torch.randint(0, 1 << bits, (4, 1 << 16, 8), generator=random)  # two outputs' each
    places = torch.tensor(TileOrder(4).places())
    low = ((symbols & 15) << 4 * places).sum(-1)
    if bits == 5:
        fifths = (symbols >> 4 << 4 * places).sum(-1)
        words = [low[0], low[1], fifths[0], fifths[1]]
    else:
        words = list(low[: {2: 4, 3: 3, 4: 2}[bits]])
    text = (ptx.TRELLIS_BF16 if dtype == BF16 else ptx.TRELLIS_FP16)[bits - BITS[0]]
    planes = evaluate(text, [16] * 8, *(word.numpy().astype(np.uint32) for word in words))
    for plane, found in enumerate(planes):
        first = plane & 3  # of an input's two outputs
        outputs = [one for pair in symbols for one in (pair[:, first + 4], pair[:, first])]
        last = outputs[0 if plane >= 4 else 1 :][: -(-STATE_BITS // bits)]
        state = sum(one << i * bits for i, one in enumerate(last)) & (1 << STATE_BITS) - 1
        assert len(state.unique()) == 1 << STATE_BITS
        indices = places_of([*last, last[-1]], bits)
        entries = [torch.tensor(t)[i] for t, i in zip(TABLES[bits], indices, strict=True)]
        expected = torch.stack(entries).sum(0)
        assert torch.equal(torch.from_numpy(found.astype(np.int64)), bits_of(expected, dtype))
