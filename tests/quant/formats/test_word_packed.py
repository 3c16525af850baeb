"""AWQ and GPTQ: we write what the formats say, bit for bit, and read it.

The decoders here follow only the facts of the formats, one value after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from appliance.errors import CheckpointError, QuantizeError, UnsupportedModelError
from appliance.kernels.arrays import dtype_name
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.quant.formats import awq, gptq, open_weights
from appliance.quant.formats.awq import AwqLayout
from appliance.quant.formats.gptq import V1, V2, GptqLayout
from appliance.quant.formats.pack import pack_codes
from appliance.quant.formats.word_packed import G_IDX, QWEIGHT, QZEROS, SCALES

Parts = dict[str, Tensor]
FolderOf = Callable[..., SafetensorsFolder]
MODULE = "model.layers.0.mlp.up_proj"
NAME = MODULE + ".weight"


def weight_of(
    bits: int, rows: int, columns: int, group_size: int, *, symmetric: bool, seed: int
) -> PackedWeight:
    """Any codes, scales of both signs, zero points of every value."""
    random = torch.Generator().manual_seed(seed)
    shape = (rows, columns // group_size)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=random).byte()
    scale = torch.randn(shape, generator=random).bfloat16()
    zero_points = torch.randint(0, 1 << bits, shape, generator=random).bfloat16()
    return PackedWeight(
        codes=pack_codes(codes, bits),
        scale=scale,
        offset=-(1 << bits - 1) * scale if symmetric else zero_points,
        offset_kind=OffsetKind.ADDITIVE if symmetric else OffsetKind.ZERO_POINT,
        bits=bits,
        group_size=group_size,
    )


def weights(bits: st.SearchStrategy[int]) -> st.SearchStrategy[PackedWeight]:
    return st.builds(
        weight_of,
        bits,
        st.sampled_from([8, 24, 40]),
        st.sampled_from([64, 192]),
        st.sampled_from([32, 64]),
        symmetric=st.booleans(),
        seed=st.integers(0, 10**6),
    )


def field(words: NDArray[np.int32], row: int, column: int, shift: int, bits: int) -> int:
    return int(words.view(np.uint32)[row, column]) >> shift & (1 << bits) - 1


def awq_value(parts: Parts, group_size: int, out: int, place: int) -> float:
    """The weight of one output and input, from the parts of an AWQ linear."""
    words, zeros = parts[QWEIGHT].numpy(), parts[QZEROS].numpy()
    nibble = [0, 2, 4, 6, 1, 3, 5, 7].index(out % 8)
    group = place // group_size
    code = field(words, place, out // 8, 4 * nibble, 4)
    zero = field(zeros, group, out // 8, 4 * nibble, 4)
    return (code - zero) * float(parts[SCALES][group, out])


def gptq_value(parts: Parts, bits: int, version: str, out: int, place: int) -> float:
    """The same for a GPTQ linear."""
    per_word = 32 // bits
    words, zeros = parts[QWEIGHT].numpy(), parts[QZEROS].numpy()
    group = int(parts[G_IDX][place])
    code = field(words, place // per_word, out, bits * (place % per_word), bits)
    zero = field(zeros, group, out // per_word, bits * (out % per_word), bits)
    if version == V1:
        zero = (zero + 1) % (1 << bits)
    return (code - zero) * float(parts[SCALES][group, out])


def assert_values(weight: PackedWeight, value: Callable[[int, int], float]) -> None:
    dense = weight.dequantize(torch.float64)
    for out in range(weight.shape[0]):
        for place in range(0, weight.shape[1], 5):
            assert float(dense[out, place]) == value(out, place)


def assert_same_values(found: PackedWeight, weight: PackedWeight) -> None:
    assert torch.equal(found.unpack(), weight.unpack())
    assert torch.equal(found.dequantize(torch.float64), weight.dequantize(torch.float64))


@given(weights(st.just(4)), st.sampled_from([32, None]))
@settings(derandomize=True, max_examples=25)
def test_awq_holds_every_value(weight: PackedWeight, smaller: int | None) -> None:
    group_size = smaller or weight.group_size
    parts = AwqLayout(group_size).encode(NAME, weight)
    layout = AwqLayout(group_size).layout(weight.shape)
    assert {
        key: (dtype_name(part.dtype), tuple(part.shape)) for key, part in parts.items()
    } == layout
    assert_values(weight, lambda out, place: awq_value(parts, group_size, out, place))
    assert_same_values(AwqLayout(group_size).decode(NAME, parts), weight)


@given(weights(st.sampled_from([4, 8])), st.sampled_from([V1, V2]), st.sampled_from([32, None]))
@settings(derandomize=True, max_examples=40)
def test_gptq_holds_every_value(weight: PackedWeight, version: str, smaller: int | None) -> None:
    layout = GptqLayout(weight.bits, smaller or weight.group_size, version)
    parts = layout.encode(NAME, weight)
    found = {key: (dtype_name(part.dtype), tuple(part.shape)) for key, part in parts.items()}
    assert found == layout.layout(weight.shape) | {G_IDX: ("int32", (weight.shape[1],))}
    assert_values(weight, lambda out, place: gptq_value(parts, weight.bits, version, out, place))
    assert_same_values(layout.decode(NAME, parts), weight)


@pytest.mark.parametrize("layout", [AwqLayout(None), GptqLayout(4, None, V1)])
def test_one_group_may_be_a_whole_row(layout: AwqLayout | GptqLayout) -> None:
    weight = weight_of(4, 8, 96, 96, symmetric=True, seed=0)
    parts = layout.encode(NAME, weight)
    assert parts[SCALES].shape == (1, 8)
    assert_same_values(layout.decode(NAME, parts), weight)


def test_a_symmetric_weight_of_version_1_has_sevens() -> None:
    parts = GptqLayout(4, 64, V1).encode(NAME, weight_of(4, 8, 64, 64, symmetric=True, seed=0))
    assert parts[QZEROS].tolist() == [[0x77777777]]


def test_zero_points_that_borrowed_from_their_neighbours_are_given_back() -> None:
    weight = weight_of(4, 8, 64, 64, symmetric=False, seed=0)
    weight.offset.copy_(torch.tensor([[0], [5], [0], [0], [15], [1], [0], [9]]))
    stored = GptqLayout(4, 64, V2).encode(NAME, weight)
    stored[QZEROS] = stored[QZEROS] - 0x11111111  # as GPTQModel does, across a whole word
    assert_same_values(GptqLayout(4, 64, V1, borrows=True).decode(NAME, stored), weight)
    by_field = GptqLayout(4, 64, V1).decode(NAME, stored)
    assert not torch.equal(by_field.offset, weight.offset.half())


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_in_an_order_of_importance_compute_right(bits: int, group_size: int) -> None:
    columns = 192 if group_size < 128 else 256
    layout = GptqLayout(bits, group_size, V2)
    weight = weight_of(bits, 16, columns, group_size, symmetric=False, seed=1)
    parts = layout.encode(NAME, weight)
    shuffled = torch.randperm(columns, generator=torch.Generator().manual_seed(2))
    parts[G_IDX] = parts[G_IDX][shuffled]
    found = layout.decode(NAME, parts)
    assert found.input_order is not None
    assert found.group_size == group_size
    assert_values(found, lambda out, place: gptq_value(parts, bits, V2, out, place))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_last_group_that_is_smaller_cuts_the_others(shuffle: bool) -> None:
    layout = GptqLayout(4, 128, V2)
    narrow = weight_of(4, 8, 192, 64, symmetric=False, seed=3)
    parts = GptqLayout(4, 64, V2).encode(NAME, narrow)
    parts[G_IDX] = (torch.arange(192) // 128).int()
    if shuffle:
        parts[G_IDX] = parts[G_IDX][torch.randperm(192)]
    for part in (QZEROS, SCALES):
        parts[part] = parts[part][:2]
    found = layout.decode(NAME, parts)
    assert found.group_size == 64
    assert_values(found, lambda out, place: gptq_value(parts, 4, V2, out, place))


def test_groups_that_no_kernel_has_are_refused_by_name() -> None:
    parts = GptqLayout(4, 64, V2).encode(NAME, weight_of(4, 8, 64, 64, symmetric=False, seed=0))
    parts[G_IDX] = torch.tensor([0] * 63 + [1], dtype=torch.int32)
    parts[SCALES] = parts[SCALES].repeat(2, 1)
    parts[QZEROS] = parts[QZEROS].repeat(2, 1)
    with pytest.raises(UnsupportedModelError, match=r"g_idx has groups of \[1, 63\]"):
        GptqLayout(4, 64, V2).decode(MODULE, parts)


def test_small_scales_are_rounded_and_large_ones_refused() -> None:
    weight = weight_of(4, 8, 64, 64, symmetric=True, seed=0)
    weight.scale.fill_(3e-7)
    weight.offset.copy_(-8 * weight.scale)
    found = AwqLayout(64).decode(NAME, AwqLayout(64).encode(NAME, weight))
    assert float((found.dequantize() - weight.dequantize()).abs().max()) <= 8 * 2.0**-25
    weight.scale.fill_(1e6)
    weight.offset.copy_(-8 * weight.scale)
    with pytest.raises(QuantizeError, match="of 999424, which float16 does not hold; use --format"):
        AwqLayout(64).encode(NAME, weight)


# --- folders ------------------------------------------------------------------------------------

WEIGHT = weight_of(4, 16, 64, 32, symmetric=False, seed=5)
FOLDERS: dict[str, tuple[AwqLayout | GptqLayout, dict[str, Any]]] = {
    "awq": (AwqLayout(32), awq.quantization_config(AwqLayout(32), ["lm_head"])),
    "gptq": (GptqLayout(4, 32, V1), gptq.quantization_config(GptqLayout(4, 32, V1), [])),
    "gptq_v2": (GptqLayout(4, 32, V2), gptq.quantization_config(GptqLayout(4, 32, V2), ["a.b"])),
}


def stored(kind: str, **changed: Tensor | None) -> tuple[Parts, dict[str, Any]]:
    """A folder's tensors, some of them left out (None) or replaced, and its config."""
    layout, config = FOLDERS[kind]
    parts = {MODULE + key: part for key, part in layout.encode(NAME, WEIGHT).items()}
    parts |= {"model.norm.weight": torch.ones(6), "lm_head.weight": torch.ones(3, 64)}
    parts |= {MODULE + "." + key: part for key, part in changed.items() if part is not None}
    left_out = {MODULE + "." + key for key, part in changed.items() if part is None}
    return {key: part for key, part in parts.items() if key not in left_out}, config


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_is_read_under_the_names_of_its_weights(kind: str, folder_of: FolderOf) -> None:
    reader = open_weights(folder_of(*stored(kind)))
    assert reader.tensor_names() == ["lm_head.weight", NAME, "model.norm.weight"]
    assert reader.shape(NAME) == (16, 64)
    assert (reader.packed_bits(NAME), reader.packed_bits("lm_head.weight")) == (4, None)
    loaded = reader.load(NAME)
    assert isinstance(loaded, PackedWeight)
    assert_same_values(loaded, WEIGHT)
    assert isinstance(reader.load("lm_head.weight"), Tensor)


