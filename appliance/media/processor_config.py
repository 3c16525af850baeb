"""Reads a model folder's description of its image processor, as transformers writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.gguf import read_header
from appliance.media.mmproj import image_processor_of_mmproj
from appliance.media.processors import PROCESSORS, SHARED, ImageProcessor, spec_of

if TYPE_CHECKING:
    from appliance.media.spec import ImageProcessorSpec

# Settings with one value that is ours too; anything else would change pixels.
_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_center_crop": (False,),
    "do_pan_and_scan": (False,),
    "use_image_special_tokens": (True,),
    "patch_expand_factor": (1,),
}
# Settings that change no pixel here: labels, types of the answer, padding between pictures of a
# batch, parts of what is off, and what the processor around it overrides.
_HARMLESS = frozenset(
    {
        "image_processor_type", "feature_extractor_type", "processor_class", "auto_map",
        "model_input_names", "_processor_class", "_valid_processor_keys",
        "_valid_kwargs_names", "return_tensors", "data_format", "input_data_format", "device",
        "disable_grouping", "return_row_col_info", "default_to_square", "do_convert_rgb", "do_pad",
        "pad_size", "crop_size", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate", "image_seq_length", "image_seq_len",
        "num_channels", "max_num_patches", "crop_to_patches", "video_sampling",
        "return_metadata", "backend", "vision_token_id",
    }
)  # fmt: skip
# Bounds of a picture's area by the names of older files, beside the size or in it.
_OLDER_BOUNDS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_ENDINGS = ("Fast", "Pil")  # of one class's variants


def read_image_processor(model: Path, projector: Path | None = None) -> ImageProcessorSpec | None:
    """Read the image processor of a model's folder, or of a GGUF projector file; None without one.

    Raises:
        CheckpointError: a file is damaged.
        UnsupportedModelError: an unknown class, or a setting that we do not know.
    """
    if projector is not None:
        return image_processor_of_mmproj(read_header(projector).metadata)
    outer = _json(model / "processor_config.json")
    inner = outer.get("image_processor") or _json(model / "preprocessor_config.json")
    if not inner:
        return None
    return image_processor_of(inner, outer, _json(model / "config.json"))


def image_processor_of(
    inner: Mapping[str, Any], outer: Mapping[str, Any], config: Mapping[str, Any]
) -> ImageProcessorSpec:
    """Make the description from the files' contents.

    Args:
        inner: the image processor's.
        outer: the processor's around it, perhaps empty.
        config: the model's.

    Raises:
        UnsupportedModelError: an unknown class, or a setting that we do not know.
    """
    name = _class_of(inner)
    processor = PROCESSORS[name]
    model = config.get("model_type")
    if not isinstance(model, str) or model not in processor.model_types:
        raise UnsupportedModelError(
            f"{name} is known here for {', '.join(sorted(processor.model_types))}, and this model "
            f"is {model!r}; serve it without images"
        )
    given = {key: value for key, value in inner.items() if value is not None}
    given |= _tower(name, outer, config)
    if "merge_size" in processor.defaults:
        given |= _bounds(given, processor)
    _check_known(name, processor, given)
    _check_values(name, outer)
    known = SHARED.keys() | processor.defaults.keys()
    return spec_of(name, {key: value for key, value in given.items() if key in known})


def _bounds(given: dict[str, Any], processor: ImageProcessor) -> dict[str, Any]:
    """The size, where older files give its bounds by names of their own, which go before."""
    size = given.get("size", processor.defaults["size"])
    own = {side: given.pop(key) for key, side in _OLDER_BOUNDS.items() if key in given}
    if not isinstance(size, Mapping):
        return {"size": size}
    return {"size": {_OLDER_BOUNDS.get(key, key): bound for key, bound in size.items()} | own}


def _class_of(inner: Mapping[str, Any]) -> str:
    given = str(inner.get("image_processor_type") or inner.get("feature_extractor_type"))
    name = given
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    if name not in PROCESSORS:
        raise UnsupportedModelError(
            f"the image processor is {given}, which is unknown here; known are "
            f"{', '.join(PROCESSORS)}: serve the model without images"
        )
    return name


def _check_known(name: str, processor: ImageProcessor, given: Mapping[str, Any]) -> None:
    _check_values(name, given)
    strange = given.keys() - processor.defaults.keys() - SHARED.keys() - _MUST_BE.keys() - _HARMLESS
    if strange:
        raise UnsupportedModelError(
            f"{name} has settings that are unknown here: {', '.join(sorted(strange))}; serve the "
            "model without images"
        )


def _check_values(name: str, given: Mapping[str, Any]) -> None:
    for key, values in _MUST_BE.items():
        if given.get(key) is not None and given[key] not in values:
            raise UnsupportedModelError(
                f"{name} has {key} {given[key]!r}, and only {values[0]!r} is known here; serve the "
                "model without images"
            )


def _tower(name: str, outer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The side of a patch, and of the square that becomes one row, where config.json has them."""
    if "tower_patch" not in PROCESSORS[name].defaults:
        return {}
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    if name == "PixtralImageProcessor":
        patch = _whole(outer, "patch_size", _whole(vision, "patch_size", 16))
        merge = _whole(outer, "spatial_merge_size", _whole(config, "spatial_merge_size", 1))
    elif name == "Gemma3ImageProcessor":
        patch = _whole(vision, "patch_size", 16)
        across = _whole(vision, "image_size", 224) // patch
        merge = across // math.isqrt(_whole(config, "mm_tokens_per_image", 256))
    elif name == "GotOcr2ImageProcessor":
        ratio = config.get("downsample_ratio", 0.5)
        patch = _whole(vision, "patch_size", 14)
        merge = round(1 / ratio) if isinstance(ratio, float) and 0.01 < ratio <= 1 else 0
    else:
        patch, merge = _whole(vision, "patch_size", 32), _whole(config, "scale_factor", 2)
    return {"tower_patch": patch, "tower_merge": merge}


def _whole(given: Mapping[str, Any], name: str, default: int) -> int:
    """A positive number of a configuration; of a list of equal ones, one of them."""
    value = given.get(name)
    if value is None:
        return default
    values = value if isinstance(value, list) else [value]
    first = values[0] if values else None
    if not isinstance(first, int) or first < 1 or any(other != first for other in values):
        raise UnsupportedModelError(
            f"{name} is {value!r}, which is no size of a square; take the model's own files"
        )
    return first


def _json(file: Path) -> dict[str, Any]:
    """A file's content; empty if it is missing."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); fetch the model again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is no JSON object; fetch the model again")
    return content
