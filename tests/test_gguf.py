from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from appliance.errors import ApplianceError, CheckpointError, UnsupportedModelError
from appliance.gguf import GGUFFile
from appliance.gguf.types import TENSOR_TYPES
from appliance.kernels.weights.packed import OffsetKind, PackedWeight

QUANTIZED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def write_file(path: Path, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Write a small file with one matrix of each type; return its values in float32."""
    rng = np.random.default_rng(seed)
    expected: dict[str, np.ndarray] = {}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_token_list(["<s>", "héllo", "▁日本", "🙂"])
    writer.add_token_scores([0.0, -1.0, -2.0, -3.0])
    writer.add_token_types([3, 1, 1, 1])
    for name in QUANTIZED:
        matrix = rng.standard_normal((6, 96)).astype(np.float32)
        kind = gguf.GGMLQuantizationType[name]
        raw = quantize(matrix, kind)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
        expected[f"{name}.weight"] = dequantize(raw, kind)
    for name, dtype in (("norm.weight", np.float32), ("half.weight", np.float16)):
        expected[name] = rng.standard_normal(7).astype(dtype)
        writer.add_tensor(name, expected[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "valid.gguf"
    write_file(path)
    return path


def test_metadata_has_plain_python_values(valid: Path) -> None:
    metadata = GGUFFile(valid).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.context_length"] == 2048
    assert metadata["llama.rope.freq_base"] == 10000.0
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.tokens"] == ["<s>", "héllo", "▁日本", "🙂"]
    assert metadata["tokenizer.ggml.scores"] == [0.0, -1.0, -2.0, -3.0]


def test_a_model_does_without_the_arrays_of_its_tokenizer(valid: Path) -> None:
    whole, file = GGUFFile(valid), GGUFFile(valid, vocabulary=False)
    arrays = {f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type")}
    assert whole.metadata.keys() - file.metadata.keys() == arrays
    assert file.metadata == {k: v for k, v in whole.metadata.items() if k not in arrays}
    assert all(file.type(name) == whole.type(name) for name in whole.tensor_names())
    found, expected = file.load("norm.weight"), whole.load("norm.weight")
    assert isinstance(found, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(found, expected)


def test_names_shapes_and_types(valid: Path) -> None:
    file = GGUFFile(valid)
    assert file.tensor_names() == [f"{name}.weight" for name in [*QUANTIZED, "norm", "half"]]
    assert file.shape("Q4_1.weight") == (6, 96)
    assert file.type_name("Q4_1.weight") == "Q4_1"
    assert file.shape("norm.weight") == (7,)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_matrices_keep_their_exact_values(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    expected = write_file(path, seed=3)[f"{name}.weight"]
    loaded = GGUFFile(path).load(f"{name}.weight")
    values = loaded if isinstance(loaded, torch.Tensor) else loaded.dequantize()
    assert values.dtype is torch.float32
    np.testing.assert_array_equal(values.numpy(), expected)


def test_a_matrix_that_is_loaded_in_inference_mode_is_an_ordinary_one(valid: Path) -> None:
    with torch.inference_mode():
        packed = GGUFFile(valid).load("Q4_1.weight")
    assert isinstance(packed, PackedWeight)
    assert not packed.codes.is_inference()


@pytest.mark.parametrize(("name", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
def test_packable_types_stay_packed(valid: Path, name: str, bits: int) -> None:
    packed = GGUFFile(valid).load(f"{name}.weight")
    assert isinstance(packed, PackedWeight)
    assert (packed.bits, packed.group_size) == (bits, 32)
    assert packed.offset_kind is OffsetKind.ADDITIVE
    assert packed.scale.dtype is packed.offset.dtype is torch.float16


def test_dense_types_keep_their_dtype(valid: Path, tmp_path: Path) -> None:
    file = GGUFFile(valid)
    expected = write_file(tmp_path / "same.gguf")
    for name, dtype in (("norm.weight", torch.float32), ("half.weight", torch.float16)):
        loaded = file.load(name)
        assert isinstance(loaded, Tensor)
        assert loaded.dtype is dtype
        np.testing.assert_array_equal(loaded.numpy(), expected[name])


def test_the_type_table_agrees_with_the_gguf_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert theirs.name == kind.name
        assert gguf.GGML_QUANT_SIZES[theirs] == (kind.block_size, kind.block_bytes)


def test_opening_a_file_loads_no_torch(valid: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from appliance.gguf import GGUFFile\n"
        f"GGUFFile(Path({str(valid)!r}))\n"
        "assert not {'torch', 'numpy', 'gguf'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# --- damaged and foreign files ------------------------------------------------------------------


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return string(name) + dimensions + struct.pack("<IQ", kind, offset)


def build(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file from its raw parts; `counts` overrides (tensors, entries)."""
    entries, tensors = entries or [], tensors or []
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    header = magic + struct.pack("<IQQ", version, num_tensors, num_entries)
    header += b"".join(entries) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


F32_AT_0 = tensor("a", [8], 0, 0)
F32_AT_32 = tensor("b", [8], 0, 32)
DEEP = struct.pack("<IQ", 9, 1) * 50 + struct.pack("<IQB", 0, 1, 7)

BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "short magic": (b"GG", "cut off"),
    "only magic": (b"GGUF", "cut off"),
    "zip": (b"PK\x03\x04" + bytes(100), "zip archive"),
    "git lfs pointer": (b"version https://git-lfs...", "Git LFS pointer"),
    "web page": (b"<!DOCTYPE html><html>", "web page"),
    "random": (b"\x93\x00\x01\x02" * 10, "something else"),
    "version 1": (build(version=1), "version 1"),
    "big-endian": (build(version=3 << 24), "big-endian"),
    "huge entry count": (build(counts=(0, 2**60)), "announces"),
    "huge tensor count": (build(counts=(2**63, 0)), "announces"),
    "huge key": (build([struct.pack("<Q", 2**62)], counts=(0, 1)) + bytes(16), "string of"),
    "huge array": (build([entry("k", 9, struct.pack("<IQ", 4, 2**61))]), "announces"),
    "huge string array": (build([entry("k", 9, struct.pack("<IQ", 8, 2**50))]), "announces"),
    "cut string array": (
        build([entry("k", 9, struct.pack("<IQ", 8, 2) + string("a") + struct.pack("<Q", 2**40))]),
        "cut off",
    ),
    "array nesting": (build([entry("k", 9, DEEP)]), "deep"),
    "unknown value type": (build([entry("k", 77, bytes(8))]), "unknown type 77"),
    "not utf-8": (build([entry("k", 8, string(b"\xff\xfe"))]), "UTF-8"),
    "key twice": (build([entry("k", 4, bytes(4))] * 2), "occurs twice"),
    "tensor twice": (build(tensors=[F32_AT_0, F32_AT_0], data=bytes(64)), "occurs twice"),
    "alignment 0": (
        build([entry("general.alignment", 4, struct.pack("<I", 0))]),
        "alignment is 0",
    ),
    "alignment 24": (
        build([entry("general.alignment", 4, struct.pack("<I", 24))]),
        "alignment is 24",
    ),
    "alignment of text": (build([entry("general.alignment", 8, string("32"))]), "alignment is"),
    "data cut": (build(tensors=[F32_AT_0], data=bytes(31)), "ends at byte"),
    "data missing": (build(tensors=[F32_AT_0]), "ends at byte"),
    "huge tensor": (
        build(tensors=[tensor("a", [2**40, 2**40], 0, 0)], data=bytes(32)),
        "ends at byte",
    ),
    "overlap": (
        build(tensors=[F32_AT_0, tensor("b", [8], 0, 16)], data=bytes(64)),
        "where the one before it ends",
    ),
    "hole": (
        build(tensors=[F32_AT_0, tensor("b", [8], 0, 64)], data=bytes(96)),
        "where the one before it ends",
    ),
    "offset beyond": (build(tensors=[tensor("a", [8], 0, 2**63)], data=bytes(32)), "lies at byte"),
    "zero size": (build(tensors=[tensor("a", [0], 0, 0)], data=bytes(32)), "impossible shape"),
    "block does not divide": (
        build(tensors=[tensor("a", [33], 2, 0)], data=bytes(64)),
        "impossible shape",
    ),
    "many dimensions": (
        build(tensors=[tensor("a", [1] * 9, 0, 0)], data=bytes(32)),
        "9 dimensions",
    ),
}


