"""What stands around the rows of a picture in the prompt, against transformers' processors."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.media.processors import CASES
from transformers import Siglip2ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from appliance.media.decode import resize
from appliance.media.patches import patches
from appliance.media.processor_config import image_processor_of
from appliance.media.spec import ImageProcessorSpec

SIZES = [(150, 231), (700, 333), (1000, 1000), (40, 300), (60, 60)]
# Written by transformers 5.24 with torchvision 0.28, without which these two classes do not load:
# sizes of black pictures and, for each, tile rows and columns and the view's size (LFM2-VL), or
# rows and columns of cells (Gemma 4 unified), as their results say.
TORCHVISION = json.loads((Path(__file__).parent / "torchvision_sizes.json").read_text())


def spec_of(class_name: str, model_type: str) -> ImageProcessorSpec:
    return image_processor_of({"image_processor_type": class_name}, {}, {"model_type": model_type})


LFM2 = spec_of("Lfm2VlImageProcessor", "lfm2_vl")
UNIFIED = spec_of("Gemma4UnifiedImageProcessor", "gemma4_unified")


def words_of(spec: ImageProcessorSpec, image: str, height: int, width: int) -> str:
    canvases = spec.canvases(height, width)
    segments = spec.segments(canvases)
    assert sum(segment.rows for segment in segments) == spec.rows(canvases)
    words = "".join(segment.text + image * segment.rows for segment in segments)
    before, behind = spec.words.beside
    return before + words + behind


def processed(name: str, height: int, width: int) -> Any:
    case = CASES[name]
    more = {"return_row_col_info": True} if "smolvlm" in name or name == "idefics3" else {}
    return case.reference(
        images=Image.new("RGB", (width, height)), return_tensors="np", **case.calls, **more
    )


# What each processor takes from its tokenizer and its own file.
SMOLVLM = {
    "image_seq_len": 64,
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
}
PROCESSORS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "qwen3_5": (
        Qwen3VLProcessor, "<|image_pad|>",
        {"image_token": "<|image_pad|>", "image_processor": SimpleNamespace(merge_size=2)},
    ),
    "gemma3": (
        Gemma3Processor, "<image_soft_token>",
        {
            "full_image_sequence": "\n\n<start_of_image>" + "<image_soft_token>" * 256
            + "<end_of_image>\n\n"
        },
    ),
    "gemma4": (
        Gemma4Processor, "<|image|>",
        {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
    ),
    "mistral3": (
        None, "[IMG]",
        {
            "patch_size": 14, "spatial_merge_size": 2, "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]",
        },
    ),
    "smolvlm": (SmolVLMProcessor, "<image>", SMOLVLM),
    "smolvlm, whole": (SmolVLMProcessor, "<image>", SMOLVLM | {"image_seq_len": 81}),
    "idefics3": (
        Idefics3Processor, "<image>",
        SMOLVLM | {"image_seq_len": 169, "global_image_tag": "<global-img>"},
    ),
    "internvl": (
        InternVLProcessor, "<IMG_CONTEXT>",
        {
            "start_image_token": "<img>", "end_image_token": "</img>",
            "image_token": "<IMG_CONTEXT>", "image_seq_length": 256,
        },
    ),
}  # fmt: skip


@pytest.fixture
def pixtral(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pixtral's processor; its module imports the class that needs torchvision."""
    package = "transformers.models.pixtral"
    missing = f"{package}.image_processing_pixtral"
    monkeypatch.setitem(sys.modules, missing, image_processing_pil_pixtral)
    module = import_module(f"{package}.processing_pixtral")
    monkeypatch.delitem(sys.modules, f"{package}.processing_pixtral")
    return module.PixtralProcessor


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_words_are_the_references(name: str, height: int, width: int, pixtral: Any) -> None:
    processor, image, attributes = PROCESSORS[name]
    processor = processor or pixtral
    inputs = processed(name, height, width)
    expected = processor.replace_image_token(SimpleNamespace(**attributes), inputs, 0)
    assert words_of(CASES[name].spec, image, height, width) == expected


def test_tiles_and_words_of_lfm2_are_the_references() -> None:
    own = SimpleNamespace(
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
        image_token="<image>",
    )
    assert len(TORCHVISION["lfm2"]) > 100
    for height, width, rows, columns, view in TORCHVISION["lfm2"]:
        canvases = LFM2.canvases(height, width)
        assert (canvases[0].rows, canvases[0].columns) == (rows, columns), (height, width)
        assert (canvases[-1].height, canvases[-1].width) == tuple(view)
        count = (view[0] // 32) * (view[1] // 32)
        expected = Lfm2VlProcessor._build_image_tokens(own, rows, columns, 256, count, True, True)
        assert words_of(LFM2, "<image>", height, width) == expected


def test_cells_of_gemma4_unified_are_the_references() -> None:
    assert len(TORCHVISION["unified"]) > 100
    for height, width, rows, columns in TORCHVISION["unified"]:
        (canvas,) = UNIFIED.canvases(height, width)
        assert (canvas.height, canvas.width) == (48 * rows, 48 * columns), (height, width)


def test_patches_of_lfm2_are_those_of_siglip2(photographs: Path) -> None:
    """Its own class needs torchvision, and makes of a picture of this size the same."""
    picture = Image.open(photographs / "coffee.png").convert("RGB").crop((0, 0, 512, 320))
    expected = Siglip2ImageProcessorPil()(
        images=picture, do_resize=False, max_num_patches=640, return_tensors="np"
    )
    (canvas,) = LFM2.canvases(320, 512)
    found = patches(LFM2, canvas, resize(picture, [canvas], LFM2.resample)[0])
    np.testing.assert_array_equal(found, expected["pixel_values"])


def test_patches_of_gemma4_unified_are_squares_of_gemma4s(photographs: Path) -> None:
    """3 x 3 of the patches of 16 pixels, put together as a picture."""
    picture = Image.open(photographs / "chelsea.png").convert("RGB")
    case = CASES["gemma4"]
    (canvas,) = UNIFIED.canvases(picture.height, picture.width)
    rows, columns = canvas.height // 48, canvas.width // 48
    small = case.reference(images=picture, return_tensors="np")["pixel_values"][0]
    small = small[: rows * columns * 9].reshape(rows, 3, columns, 3, 16, 16, 3)
    expected = small.transpose(0, 2, 1, 4, 3, 5, 6).reshape(rows * columns, -1)
    found = patches(UNIFIED, canvas, resize(picture, [canvas], UNIFIED.resample)[0])
    np.testing.assert_array_equal(found[0], expected)