def test_an_empty_or_missing_list_of_groups_means_neighbours(folder_of: FolderOf) -> None:
    for g_idx in (None, torch.empty(0, dtype=torch.int32)):
        loaded = open_weights(folder_of(*stored("gptq_v2", g_idx=g_idx))).load(NAME)
        assert isinstance(loaded, PackedWeight)
        assert_same_values(loaded, WEIGHT)


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize(
    ("part", "value", "complaint"),
    [
        ("qzeros", None, "up_proj.qzeros is missing"),
        ("scales", None, "up_proj.scales is missing"),
        ("scales", torch.ones(1, 16).half(), "up_proj.scales is float16 of shape"),
        ("scales", torch.ones(2, 16).int(), "up_proj.scales is int32"),
        ("scales", torch.full((2, 16), torch.nan).half(), "up_proj.scales holds NaN"),
        ("qzeros", torch.ones(2, 3).int(), "up_proj.qzeros is int32 of shape"),
        ("qweight", torch.ones(8).int(), "up_proj.qweight has shape"),
    ],
)
def test_damaged_parts_are_refused_by_name(
    kind: str, part: str, value: Tensor | None, complaint: str, folder_of: FolderOf
) -> None:
    reader = open_weights(folder_of(*stored(kind, **{part: value})))
    with pytest.raises(CheckpointError, match=complaint):
        reader.load(NAME)


