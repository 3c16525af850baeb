"""Types of GGUF files: kept as they are or unpacked, and exact."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.gguf.ggml_weights import put_scale, random_stored, stored_halves

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.gguf import GGUFFile, tensors
from appliance.gguf.grids import unpacked
from appliance.gguf.types import HELD_TYPES, TENSOR_TYPES, UNPACKED_TYPES, held_bytes
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.ggml_types import GGML_TYPES

KINDS = {kind.name: kind for kind in TENSOR_TYPES.values()}
TERNARY = {"TQ1_0", "TQ2_0"}
BITS = {  # of a weight, scales included
    **dict.fromkeys(("IQ1_S", "IQ2_XXS"), 3.1875),
    **dict.fromkeys(("IQ1_M", "IQ2_XS", "IQ2_S"), 3.3125),
    **dict.fromkeys(("IQ3_XXS", "IQ3_S"), 4.1875),
    **dict.fromkeys(TERNARY, 2.625),
}
READ = sorted(GGML_TYPES.keys() | UNPACKED_TYPES)


def exact_values(name: str, blocks: NDArray[np.uint8]) -> torch.Tensor:
    """The values by the `gguf` package."""
    kind = gguf.GGMLQuantizationType[name]
    return torch.from_numpy(dequantize(blocks.reshape(len(blocks), -1), kind))


@given(st.sampled_from(sorted(HELD_TYPES)), st.integers(0, 10**6))
@settings(derandomize=True, max_examples=60)
def test_blocks_mean_what_the_gguf_package_says(name: str, seed: int) -> None:
    blocks = random_stored(name, 4, 3, seed=seed)
    weight = GgmlWeight(name, torch.from_numpy(blocks))
    assert torch.equal(weight.dequantize(), exact_values(name, blocks))


@given(st.sampled_from(sorted(UNPACKED_TYPES)), st.integers(0, 10**6))
@settings(derandomize=True, max_examples=60)
def test_unpacked_blocks_mean_it_too(name: str, seed: int) -> None:
    blocks = random_stored(name, 4, 3, seed=seed)
    held = unpacked(name, blocks.reshape(12, -1)).reshape(4, 3, -1)
    weight = GgmlWeight("Q2_K" if name in TERNARY else name, torch.from_numpy(held))
    assert torch.equal(weight.dequantize(), exact_values(name, blocks))


@pytest.mark.parametrize("name", UNPACKED_TYPES)
def test_small_scales_are_kept_too(name: str) -> None:
    """An eighth of them is no float16."""
    blocks = random_stored(name, 2, 2, factor=3e-3)
    held = unpacked(name, blocks.reshape(4, -1)).reshape(2, 2, -1)
    weight = GgmlWeight("Q2_K" if name in TERNARY else name, torch.from_numpy(held))
    assert torch.equal(weight.dequantize(), exact_values(name, blocks))


def test_the_two_tables_of_held_types_agree() -> None:
    assert GGML_TYPES.keys() == HELD_TYPES | UNPACKED_TYPES.keys() - TERNARY
    for name, kind in GGML_TYPES.items():
        table = KINDS[name]
        held = UNPACKED_TYPES.get(name, table.block_bytes)
        assert (kind.block_size, kind.block_bytes) == (table.block_size, held)
        assert TENSOR_TYPES[kind.number] is table


@pytest.mark.parametrize("name", sorted(HELD_TYPES))
def test_held_types_keep_every_byte_of_the_file(tmp_path: Path, name: str) -> None:
    blocks = random_stored(name, 5, 3)
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": (name, blocks)}))
    loaded = file.load("w")
    assert isinstance(loaded, GgmlWeight)
    assert torch.equal(loaded.blocks, torch.from_numpy(blocks))
    some = file.load_rows("w", 2, 4)
    assert isinstance(some, GgmlWeight)
    assert torch.equal(some.blocks, loaded.blocks[2:4])
    assert loaded.nbytes == loaded.shape[0] * loaded.shape[1] * held_bytes(KINDS[name])


@pytest.mark.parametrize("name", UNPACKED_TYPES)
def test_unpacked_types_keep_every_value_in_few_bits(tmp_path: Path, name: str) -> None:
    blocks = random_stored(name, 16, 4)
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": (name, blocks)}))
    loaded = file.load("w")
    assert isinstance(loaded, GgmlWeight)
    assert torch.equal(loaded.dequantize(), exact_values(name, blocks))
    some = file.load_rows("w", 2, 4)
    assert isinstance(some, GgmlWeight)
    assert torch.equal(some.blocks, loaded.blocks[2:4])
    weights = loaded.shape[0] * loaded.shape[1]
    assert loaded.nbytes == weights * held_bytes(KINDS[name])
    assert loaded.nbytes * 8 / weights == pytest.approx(BITS[name])


def write(path: Path, matrices: dict[str, tuple[str, NDArray[np.uint8]]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (kind, blocks) in matrices.items():
        flat = blocks.reshape(len(blocks), -1)
        writer.add_tensor(name, flat, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", [*READ, "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("value", [0x7C00, 0x7C01, 0x7E00, 0x7BFF], ids=hex)
def test_scales_that_are_no_numbers_are_refused_without_a_warning(
    tmp_path: Path, name: str, value: int
) -> None:
    """Infinity, a signaling and a quiet NaN, and the largest number, which some types accept."""
    blocks = np.random.default_rng(0).integers(0, 256, (3, 2, KINDS[name].block_bytes), np.uint8)
    plain = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,)}
    for start in plain.get(name) or stored_halves(name):
        scale = np.full((3, 2), value, np.uint16).view(np.float16)
        put_scale(name, blocks, start, scale)
    path = write(tmp_path / "model.gguf", {"w": (name, blocks)})
    for in_torch in (True, False):
        file = GGUFFile(path, in_torch=in_torch)
        if value == 0x7BFF:
            with suppress(CheckpointError):
                file.load("w")
        else:
            with pytest.raises(CheckpointError, match="infinite or undefined scales"):
                file.load("w")


def test_pieces_make_the_same_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_stored("IQ2_XXS", 7, 3)
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": ("IQ2_XXS", blocks)}))
    whole = file.load("w")
    monkeypatch.setattr(tensors, "CONVERTED_AT_ONCE", 3 * 3 * 256)  # of seven rows
    pieces = file.load("w")
    assert isinstance(whole, GgmlWeight)
    assert isinstance(pieces, GgmlWeight)
    assert torch.equal(pieces.blocks, whole.blocks)


@pytest.mark.parametrize("name", ["Q6_K", "IQ2_XXS"])
def test_a_tensor_is_read_in_inference_mode_too(tmp_path: Path, name: str) -> None:
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": (name, random_stored(name, 4, 3))}))
    expected = file.load("w")
    with torch.inference_mode():
        found = file.load("w")
    assert not isinstance(expected, torch.Tensor)
    assert not isinstance(found, torch.Tensor)
    assert torch.equal(found.dequantize(), expected.dequantize())


def test_a_type_that_nobody_reads_is_named(tmp_path: Path) -> None:
    name = "Q8_K"
    blocks = np.zeros((2, 1, KINDS[name].block_bytes), dtype=np.uint8)
    path = write(tmp_path / "model.gguf", {"w": (name, blocks)})
    with pytest.raises(UnsupportedModelError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert f"'w' of {path} has type Q8_K" in message
    assert "use a file quantized as" in message
