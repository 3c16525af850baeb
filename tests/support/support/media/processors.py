"""Image processors as models have them: transformers' own, and the files that describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import transformers

from appliance.media.processor_config import image_processor_of
from appliance.media.spec import ImageProcessorSpec


@dataclass(frozen=True)
class Case:
    """A processor of a model.

    Attributes:
        class_name: without its ending.
        settings: other than the class's, as published models have them.
        config: what config.json says.
        outer: what processor_config.json says around it.
        calls: arguments that the processor around it passes.
    """

    class_name: str
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    outer: Mapping[str, Any] = field(default_factory=dict)
    calls: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def reference(self) -> Any:
        return getattr(transformers, f"{self.class_name}Pil")(**self.settings)

    @cached_property
    def spec(self) -> ImageProcessorSpec:
        return image_processor_of(self.reference.to_dict(), self.outer, self.config)


_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_PIXTRAL = {"patch_size": 14, "spatial_merge_size": 2}

CASES = {
    "qwen2_vl": Case(
        "Qwen2VLImageProcessor",
        {"size": {"shortest_edge": 56**2, "longest_edge": 28**2 * 1280}},
        {"model_type": "qwen2_5_vl"},
    ),
    "qwen3_5": Case(
        "Qwen2VLImageProcessor",
        {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 2**21}, **_HALF},
        {"model_type": "qwen3_5"},
    ),
    "few tokens": Case(
        "Qwen2VLImageProcessor",
        {"patch_size": 16, "size": {"shortest_edge": 4 * 32**2, "longest_edge": 16 * 32**2}},
        {"model_type": "qwen3_vl"},
    ),
    "glm46v": Case("Glm46VImageProcessor", {}, {"model_type": "glm46v"}),
    "glm4v": Case("Glm4vImageProcessor", {}, {"model_type": "glm4v"}),
    "paddleocr_vl": Case("PaddleOCRVLImageProcessor", {}, {"model_type": "paddleocr_vl"}),
    "gemma3": Case(
        "Gemma3ImageProcessor",
        {"size": {"height": 896, "width": 896}},
        {"model_type": "gemma3", "vision_config": {"patch_size": 14, "image_size": 896}},
    ),
    "gemma4": Case("Gemma4ImageProcessor", {}, {"model_type": "gemma4"}),
    "gemma4 of 70": Case("Gemma4ImageProcessor", {"max_soft_tokens": 70}, {"model_type": "gemma4"}),
    "mistral3": Case(
        "PixtralImageProcessor",
        {"patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 1540}},
        {"model_type": "mistral3", "vision_config": {"patch_size": 14}},
        _PIXTRAL,
        {"patch_size": 28},
    ),
    "smolvlm": Case(
        "SmolVLMImageProcessor",
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        {"model_type": "smolvlm", "vision_config": {"patch_size": 16}, "scale_factor": 4},
    ),
    "smolvlm, whole": Case(
        "SmolVLMImageProcessor",
        {"max_image_size": {"longest_edge": 378}, "do_image_splitting": False},
        {"model_type": "smolvlm", "vision_config": {"patch_size": 14}, "scale_factor": 3},
    ),
    "idefics3": Case(
        "Idefics3ImageProcessor",
        {"size": {"longest_edge": 1456}},
        {"model_type": "idefics3", "vision_config": {"patch_size": 14}, "scale_factor": 2},
    ),
    "internvl": Case(
        "GotOcr2ImageProcessor",
        {"size": {"height": 448, "width": 448}, "crop_to_patches": True},
        {"model_type": "internvl", "vision_config": {"patch_size": [14, 14]}},
    ),
    "internvl of 4": Case(
        "GotOcr2ImageProcessor",
        {
            "size": {"height": 448, "width": 448},
            "crop_to_patches": True,
            "min_patches": 2,
            "max_patches": 4,
        },
        {"model_type": "internvl", "vision_config": {"patch_size": [14, 14]}},
    ),
}
