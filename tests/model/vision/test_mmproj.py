"""Projector files of other types than float32, early ones, and those that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf.projector_files import bf16, f16, q8_0, write_projector
from support.models.native_models import LIBRARY
from support.models.towers import TOWER_CASES, text_of, with_tower

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.vision.source import open_projector
from appliance.model.vision.torch_tower import load_torch_tower
from appliance.model.vision.tower import PatchGrid, load_native_tower

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.source import ModelSource

PROCESSOR: dict[str, Any] = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"longest_edge": 112},
}
WIDE = {"hidden_size": 64, "intermediate_size": 96}  # of whole blocks of 32


def wide(name: str, **more: Any) -> Any:
    case = TOWER_CASES[name]
    return with_tower(replace(case, vision=case.vision | WIDE | more))


def rounded(model: Any, packed: Callable[[str, Any], Any]) -> dict[str, torch.Tensor]:
    """The model's weights as gguf's package reads back what it writes of them."""
    state = {}
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        kind = packed("" if "patch" not in name and "position" not in name else "patch_embd", data)
        if kind is not None and "pos_embed" not in name and "model.language" not in name:
            stored = gguf.quants.quantize(data, kind)
            tensor = torch.tensor(gguf.quants.dequantize(stored, kind)).reshape(tensor.shape)
        state[name] = tensor
    return state


def q8_apart_from_table(name: str, data: Any) -> Any:
    return None if "position" in name else q8_0(name, data)


@pytest.mark.parametrize("heads", [2, 4])  # widths of 32, and of 16
@pytest.mark.parametrize("packed", [q8_0, f16, bf16])
def test_rows_are_those_of_the_stored_weights(
    packed: Callable[[str, Any], Any], heads: int, save: Callable[[Any], Path], tmp_path: Path
) -> None:
    model = wide("qwen3_vl", num_heads=heads)
    text = text_of(save(model), "qwen3_vl")
    file = write_projector(tmp_path / "mmproj.gguf", model, PROCESSOR, packed)
    as_stored = wide("qwen3_vl", num_heads=heads)
    names = {name for name in model.state_dict() if "visual" in name}
    own = {k: v for k, v in rounded(model, packed).items() if k in names}
    as_stored.load_state_dict(model.state_dict() | own)
    exact = write_projector(tmp_path / "mmproj-F32.gguf", as_stored, PROCESSOR)
    patches = np.random.default_rng(3).normal(size=(48, 768)).astype(np.float32)
    picture = [PatchGrid(patches, 6, 8)]

    def rows(path: Path) -> np.ndarray:
        source = open_projector(path, text)
        tower = load_torch_tower(source, torch.device("cpu"), torch.float32)
        return np.asarray(tower(picture)[0].embeddings)

    np.testing.assert_allclose(rows(file), rows(exact), rtol=0, atol=2e-4)


def test_eight_bits_stay_eight_bits(save: Callable[[Any], Path], tmp_path: Path) -> None:
    model = wide("qwen3_vl", num_heads=4)
    text = text_of(save(model), "qwen3_vl")
    file = write_projector(tmp_path / "mmproj-Q8_0.gguf", model, PROCESSOR, q8_0)
    source = open_projector(file, text, in_torch=False)
    linear = "tower.blocks.0.mlp.linear_fc1.weight"
    assert isinstance(source.weights.load(linear), PackedWeight)
    assert source.weights.packed_bits(linear) == 8
    tower = load_native_tower(source, NativeEngine(LIBRARY, 2), np.float32)
    exact = open_projector(file, text)
    wanted = load_torch_tower(exact, torch.device("cpu"), torch.float32)
    patches = np.random.default_rng(3).normal(size=(48, 768)).astype(np.float32)
    rows, exactly = (
        np.asarray(one([PatchGrid(patches, 6, 8)])[0].embeddings) for one in (tower, wanted)
    )
    # The library rounds what is multiplied with 8 bits to 8 bits.
    assert np.corrcoef(rows.ravel(), exactly.ravel())[0, 1] > 0.998
    narrow = open_projector(
        write_projector(tmp_path / "mmproj.gguf", wide("qwen3_vl", num_heads=8), PROCESSOR, q8_0),
        text,
    )
    widened = "tower.blocks.0.attn.qkv.weight"
    assert narrow.weights.packed_bits(widened) is None
    assert narrow.weights.load(widened).shape == narrow.weights.shape(widened) == (3 * 8 * 16, 64)


@pytest.mark.parametrize("name", ["smolvlm", "gemma3"])
def test_early_files_call_up_what_is_down(
    name: str, save: Callable[[Any], Path], tmp_path: Path
) -> None:
    model = with_tower(TOWER_CASES[name])
    text = text_of(save(model), name)
    path = write_projector(tmp_path / "mmproj.gguf", model, PROCESSOR)
    early = _changed(path, tmp_path / "early.gguf", _swapped)
    source, own = (open_projector(file, text, in_torch=False) for file in (early, path))
    for part in ("mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight"):
        tensor = f"tower.encoder.layers.1.{part}"
        np.testing.assert_array_equal(source.weights.load(tensor), own.weights.load(tensor))


def _swapped(name: str) -> str:
    down = name.replace("ffn_down", "ffn_up")
    return down if down != name else name.replace("ffn_up", "ffn_down")


def _changed(path: Path, out: Path, renamed: Callable[[str], str], **settings: Any) -> Path:
    """Write a file again, with tensors under other names, which an empty one leaves out."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, settings.pop("architecture", "clip"))
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            inner = field.types[-1] if len(field.types) > 1 else None
            value = settings.get(key.rpartition(".")[2], field.contents())
            writer.add_key_value(key, value, field.types[0], inner)
    for tensor in reader.tensors:
        if renamed(tensor.name):
            writer.add_tensor(renamed(tensor.name), tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSource]:
    folder = tmp_path_factory.mktemp("smolvlm")
    model = with_tower(TOWER_CASES["smolvlm"])
    model.save_pretrained(folder)
    return write_projector(folder / "mmproj.gguf", model, PROCESSOR), text_of(folder, "smolvlm")


