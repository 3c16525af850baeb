"""Files of published models, what they leave out, and what is refused in them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.media.processors import CASES

from appliance.errors import ApplianceError, CheckpointError, UnsupportedModelError
from appliance.media.processor_config import image_processor_of, read_image_processor
from appliance.media.processors import LARGEST, PROCESSORS
from appliance.media.sizing import AreaRule, FixedRule, TileRule, TokenRange

QWEN = {"image_processor_type": "Qwen2VLImageProcessor"}
CONFIG = {"model_type": "qwen2_5_vl"}
# What these make is in test_spec.
NEED_TORCHVISION = {"Gemma4UnifiedImageProcessor", "Lfm2VlImageProcessor"}


def of_qwen(**settings: Any) -> Any:
    return image_processor_of(QWEN | settings, {}, CONFIG)


@pytest.mark.parametrize("name", sorted(PROCESSORS.keys() - NEED_TORCHVISION))
def test_defaults_are_those_of_the_class(name: str) -> None:
    """What a file leaves out is as in the class itself."""
    own = getattr(transformers, f"{name}Pil")()
    for key, value in PROCESSORS[name].defaults.items():
        if key.startswith("tower") or value is None:
            continue  # from config.json, or unused
        found = getattr(own, key)
        if key == "size" or key == "max_image_size":
            found = {side: length for side, length in dict(found).items() if length is not None}
        assert (list(found) if isinstance(found, tuple) else found) == value, key


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_in_either_form(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    inner = case.reference.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(inner))
    (tmp_path / "processor_config.json").write_text(json.dumps(case.outer))
    assert read_image_processor(tmp_path) == case.spec
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Old"}))
    nested = {**case.outer, "image_processor": inner}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert read_image_processor(tmp_path) == case.spec


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    CASES["qwen3_5"].reference.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5"}')
    assert read_image_processor(tmp_path) == CASES["qwen3_5"].spec


def test_a_folder_without_pictures_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_image_processor(tmp_path) is None
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json cannot be read"):
        read_image_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        read_image_processor(tmp_path)


def test_older_files_give_the_bounds_by_other_names() -> None:
    found = of_qwen(min_pixels=3136, max_pixels=12845056)
    assert found.size_rule == AreaRule(28, 3136, 12845056)
    found = of_qwen(min_pixels=6272, size={"shortest_edge": 1, "longest_edge": 99999})
    assert found.size_rule == AreaRule(28, 6272, 99999)


def test_a_file_as_qwen_published_it() -> None:
    """Qwen/Qwen2-VL-2B-Instruct, preprocessor_config.json: the bounds are also in the size."""
    inner = {
        "max_pixels": 1003520, "merge_size": 2, "min_pixels": 3136, "patch_size": 14,
        "resample": 3, "temporal_patch_size": 2, "vision_token_id": 151654,
        "size": {"max_pixels": 1003520, "min_pixels": 3136},
    }  # fmt: skip
    config = {"model_type": "qwen2_vl"}
    for missing in ("", "min_pixels", "min_pixels max_pixels"):
        given = {key: value for key, value in inner.items() if key not in missing.split()}
        found = image_processor_of(QWEN | given, {}, config).size_rule
        own = transformers.Qwen2VLImageProcessorPil(**given).size
        assert found == AreaRule(28, own["shortest_edge"], own["longest_edge"])


def test_variants_of_a_class_and_null_settings_are_known() -> None:
    fast = QWEN | {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": None,
        "crop_size": None,
    }
    assert image_processor_of(fast, {}, CONFIG) == of_qwen()


def test_a_file_as_google_published_it() -> None:
    """google/gemma-3-4b-it, preprocessor_config.json."""
    inner = {
        "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True,
        "do_resize": True, "image_mean": [0.5, 0.5, 0.5], "image_processor_type":
        "Gemma3ImageProcessor", "image_seq_length": 256, "image_std": [0.5, 0.5, 0.5],
        "pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None,
        "pan_and_scan_min_ratio_to_activate": None, "processor_class": "Gemma3Processor",
        "resample": 2, "rescale_factor": 0.00392156862745098, "size": {"height": 896, "width": 896},
    }  # fmt: skip
    config = {
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "vision_config": {"image_size": 896, "patch_size": 14},
    }
    found = image_processor_of(inner, {"image_seq_length": 256}, config)
    assert found.size_rule == FixedRule(56, 896, 896)
    assert found == CASES["gemma3"].spec


def test_internvl_cuts_whatever_the_class_says() -> None:
    inner = {"image_processor_type": "GotOcr2ImageProcessorFast", "crop_to_patches": False,
             "size": {"height": 448, "width": 448}}  # fmt: skip
    found = image_processor_of(inner, {}, CASES["internvl"].config)
    assert found.size_rule == TileRule(28, 448, 448, 1, 12)


def test_pixtral_takes_the_patch_of_the_processor_around_it() -> None:
    inner = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1024},
             "patch_size": {"height": 16, "width": 16}}  # fmt: skip
    found = image_processor_of(inner, {"patch_size": 16}, {"model_type": "llava"})
    assert (found.patch, found.size_rule.cell) == (16, 16)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sharpen": 2}, "unknown here: sharpen"),
        ({"do_resize": False}, "do_resize False, and only True"),
        ({"do_center_crop": True}, "do_center_crop True"),
        ({"resample": 0}, "filter 0; known are 1"),
        ({"size": {"height": 4, "width": 4}}, "needs shortest_edge and longest_edge"),
        ({"size": 224}, "needs shortest_edge and longest_edge"),
        ({"patch_size": 0}, "patch_size of the image processor is 0"),
        ({"patch_size": "14"}, "no number from 1"),
        ({"merge_size": True}, "no number from 1"),
        ({"max_pixels": 1 << 40}, "no number from 1"),
        ({"image_mean": [0.5]}, "must have three numbers"),
        ({"image_mean": ["a", "b", "c"]}, "must have three numbers"),
        ({"rescale_factor": "x"}, "rescale_factor"),
        ({"image_std": [0.5, 0.5, 0.0]}, "image_std"),
    ],
)
def test_a_setting_that_would_change_pixels_is_refused_by_name(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        of_qwen(**settings)


def test_an_unknown_class_or_family_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="is LlavaNextImageProcessor, which is unknown"):
        image_processor_of({"image_processor_type": "LlavaNextImageProcessor"}, {}, CONFIG)
    with pytest.raises(UnsupportedModelError, match="this model is 'lfm3_vl'"):
        image_processor_of(QWEN, {}, {"model_type": "lfm3_vl"})


@pytest.mark.parametrize(
    "config",
    [
        {"vision_config": [1]},
        {"vision_config": {"patch_size": 0}},
        {"vision_config": {"patch_size": [14, 16]}},
        {"vision_config": {"patch_size": "14"}},
        {"vision_config": {"patch_size": 14, "image_size": 4}},
        {"vision_config": {"patch_size": 14}, "mm_tokens_per_image": -1},
    ],
)
def test_a_tower_of_impossible_sizes_is_refused(config: dict[str, Any]) -> None:
    inner = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}}
    with pytest.raises(UnsupportedModelError):
        image_processor_of(inner, {}, {"model_type": "gemma3", **config})


STRANGE = [
    None, 0, 1, -1, 2, 3.5, float("inf"), 1 << 40, "x", "14", [], [1], [14, 14], [0.5, 0.5, 0.5],
    ["a", "b", "c"], [0, 0, 0], {}, {"height": 1, "width": 1}, {"longest_edge": 7},
    {"shortest_edge": 1, "longest_edge": 1}, {"height": 448, "width": None}, True, False, [[1], 2],
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_strange_files_are_refused_or_give_a_bearable_size(name: str) -> None:
    """Any value at any place: a description that plans, or our error."""
    case = CASES[name]
    numbers = random.Random(name)
    made = 0
    for _ in range(150):
        files = json.loads(json.dumps([case.reference.to_dict(), case.outer, case.config]))
        for _ in range(numbers.choice((1, 2))):
            places = [*files, *(value for file in files for value in file.values())]
            place = numbers.choice([place for place in places if isinstance(place, dict) and place])
            place[numbers.choice(list(place))] = numbers.choice(STRANGE)
        try:
            spec = image_processor_of(*files)
            made += 1
            for height, width in ((1, 1), (100, 100), (1, 5000), (3000, 4000), (3000, 7)):
                canvases = spec.canvases(height, width)
                assert sum(canvas.height * canvas.width for canvas in canvases) <= LARGEST
                narrow = spec.narrowed(TokenRange(1, 1024))
                assert narrow.rows(narrow.canvases(height, width)) <= 1024
        except ApplianceError:
            continue
    assert made


def test_a_prompt_without_its_words_is_refused() -> None:
    inner, config = {"image_processor_type": "Lfm2VlImageProcessor"}, {"model_type": "lfm2_vl"}
    with pytest.raises(UnsupportedModelError, match="use_image_special_tokens False"):
        image_processor_of(inner, {"use_image_special_tokens": False}, config)


def test_tiles_that_cells_do_not_fill_are_refused() -> None:
    inner = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 900, "width": 900}}
    with pytest.raises(UnsupportedModelError, match="900 x 900 pixels, which squares of 56"):
        image_processor_of(inner, {}, CASES["gemma3"].config)
