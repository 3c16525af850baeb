"""Types of GGUF files: kept or widened, and how exact they are then."""

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

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.gguf import GGUFFile, tensors
from appliance.gguf.conversion import Loss, requantize
from appliance.gguf.types import HELD_TYPES, TENSOR_TYPES, held_bytes
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.ggml_types import GGML_TYPES
from appliance.kernels.weights.packed import PackedWeight

# The places of a block's float16 scales; every other byte may have any value.
HALVES = {name: kind.halves for name, kind in GGML_TYPES.items()} | {
    "IQ2_XXS": (0,),
    "TQ2_0": (64,),
}
KINDS = {kind.name: kind for kind in TENSOR_TYPES.values()}


def random_blocks(name: str, rows: int = 4, blocks: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    """(rows, blocks, bytes): any codes, with scales like those of models."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, blocks, KINDS[name].block_bytes), dtype=np.uint8)
    for start in HALVES[name]:
        scales = random.uniform(1e-4, 4e-4, (rows, blocks)).astype(np.float16)
        data[..., start : start + 2] = scales[..., None].view(np.uint8)
    return data


def exact_values(name: str, blocks: NDArray[np.uint8]) -> torch.Tensor:
    """The values by the `gguf` package."""
    kind = gguf.GGMLQuantizationType[name]
    return torch.from_numpy(dequantize(blocks.reshape(len(blocks), -1), kind))


@given(st.sampled_from(sorted(GGML_TYPES)), st.integers(0, 10**6))
@settings(derandomize=True, max_examples=60)
def test_blocks_mean_what_the_gguf_package_says(name: str, seed: int) -> None:
    blocks = random_blocks(name, seed=seed)
    weight = GgmlWeight(name, torch.from_numpy(blocks))
    assert torch.equal(weight.dequantize(), exact_values(name, blocks))


def test_the_two_tables_of_held_types_agree() -> None:
    assert GGML_TYPES.keys() == HELD_TYPES
    for name, kind in GGML_TYPES.items():
        table = KINDS[name]
        assert (kind.block_size, kind.block_bytes) == (table.block_size, table.block_bytes)
        assert TENSOR_TYPES[kind.number] is table


@pytest.mark.parametrize("name", GGML_TYPES)
def test_held_types_keep_every_byte_of_the_file(tmp_path: Path, name: str) -> None:
    blocks = random_blocks(name, rows=5)
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": (name, blocks)}))
    loaded = file.load("w")
    assert isinstance(loaded, GgmlWeight)
    assert torch.equal(loaded.blocks, torch.from_numpy(blocks))
    some = file.load_rows("w", 2, 4)
    assert isinstance(some, GgmlWeight)
    assert torch.equal(some.blocks, loaded.blocks[2:4])
    assert loaded.nbytes == loaded.shape[0] * loaded.shape[1] * held_bytes(KINDS[name])
    assert file.losses() == {}


@pytest.mark.parametrize("name", ["IQ2_XXS", "TQ2_0"])
def test_types_without_kernels_are_widened_and_say_so(tmp_path: Path, name: str) -> None:
    blocks = random_blocks(name, rows=16, blocks=4)
    exact = exact_values(name, blocks)
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": (name, blocks)}))
    loaded = file.load("w")
    assert isinstance(loaded, PackedWeight)
    assert (loaded.bits, loaded.group_size) == (8, 32)
    found = float((loaded.dequantize() - exact).norm() / exact.norm())
    assert 0 < found <= 0.007
    assert file.losses() == {name: pytest.approx(found, rel=1e-3)}


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


@pytest.mark.parametrize("name", sorted(HALVES.keys() | {"Q4_0", "Q4_1", "Q8_0"}))
@pytest.mark.parametrize("value", [0x7C00, 0x7C01, 0x7E00, 0x7BFF], ids=hex)
def test_scales_that_are_no_numbers_are_refused_without_a_warning(
    tmp_path: Path, name: str, value: int
) -> None:
    """Infinity, a signaling and a quiet NaN, and the largest number, which some types accept."""
    blocks = np.random.default_rng(0).integers(0, 256, (3, 2, KINDS[name].block_bytes), np.uint8)
    for start in HALVES.get(name, (0, 2) if name == "Q4_1" else (0,)):
        blocks[..., start : start + 2] = list(value.to_bytes(2, "little"))
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
    blocks = random_blocks("IQ2_XXS", rows=7)
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": ("IQ2_XXS", blocks)}))
    whole = file.load("w")
    monkeypatch.setattr(tensors, "READ_AT_ONCE", 4 * 3 * 256 + 100)
    monkeypatch.setattr(tensors, "CONVERTED_AT_ONCE", 3 * 3 * 256)  # of seven
    pieces = file.load("w")
    assert isinstance(whole, PackedWeight)
    assert isinstance(pieces, PackedWeight)
    assert torch.equal(pieces.dequantize(), whole.dequantize())


@pytest.mark.parametrize("name", ["Q6_K", "IQ2_XXS"])
def test_a_tensor_is_read_in_inference_mode_too(tmp_path: Path, name: str) -> None:
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": (name, random_blocks(name))}))
    expected = file.load("w")
    with torch.inference_mode():
        found = file.load("w")
    assert not isinstance(expected, torch.Tensor)
    assert not isinstance(found, torch.Tensor)
    assert torch.equal(found.dequantize(), expected.dequantize())


def test_largest_weights_and_zeros_are_kept() -> None:
    values = torch.zeros(2, 64)
    values[0, :32] = torch.linspace(-1.27, 1.27, 32)
    found = requantize(values).dequantize()
    assert float((found - values)[0, :32].abs().max()) <= 0.0051
    assert not found[1].any()
    assert not found[0, 32:].any()


def test_losses_add_up() -> None:
    one, other = Loss(4.0, 0.0), Loss(12.0, 0.16)
    assert (one + other).relative == pytest.approx(0.1)
    assert Loss().relative == 0


def test_a_type_that_nobody_reads_is_named(tmp_path: Path) -> None:
    name = "Q8_K"
    blocks = np.zeros((2, 1, KINDS[name].block_bytes), dtype=np.uint8)
    path = write(tmp_path / "model.gguf", {"w": (name, blocks)})
    with pytest.raises(UnsupportedModelError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert f"'w' of {path} has type Q8_K" in message
    assert "use a file quantized as" in message
