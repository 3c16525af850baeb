"""Planned memory of towers against what allocators hand out while a picture is encoded."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf.projector_files import q8_0, write_projector
from support.models.native_models import LIBRARY
from support.models.towers import TOWER_CASES, text_of, with_tower

from appliance.engine.nouns.picture import CanvasPixels
from appliance.engine.run.picture_encoder import PictureEncoder
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.structs import Isa
from appliance.media.sizing import Canvas, FixedRule
from appliance.media.spec import ImageProcessorSpec, PromptWords
from appliance.model.vision.source import TowerSource, open_projector, open_tower
from appliance.model.vision.tower import NativeLayers, Tower, load_native_tower
from appliance.model.vision.workspace import RowForm, workspace_bytes

THREADS = 2
WIDE = {"hidden_size": 192, "intermediate_size": 512}
HEADS = {"num_attention_heads": 4}
GEMMA4 = HEADS | {"head_dim": 48, "num_key_value_heads": 4, "position_embedding_size": 72}
Grid = tuple[int, int]
# Vision settings, patches of a tile, tiles.
CASES: dict[str, tuple[dict[str, Any], Grid, Grid]] = {
    "qwen2_5_vl": ({"num_heads": 4}, (64, 64), (1, 1)),
    "qwen3_vl": ({"num_heads": 4}, (64, 80), (1, 1)),
    "mistral3": (HEADS | {"image_size": 14 * 80}, (60, 78), (1, 1)),
    "paddleocr_vl": (HEADS, (80, 60), (1, 1)),
    "smolvlm": (HEADS | {"image_size": 224}, (32, 32), (4, 4)),
    "internvl": (HEADS | {"image_size": [224, 224]}, (32, 32), (3, 4)),
    "gemma3": (HEADS | {"image_size": 448}, (64, 64), (1, 1)),
    "gemma4": (GEMMA4, (63, 72), (1, 1)),
}


def wide_model(name: str) -> Any:
    case = TOWER_CASES[name]
    return with_tower(replace(case, vision=case.vision | WIDE | CASES[name][0]))


def measured(tower: Tower, engine: NativeEngine, tile: Grid, tiles: Grid) -> int:
    """Bytes of the library's workspace, of keys and values, and of arrays at their peak."""
    size, merge = tower.spec.patch.size, tower.spec.merge
    height, width = (patches * size * count for patches, count in zip(tile, tiles, strict=True))
    processor = ImageProcessorSpec(
        FixedRule(size * merge, height, width), size, 3, 1 / 255, (0.5,) * 3, (0.5,) * 3, 1,
        tower.spec.patch.channels_last, PromptWords(""),
    )  # fmt: skip
    pixels = np.random.default_rng(1).integers(0, 256, height * width * 3, np.uint8).tobytes()
    canvas = Canvas(((height, width),), *tiles)
    cells = (tile[0] // merge, tile[1] // merge)
    encode = PictureEncoder(tower, processor)
    encode(CanvasPixels(b"", canvas, pixels, cells))  # what is kept from then on
    tracemalloc.start()
    encode(CanvasPixels(b"", canvas, pixels, cells))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    layers = tower.runs[0]
    assert isinstance(layers, NativeLayers)
    cache = layers.cache.room_for(1)
    return engine.workspace_bytes + cache.num_blocks * cache.block_bytes + peak


def assert_planned(name: str, model: Any, source: TowerSource, dtype: str, form: RowForm) -> None:
    engine = NativeEngine(LIBRARY, THREADS)
    tower = load_native_tower(source, engine, dtype)
    _, tile, tiles = CASES[name]
    width = model.config.get_text_config().hidden_size
    cells = tile[0] * tile[1] // tower.spec.merge**2
    planned = workspace_bytes(source.spec, tiles[0] * tiles[1], cells, width, THREADS, form)
    assert planned == pytest.approx(measured(tower, engine, tile, tiles), rel=0.03)
    engine.close()


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_what_allocators_hand_out(name: str, save: Callable[[Any], Path]) -> None:
    model = wide_model(name)
    source = open_tower(save(model), in_torch=False)
    assert source is not None
    assert_planned(name, model, source, "float32", RowForm.PLAIN)


def test_rows_in_other_forms_are_counted(save: Callable[[Any], Path], tmp_path: Path) -> None:
    model = wide_model("qwen3_vl")
    folder = save(model)
    source = open_tower(folder, in_torch=False)
    assert source is not None
    in_tiles = LIBRARY.ap_current_isa() == Isa.AMX
    form = RowForm.SPLIT if in_tiles else RowForm.PLAIN
    assert_planned("qwen3_vl", model, source, "bfloat16", form)
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    file = write_projector(tmp_path / "mmproj-Q8_0.gguf", model, processor, q8_0)
    packed = open_projector(file, text_of(folder, "qwen3_vl"), in_torch=False)
    assert_planned("qwen3_vl", model, packed, "float32", RowForm.CODES)
