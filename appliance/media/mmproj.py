"""Reads and writes the image processor of a GGUF projector file (`mmproj`).

The file has sizes of patches, mean and deviation; which rule and filter apply follows from its
projector type. Limits that are not in it are those of the makers' published processors, so that a
model gives equal patches from either kind of file. Keys and their defaults are those of llama.cpp
(tools/mtmd/clip.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedModelError
from appliance.media.processors import spec_of
from appliance.media.sizing import AreaRule, EdgeRule, FixedRule, SplitRule, TileRule

if TYPE_CHECKING:
    from appliance.media.spec import ImageProcessorSpec

Metadata = Mapping[str, Any]
_KEY = "clip.vision."
_SCALE = "projector.scale_factor"


def image_processor_of_mmproj(metadata: Metadata) -> ImageProcessorSpec:
    """Make the description from a projector file's metadata.

    Args:
        metadata: by full key; arrays as lists.

    Raises:
        UnsupportedModelError: no projector for images, one of an unknown type, or a key is missing.
    """
    kind = metadata.get(_KEY + "projector_type") or metadata.get("clip.projector_type")
    if not isinstance(kind, str) or kind not in _PROJECTORS:
        raise UnsupportedModelError(
            f"the projector file's type is {kind!r}, which is unknown here for images; known are "
            f"{', '.join(_PROJECTORS)}: serve the model without it"
        )
    name, settings = _PROJECTORS[kind]
    given = settings(metadata)
    if "do_normalize" not in given:
        for statistic in ("image_mean", "image_std"):
            given[statistic] = _get(metadata, statistic)
    return spec_of(name, given)


def metadata_of(spec: ImageProcessorSpec) -> dict[str, Any]:
    """Return what a projector file says of a processor, by key without `clip.vision.`.

    The file says no more; `image_processor_of_mmproj` tells what that makes.
    """
    found: dict[str, Any] = {
        "image_mean": [*(spec.mean or (0.0, 0.0, 0.0))],
        "image_std": [*(spec.std or (1.0, 1.0, 1.0))],
    }
    match spec.size_rule:
        case AreaRule() as rule:
            found |= {"image_min_pixels": rule.min_pixels, "image_max_pixels": rule.max_pixels}
        case FixedRule() as rule:
            found |= {"image_size": rule.height, "preproc_max_tiles": 1}
        case EdgeRule() as rule:
            found |= {"image_size": rule.longest}
        case SplitRule() as rule:
            found |= {"image_size": rule.side, "preproc_image_size": rule.longest}
        case TileRule(whole=None) as rule:
            found |= {
                "image_size": rule.height,
                "preproc_min_tiles": rule.min_tiles,
                "preproc_max_tiles": rule.max_tiles,
            }
    return found


def _get(metadata: Metadata, key: str, default: Any = None) -> Any:
    found = metadata.get(_KEY + key, default)
    if found is None:
        raise UnsupportedModelError(
            f"the projector file has no {_KEY}{key}; convert it again with a current llama.cpp"
        )
    return found


def _number(metadata: Metadata, key: str, default: int | None = None) -> int:
    found = _get(metadata, key, default)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise UnsupportedModelError(
            f"{_KEY}{key} of the projector file is {found!r}, which is no size; fetch it again"
        )
    return found


def _tower(metadata: Metadata, merge: int) -> dict[str, Any]:
    return {"tower_patch": _number(metadata, "patch_size"), "tower_merge": merge}


def _area(least: int, most: int) -> Callable[[Metadata], dict[str, Any]]:
    """Make the reader for processors around Qwen's, with published bounds of the area."""

    def settings(metadata: Metadata) -> dict[str, Any]:
        return {
            "patch_size": _number(metadata, "patch_size"),
            "merge_size": _number(metadata, "spatial_merge_size", 2),
            "size": {
                "shortest_edge": _number(metadata, "image_min_pixels", least),
                "longest_edge": _number(metadata, "image_max_pixels", most),
            },
        }

    return settings


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    side = _number(metadata, "image_size")
    merge = _number(metadata, _SCALE, 4)
    return {"size": {"height": side, "width": side}, **_tower(metadata, merge)}


def _gemma4(metadata: Metadata) -> dict[str, Any]:
    return {
        "patch_size": _number(metadata, "patch_size"),
        "pooling_kernel_size": _number(metadata, _SCALE, 3),
        "do_normalize": False,  # the tower does it
    }


def _pixtral(metadata: Metadata) -> dict[str, Any]:
    merge = _number(metadata, "spatial_merge_size", 1)
    return {"size": {"longest_edge": _number(metadata, "image_size")}, **_tower(metadata, merge)}


def _idefics3(metadata: Metadata) -> dict[str, Any]:
    side = _number(metadata, "image_size")
    return {
        "size": {"longest_edge": _number(metadata, "preproc_image_size", 4 * side)},
        "max_image_size": {"longest_edge": side},
        **_tower(metadata, _number(metadata, _SCALE)),
    }


def _lfm2(metadata: Metadata) -> dict[str, Any]:
    return {
        "encoder_patch_size": _number(metadata, "patch_size"),
        "downsample_factor": _number(metadata, _SCALE, 2),
    }


def _internvl(metadata: Metadata) -> dict[str, Any]:
    side = _number(metadata, "image_size")
    return {
        "size": {"height": side, "width": side},
        "min_patches": _number(metadata, "preproc_min_tiles", 1),
        "max_patches": _number(metadata, "preproc_max_tiles", 12),
        **_tower(metadata, _number(metadata, _SCALE)),
    }


_QWEN2 = _area(56**2, 28**2 * 16384)
_PROJECTORS: Mapping[str, tuple[str, Callable[[Metadata], dict[str, Any]]]] = {
    "qwen2vl_merger": ("Qwen2VLImageProcessor", _QWEN2),
    "qwen2.5vl_merger": ("Qwen2VLImageProcessor", _QWEN2),
    "qwen3vl_merger": ("Qwen2VLImageProcessor", _area(1 << 16, 1 << 24)),
    "glm4v": ("Glm4vImageProcessor", _area(112**2, 28**2 * 15000)),
    "paddleocr": ("PaddleOCRVLImageProcessor", _area(384**2, 1536**2)),
    "gemma3": ("Gemma3ImageProcessor", _gemma3),
    "gemma4v": ("Gemma4ImageProcessor", _gemma4),
    "gemma4uv": ("Gemma4UnifiedImageProcessor", _gemma4),
    "pixtral": ("PixtralImageProcessor", _pixtral),
    "idefics3": ("SmolVLMImageProcessor", _idefics3),
    "lfm2": ("Lfm2VlImageProcessor", _lfm2),
    "internvl": ("GotOcr2ImageProcessor", _internvl),
}
