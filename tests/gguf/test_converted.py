"""Types of GGUF that become packed weights: exact where they can be, and how near where not."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from appliance.errors import UnsupportedModelError
from appliance.gguf import GGUFFile, k_quants, tensors
from appliance.gguf.converted import Loss, convert, requantize
from appliance.gguf.types import TENSOR_TYPES, held_bits
from appliance.kernels.packed import PackedWeight

# Where a block's float16 scales lie; every other byte may have any value.
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
# Relative errors of the conversion that nothing may exceed, a little above what was measured with
# random blocks: of Q4_K and Q5_K only scales are rounded, the others are brought to 8 bits.
BOUNDS = {"Q4_K": 0.0003, "Q5_K": 0.0003} | dict.fromkeys(
    ("Q2_K", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS"), 0.007
)
KINDS = {kind.name: kind for kind in TENSOR_TYPES.values()}


def random_blocks(name: str, rows: int = 4, blocks: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    """(rows, blocks, bytes): any codes, scales as models have them."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, blocks, KINDS[name].block_bytes), dtype=np.uint8)
    for start in HALVES[name]:
        scales = random.uniform(1e-4, 4e-4, (rows, blocks)).astype(np.float16)
        data[..., start : start + 2] = scales[..., None].view(np.uint8)
    return data


def exact_values(name: str, blocks: NDArray[np.uint8]) -> torch.Tensor:
    """What the `gguf` package says they are."""
    kind = gguf.GGMLQuantizationType[name]
    return torch.from_numpy(dequantize(blocks.reshape(len(blocks), -1), kind))


@given(st.sampled_from(["Q4_K", "Q5_K"]), st.integers(0, 10**6))
@settings(derandomize=True, max_examples=20)
def test_codes_and_scales_are_exact_before_they_are_rounded(name: str, seed: int) -> None:
    blocks = random_blocks(name, seed=seed)
    unpack = k_quants.q4_k if name == "Q4_K" else k_quants.q5_k
    weight = unpack(torch.from_numpy(blocks))
    assert torch.equal(weight.dequantize(), exact_values(name, blocks))


@given(st.integers(0, 10**6))
@settings(derandomize=True, max_examples=20)
def test_six_bits_are_read_exactly(seed: int) -> None:
    blocks = random_blocks("Q6_K", seed=seed)
    values = k_quants.q6_k_values(torch.from_numpy(blocks))
    assert torch.equal(values, exact_values("Q6_K", blocks))


@pytest.mark.parametrize("name", BOUNDS)
def test_the_loss_is_small_and_is_what_is_said(tmp_path: Path, name: str) -> None:
    blocks = random_blocks(name, rows=16, blocks=4)
    exact = exact_values(name, blocks)
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": (name, blocks)}))
    assert file.losses() == {}
    loaded = file.load("w")
    assert isinstance(loaded, PackedWeight)
    assert loaded.shape == tuple(exact.shape)
    assert (loaded.bits, loaded.group_size) == (held_bits(name), 32)
    found = float((loaded.dequantize() - exact).norm() / exact.norm())
    assert 0 < found <= BOUNDS[name]
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


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_pieces_make_the_same_weight(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": (name, random_blocks(name, rows=7))}))
    whole = file.load("w")
    monkeypatch.setattr(tensors, "READ_AT_ONCE", 4 * 3 * 256 + 100)
    monkeypatch.setattr(tensors, "CONVERTED_AT_ONCE", 3 * 3 * 256)  # of seven
    pieces = file.load("w")
    assert isinstance(whole, PackedWeight)
    assert isinstance(pieces, PackedWeight)
    assert torch.equal(pieces.dequantize(), whole.dequantize())


def test_a_tensor_is_read_in_inference_mode_too(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": ("Q6_K", random_blocks("Q6_K"))}))
    expected = file.load("w")
    with torch.inference_mode():
        found = file.load("w")
    assert isinstance(expected, PackedWeight)
    assert isinstance(found, PackedWeight)
    assert torch.equal(found.dequantize(), expected.dequantize())


def test_memory_beside_the_result_does_not_grow_with_the_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GGUFFile(write(tmp_path / "m.gguf", {"w": ("Q6_K", random_blocks("Q6_K", rows=64))}))
    sizes: list[int] = []
    real = convert

    def watched(name: str, blocks: torch.Tensor) -> object:
        sizes.append(blocks.nbytes)
        return real(name, blocks)

    monkeypatch.setattr(tensors, "convert", watched)
    monkeypatch.setattr(tensors, "CONVERTED_AT_ONCE", 8 * 3 * 256)
    file.load("w")
    assert sizes == [3 * 210] + [8 * 3 * 210] * 8  # the first row says what the result is like


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
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": (name, blocks)}))
    with pytest.raises(UnsupportedModelError, match=r"'w' .* has type Q8_K.*use a file quantized"):
        file.load("w")


def test_threads_write_what_is_loaded_where_nothing_is_learned(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "model.gguf", {"w": ("Q4_K", random_blocks("Q4_K", rows=7))}))
    with torch.inference_mode():
        inside = file.load("w")
    outside = file.load("w")
    assert isinstance(inside, PackedWeight)
    assert isinstance(outside, PackedWeight)
    assert torch.equal(inside.codes, outside.codes)
