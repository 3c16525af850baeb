"""A projector file and a model folder describe one processor."""

from __future__ import annotations

from typing import Any

import pytest
from gguf.constants import Keys, VisionProjectorType
from support.media.processors import CASES

from appliance.errors import UnsupportedModelError
from appliance.media.mmproj import image_processor_of_mmproj
from appliance.media.processor_config import image_processor_of

VISION = Keys.ClipVision
CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])


def metadata(kind: str, statistics: tuple[list[float], list[float]], **more: Any) -> dict[str, Any]:
    """Metadata under gguf-py's keys."""
    names = {VISION.IMAGE_MEAN: statistics[0], VISION.IMAGE_STD: statistics[1]}
    named = {
        "patch": VISION.PATCH_SIZE,
        "image": VISION.IMAGE_SIZE,
        "merge": VISION.SPATIAL_MERGE_SIZE,
        "scale": VISION.Projector.SCALE_FACTOR,
        "longest": VISION.PREPROC_IMAGE_SIZE,
        "least": VISION.IMAGE_MIN_PIXELS,
        "most": VISION.IMAGE_MAX_PIXELS,
    }
    return {Keys.Clip.PROJECTOR_TYPE: kind, **names} | {named[key]: more[key] for key in more}


FILES = {
    "qwen2_vl": metadata(VisionProjectorType.QWEN25VL, CLIP, patch=14, merge=2, most=28**2 * 1280),
    "qwen3_5": metadata(VisionProjectorType.QWEN3VL, HALF, patch=16, merge=2, most=2**21),
    "glm4v": metadata(VisionProjectorType.GLM4V, CLIP, patch=14, merge=2),
    "paddleocr_vl": metadata(VisionProjectorType.PADDLEOCR, CLIP, patch=14, merge=2),
    "gemma3": metadata(VisionProjectorType.GEMMA3, HALF, patch=14, image=896),
    "gemma4": metadata(VisionProjectorType.GEMMA4V, HALF, patch=16),
    "mistral3": metadata(VisionProjectorType.PIXTRAL, CLIP, patch=14, image=1540, merge=2),
    "smolvlm": metadata(
        VisionProjectorType.IDEFICS3, HALF, patch=16, image=512, scale=4, longest=2048
    ),
    "internvl": metadata(VisionProjectorType.INTERNVL, CLIP, patch=14, image=448, scale=2),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_describes_what_a_folder_does(name: str) -> None:
    assert image_processor_of_mmproj(FILES[name]) == CASES[name].spec


@pytest.mark.parametrize(
    ("kind", "class_name", "model_type"),
    [
        (VisionProjectorType.LFM2, "Lfm2VlImageProcessor", "lfm2_vl"),
        ("gemma4uv", "Gemma4UnifiedImageProcessor", "gemma4_unified"),
    ],
)
def test_so_do_those_whose_class_needs_torchvision(
    kind: str, class_name: str, model_type: str
) -> None:
    folder = image_processor_of(
        {"image_processor_type": class_name}, {}, {"model_type": model_type}
    )
    assert image_processor_of_mmproj(metadata(kind, HALF, patch=16)) == folder


def test_the_type_of_a_file_with_sound_too_has_another_key() -> None:
    given = dict(FILES["qwen3_5"])
    given[VISION.PROJECTOR_TYPE] = given.pop(Keys.Clip.PROJECTOR_TYPE)
    assert image_processor_of_mmproj(given) == CASES["qwen3_5"].spec


def test_an_unknown_type_and_a_missing_key_are_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'ultravox', which is unknown here for images"):
        image_processor_of_mmproj({Keys.Clip.PROJECTOR_TYPE: "ultravox"})
    with pytest.raises(UnsupportedModelError, match=r"patch_size of the projector file is '14'"):
        image_processor_of_mmproj(FILES["smolvlm"] | {VISION.PATCH_SIZE: "14"})
    with pytest.raises(UnsupportedModelError, match="type is None"):
        image_processor_of_mmproj({})
    given = dict(FILES["gemma3"])
    del given[VISION.PATCH_SIZE]
    with pytest.raises(UnsupportedModelError, match=r"has no clip\.vision\.patch_size"):
        image_processor_of_mmproj(given)