# The advice for files that are not damaged.
ADVICE = {
    "zip": "give a GGUF file",
    "git lfs pointer": "git lfs pull",
    "version 1": "convert the model anew",
    "big-endian": "convert the model anew",
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    content, reason = BAD_FILES[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert reason in message
    assert str(path) in message
    assert ADVICE.get(case, "download it again") in message
    assert case not in ADVICE or "again" not in message
    assert "\n" not in message


def test_hand_made_files_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    values = np.arange(16, dtype=np.float32)
    path.write_bytes(build(tensors=[F32_AT_0, F32_AT_32], data=values.tobytes()))
    loaded = GGUFFile(path).load("b")
    assert isinstance(loaded, Tensor)
    np.testing.assert_array_equal(loaded.numpy(), values[8:])


@pytest.mark.parametrize(
    "content",
    [
        build(tensors=[F32_AT_32, F32_AT_0], data=np.arange(16, dtype=np.float32).tobytes()),
        build(tensors=[F32_AT_0, F32_AT_32], data=np.arange(99, dtype=np.float32).tobytes()),
        build(
            [
                entry("general.alignment", 4, struct.pack("<I", 4)),
                entry("k", 9, struct.pack("<IQ", 4, 0)),
            ],
            [F32_AT_0, F32_AT_32, tensor("scalar", [], 0, 64)],
            np.arange(17, dtype=np.float32).tobytes(),
            version=2,
            alignment=4,
        ),
    ],
    ids=["out of order", "bytes behind the last tensor", "version 2, alignment 4, scalar"],
)
def test_what_others_read_is_read(tmp_path: Path, content: bytes) -> None:
    """llama.cpp reads no byte after the last tensor, and accepts any power of two."""
    path = tmp_path / "good.gguf"
    path.write_bytes(content)
    file = GGUFFile(path)
    found, second = file.load("a"), file.load("b")
    assert isinstance(found, Tensor)
    assert isinstance(second, Tensor)
    np.testing.assert_array_equal(found.numpy(), np.arange(8))
    np.testing.assert_array_equal(second.numpy(), np.arange(8, 16))
    if "scalar" in file.tensor_names():
        scalar = file.load("scalar")
        assert isinstance(scalar, Tensor)
        assert scalar.tolist() == [16.0]


def test_unknown_tensor_type_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    for number, said in ((66, "unknown"), (41, "Q1_0"), (31, "one processor"), (137, "ik_llama")):
        path.write_bytes(build(tensors=[tensor("blk.0.w", [8], number, 0)], data=bytes(32)))
        with pytest.raises(UnsupportedModelError, match=rf"'blk\.0\.w'.*type {number} .*{said}"):
            GGUFFile(path)


# --- models in several files --------------------------------------------------------------------


def write_parts(folder: Path, *, per_part: int = 3) -> list[Path]:
    """The matrices of `write_file` as gguf's own writer splits them."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(folder / "big.gguf", "llama", split_max_tensors=per_part)
    writer.add_context_length(2048)
    writer.add_token_list(["<s>", "a"])
    for name in QUANTIZED:
        kind = gguf.GGMLQuantizationType[name]
        raw = quantize(rng.standard_normal((6, 96)).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("big-*.gguf"))


def test_a_split_model_is_read_by_any_of_its_parts(valid: Path, tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    assert [part.name for part in parts] == ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]
    whole = GGUFFile(valid)
    for path in parts:
        file = GGUFFile(path)
        assert file.path == parts[0]
        assert file.metadata["llama.context_length"] == 2048
        assert file.tensor_names() == [f"{name}.weight" for name in QUANTIZED]
        for name in file.tensor_names():
            found, expected = file.load(name), whole.load(name)
            values = [w if isinstance(w, Tensor) else w.dequantize() for w in (found, expected)]
            assert torch.equal(*values)


def test_parts_that_are_no_model_are_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    renamed = tmp_path / "part.gguf"
    renamed.write_bytes(parts[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"part\.gguf is no whole model.*count 2 parts"):
        GGUFFile(renamed)
    alone = tmp_path / "one-00001-of-00001.gguf"
    write_file(alone)
    assert GGUFFile(alone).tensor_names()
    content = parts[1].read_bytes()
    parts[1].unlink()
    for path in parts:
        with pytest.raises(CheckpointError, match=r"big-00002-of-00002.gguf is missing.*1 of 2"):
            GGUFFile(path)
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"numbers \[0, 0\]"):
        GGUFFile(parts[0])
    parts[1].write_bytes(content)
    (tmp_path / "other").mkdir()
    write_parts(tmp_path / "other", per_part=4)[1].replace(parts[1])
    with pytest.raises(CheckpointError, match="hold 4 tensors"):
        GGUFFile(parts[0])


def test_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        GGUFFile(tmp_path / "none.gguf")


@pytest.mark.parametrize("scale", [np.inf, np.nan, 6e4])
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_damaged_scales_are_refused(tmp_path: Path, name: str, scale: float) -> None:
    number = next(number for number, kind in TENSOR_TYPES.items() if kind.name == name)
    block = struct.pack("<e", scale) + bytes(TENSOR_TYPES[number].block_bytes - 2)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(build(tensors=[tensor("w", [32, 1], number, 0)], data=block))
    with pytest.raises(CheckpointError, match=r"'w'.*scales"):
        GGUFFile(path).load("w")


def test_a_file_cut_after_opening_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_file(path)
    file = GGUFFile(path)
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        file.load("half.weight")


def complaint(path: Path) -> str | None:
    """Read the whole file; return the reason of a refusal, if any."""
    try:
        file = GGUFFile(path)
        for name in file.tensor_names():
            file.load(name)
    except ApplianceError as error:
        return str(error)
    return None


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mutation_is_read_or_refused(valid: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(valid.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, 1200))  # the header and a little of the tensors
        patch = data.draw(st.binary(min_size=1, max_size=8))
        content[position : position + len(patch)] = patch
    path = tmp_path / "mutated.gguf"
    path.write_bytes(content)
    message = complaint(path)
    assert message is None or str(path) in message


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_is_refused(valid: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = valid.read_bytes()
    last_byte = len(content) - 32  # the padding behind the last tensor may be missing
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, last_byte))])
    assert "download it again" in (complaint(path) or "")


@pytest.mark.model
def test_real_file_agrees_with_the_gguf_package(smollm2_gguf: Path) -> None:
    reader = gguf.GGUFReader(smollm2_gguf)
    file = GGUFFile(smollm2_gguf)
    assert len(file.tensor_names()) == len(reader.tensors) == 272
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    for theirs in reader.tensors[1:12]:
        ours = file.load(theirs.name)
        values = ours if isinstance(ours, torch.Tensor) else ours.dequantize()
        np.testing.assert_array_equal(
            values.numpy(), dequantize(theirs.data, theirs.tensor_type).reshape(values.shape)
        )
