"""Packing is exact, and equals what the compressed-tensors package does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.quant.formats import pack

if TYPE_CHECKING:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

bits = st.sampled_from([4, 8])  # codes in memory
stored_bits = st.sampled_from([3, 4, 8])
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", autouse=True)
def _other_package_is_imported() -> None:
    """Import the package once: it takes a second, in the only process that runs this file."""
    global pack_to_int32
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32


def random_codes(rows: int, columns: int, bits: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)


def signed(codes: Tensor, bits: int) -> Tensor:
    """The form in which compressed-tensors takes codes."""
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


@given(sizes, sizes, bits, seeds)
@settings(derandomize=True)
def test_codes_round_trip(rows: int, half: int, bits: int, seed: int) -> None:
    codes = random_codes(rows, 2 * half, bits, seed)
    packed = pack.pack_codes(codes, bits)
    assert packed.shape == (rows, 2 * half * bits // 8)
    assert torch.equal(pack.unpack_codes(packed, bits), codes)


@given(sizes, sizes, bits, seeds)
@settings(derandomize=True)
def test_packed_codes_are_those_of_packed_weights(
    rows: int, half: int, bits: int, seed: int
) -> None:
    codes = random_codes(rows, 2 * half, bits, seed)
    ones = torch.ones(rows, 1)
    weight = PackedWeight(
        pack.pack_codes(codes, bits), ones, ones, OffsetKind.ADDITIVE, bits, 2 * half
    )
    assert torch.equal(weight.unpack(), codes)


@given(sizes, sizes, seeds)
@settings(derandomize=True)
def test_codes_of_three_bits_round_trip(rows: int, eights: int, seed: int) -> None:
    codes = random_codes(rows, 8 * eights, 3, seed)
    packed = pack.pack_threes(codes)
    assert packed.shape == (rows, 3 * eights)
    assert torch.equal(pack.unpack_stream(packed, 3), codes)


@given(sizes, sizes, seeds)
@settings(derandomize=True)
def test_words_round_trip(rows: int, width: int, seed: int) -> None:
    packed = random_codes(rows, width, 8, seed)
    words = pack.bytes_to_words(packed)
    assert words.shape == (rows, -(-width // 4))
    assert torch.equal(pack.words_to_bytes(words, width), packed)


@given(sizes, sizes, stored_bits, seeds)
@settings(derandomize=True)
def test_zero_points_round_trip(out_features: int, groups: int, bits: int, seed: int) -> None:
    zero_points = random_codes(out_features, groups, bits, seed)
    words = pack.pack_zero_points(zero_points, bits)
    assert words.shape == (-(-out_features * bits // 32), groups)
    assert torch.equal(pack.unpack_zero_points(words, bits, out_features), zero_points)


@given(sizes, sizes, stored_bits, seeds)
@settings(derandomize=True)
def test_words_are_those_of_compressed_tensors(rows: int, half: int, bits: int, seed: int) -> None:
    columns = 32 * half if bits == 3 else 2 * half
    codes = random_codes(rows, columns, bits, seed)
    packed = pack.pack_threes(codes) if bits == 3 else pack.pack_codes(codes, bits)
    ours = pack.bytes_to_words(packed)
    assert torch.equal(ours, pack_to_int32(signed(codes, bits), bits))


@given(sizes, sizes, stored_bits, seeds)
@settings(derandomize=True)
def test_zero_points_are_those_of_compressed_tensors(
    out_features: int, groups: int, bits: int, seed: int
) -> None:
    zero_points = random_codes(out_features, groups, bits, seed)
    ours = pack.pack_zero_points(zero_points, bits)
    assert torch.equal(ours, pack_to_int32(signed(zero_points, bits), bits, packed_dim=0))


def test_a_word_by_hand() -> None:
    codes = torch.arange(8, dtype=torch.uint8).view(1, 8)
    assert pack.bytes_to_words(pack.pack_codes(codes, 4)).item() == 0x76543210