REFUSED: list[tuple[str, Callable[[str], str], dict[str, Any], str]] = [
    ("lacks", lambda n: "" if n == "v.blk.2.ln1.bias" else n, {}, r"v\.blk\.2\.ln1\.bias is mis"),
    ("bare", lambda n: "" if n == "mm.model.fc.weight" else n, {}, r"mm\.model\.fc\.weight is mis"),
    ("heads", str, {"head_count": 7}, "a divisor of hidden_size"),
    ("width", str, {"embedding_length": 44}, "has shape"),
    ("type", str, {"projector_type": "resampler"}, "'resampler', which is not read here"),
    ("other", str, {"projector_type": "lfm2"}, "belongs to lfm2, lfm2moe, and the model is llama"),
    ("text", str, {"architecture": "llama"}, "is no projector file"),
]


@pytest.mark.parametrize("case", REFUSED, ids=[case[0] for case in REFUSED])
def test_files_that_are_refused(
    case: tuple[str, Callable[[str], str], dict[str, Any], str],
    smolvlm: tuple[Path, ModelSource],
    tmp_path: Path,
) -> None:
    path, text = smolvlm
    _, renamed, settings, said = case
    file = _changed(path, tmp_path / "mmproj.gguf", renamed, **settings)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        open_projector(file, text)


def test_layers_beyond_the_last_are_no_part_of_the_tower(
    smolvlm: tuple[Path, ModelSource], tmp_path: Path
) -> None:
    file = _changed(smolvlm[0], tmp_path / "mmproj.gguf", str, block_count=2)
    assert len(open_projector(file, smolvlm[1]).spec.layers.layers) == 2


def test_a_tensor_without_a_place_is_refused(save: Callable[[Any], Path], tmp_path: Path) -> None:
    model = with_tower(TOWER_CASES["lfm2_vl"])
    text = text_of(save(model), "lfm2_vl")
    path = write_projector(tmp_path / "mmproj.gguf", model, PROCESSOR)
    norm = "mm.input_norm."
    plain = _changed(path, tmp_path / "plain.gguf", lambda n: "" if norm in n else n)
    assert open_projector(plain, text).spec.projector.norm is None
    strange = _changed(path, tmp_path / "other.gguf", lambda n: n.replace(norm, "mm.scale."))
    with pytest.raises(CheckpointError, match=r"mm\.scale\.bias has no place in a tower of 3"):
        open_projector(strange, text)


def test_a_file_of_a_wider_model_is_refused(
    smolvlm: tuple[Path, ModelSource], tmp_path: Path
) -> None:
    case = TOWER_CASES["smolvlm"]
    model = with_tower(replace(case, text={"hidden_size": 96}))
    file = write_projector(tmp_path / "mmproj-wide.gguf", model, PROCESSOR)
    with pytest.raises(CheckpointError, match=r"rows of width 96, .* 64 wide; give .* --mmproj"):
        open_projector(file, smolvlm[1])


def test_a_tower_with_taps_is_not_taken_for_one_without(
    save: Callable[[Any], Path], tmp_path: Path
) -> None:
    text = text_of(save(with_tower(TOWER_CASES["qwen3_vl"])), "qwen3_vl")
    other = with_tower(TOWER_CASES["qwen3_5"])
    file = write_projector(tmp_path / "mmproj.gguf", other, PROCESSOR)
    with pytest.raises(CheckpointError, match="is of another model"):
        open_projector(file, text)