@pytest.mark.parametrize("g_idx", [torch.full((64,), 7), torch.full((64,), -1), torch.zeros(5)])
def test_a_list_of_groups_that_there_are_not_is_refused(g_idx: Tensor, folder_of: FolderOf) -> None:
    reader = open_weights(folder_of(*stored("gptq", g_idx=g_idx.int())))
    with pytest.raises(CheckpointError, match=r"up_proj\.g_idx"):
        reader.load(NAME)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("awq", {"version": "marlin"}, "version 'marlin'"),
        ("awq", {"backend": "llm-awq"}, "backend 'llm-awq'"),
        ("awq", {"bits": 8}, "8 bits"),
        ("awq", {"group_size": 0}, "group size of 0"),
        ("gptq", {"bits": 1}, "bits of 1"),
        ("gptq", {"is_marlin_format": True}, "'marlin'"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ("gptq", {"checkpoint_format": "marlin"}, "'marlin'"),
        ("gptq", {"group_size": None}, "group_size of None"),
    ],
)
def test_other_variants_are_refused_with_what_is_supported(
    kind: str, changes: dict[str, Any], named: str, folder_of: FolderOf
) -> None:
    parts, config = stored(kind)
    with pytest.raises(UnsupportedModelError, match=f"{named}.*supported"):
        open_weights(folder_of(parts, config | changes))


def test_older_names_of_settings_are_read(folder_of: FolderOf) -> None:
    parts, _ = stored("awq")
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    loaded = open_weights(folder_of(parts, config)).load(NAME)
    assert isinstance(loaded, PackedWeight)
    assert_same_values(loaded, WEIGHT)


def test_the_writer_of_a_version_1_folder_decides_how_zeros_are_read() -> None:
    config = gptq.quantization_config(GptqLayout(4, 32, V1), [])
    assert not gptq.declared_layout(config).borrows
    assert gptq.declared_layout(config | {"meta": {"quantizer": ["gptqmodel:5.0"]}}).borrows
