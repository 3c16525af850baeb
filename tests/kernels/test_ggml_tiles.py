"""GGML's blocks in the GPU kernels' layout: the same codes, in no more bytes than in the file."""

from __future__ import annotations

import pytest
import torch
from support.gguf.ggml_weights import random_ggml

from appliance.kernels.packed_matmul import ggml_tiles
from appliance.kernels.packed_matmul.ggml_tiles import GGML_TILES, tile_ggml
from appliance.kernels.packed_matmul.tiled import record_words
from appliance.kernels.weights.ggml_types import GGML_TYPES


def test_each_type_has_tiles_whose_records_are_of_the_files_bits() -> None:
    assert GGML_TILES.keys() == GGML_TYPES.keys()
    for name, form in GGML_TILES.items():
        kind = GGML_TYPES[name]
        block_k = 128
        inputs = 256 if kind.block_size == 256 else block_k
        record_bits = record_words(form.params_kind, block_k) * 32 / 64 / inputs
        assert form.kind.bits + record_bits == kind.block_bytes * 8 / kind.block_size, name


@pytest.mark.parametrize("name", GGML_TYPES)
def test_tiles_hold_the_codes_and_take_as_much_memory_as_the_file(name: str) -> None:
    weight = random_ggml(name, 256, 768)
    tiled = tile_ggml(weight)
    stored = tiled.order.unpack(tiled.codes).transpose(1, 2).flatten(2).flatten(0, 1)
    assert torch.equal(stored, weight.type.codes(weight.blocks))
    assert tiled.nbytes == weight.nbytes
    assert tiled.has_records


@pytest.mark.parametrize("name", ["Q3_K", "Q5_1"])
def test_a_weight_is_repacked_some_rows_at_a_time_and_padded_with_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    weight = random_ggml(name, 300, 512)
    whole = tile_ggml(weight)
    monkeypatch.setattr(ggml_tiles, "REPACKED_AT_ONCE", 128 * 512)
    pieces = tile_ggml(weight)
    assert whole.params is not None
    assert pieces.params is not None
    assert torch.equal(pieces.params, whole.params)
    assert len(whole.params) == len(whole.codes) == 6  # 384 rows
    assert not whole.params[5].any()
