"""The image processors by the name of their class in transformers: defaults, and what they do.

Constants are those of transformers 5.24. Readers of files put in what a model says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import UnsupportedModelError
from appliance.media.sizing import (
    AreaRule,
    BudgetRule,
    EdgeRule,
    FixedRule,
    SizeRule,
    Small,
    SplitRule,
    TileRule,
)
from appliance.media.spec import ImageProcessorSpec, PromptWords

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers
LARGEST = 1 << 26  # no number of a description is larger: pixels, sides, tiles
MOST_TILES = 256
_ORDINARY = ((480, 640), (8000, 6000), (100, 9000))  # heights and widths

_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_AREA = {"resample": BICUBIC, **_CLIP, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
_UNUSED_SIZE = {"size": None}  # written by classes that ignore it
_TOWER = {"tower_patch": None, "tower_merge": None}  # from config.json, where a class has none


class ImageSettings(dict[str, Any]):
    """A processor's settings, complete; reading one checks it."""

    def count(self, name: str, most: int = LARGEST) -> int:
        """Return a positive integer.

        Raises:
            UnsupportedModelError: it is none, or absurdly large.
        """
        return _count(name, self[name], most)

    def length(self, name: str, *keys: str) -> list[int]:
        """Return lengths of a size that is given by exactly these keys; null ones do not count.

        Raises:
            UnsupportedModelError: it has other keys.
        """
        given = self[name]
        given = given if isinstance(given, Mapping) else {}
        sides = {key: side for key, side in given.items() if side is not None}
        if sides.keys() != {*keys}:
            raise UnsupportedModelError(
                f"{name} of the image processor is {self[name]!r}, and this one needs "
                f"{' and '.join(keys)}; take the model's own file"
            )
        return [_count(f"{name}.{key}", sides[key], LARGEST) for key in keys]

    def triple(self, name: str) -> tuple[float, float, float]:
        """Return one number for each channel.

        Raises:
            UnsupportedModelError: they are not three.
        """
        given = self[name]
        if (
            not isinstance(given, list | tuple)
            or not all(map(_is_number, given))
            or len(given) != 3
        ):
            raise UnsupportedModelError(f"{name} of the image processor must have three numbers")
        red, green, blue = (float(value) for value in given)
        return red, green, blue

    def number(self, name: str) -> float:
        """Return a positive number.

        Raises:
            UnsupportedModelError: it is none.
        """
        if not _is_number(self[name]) or not 0 < self[name] < LARGEST:
            raise UnsupportedModelError(f"{name} of the image processor must be a positive number")
        return float(self[name])


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """A class of image processors.

    Attributes:
        defaults: all settings that change pixels, with the class's values.
        build: makes the description.
        model_types: whose prompts have the words that `build` gives.
    """

    defaults: Mapping[str, Any]
    build: Callable[[ImageSettings], ImageProcessorSpec]
    model_types: frozenset[str]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise UnsupportedModelError(
            f"{name} of the image processor is {value!r}, which is no number from 1 to {most}; "
            "take the model's own file"
        )
    return value


def _spec(
    settings: ImageSettings,
    rule: SizeRule,
    words: PromptWords,
    *,
    patch: int,
    block: int = 1,
    channels_last: bool = False,
) -> ImageProcessorSpec:
    normal = settings["do_normalize"]
    if normal and not all(settings.triple("image_std")):
        raise UnsupportedModelError("image_std of the image processor has a zero")
    return ImageProcessorSpec(
        rule,
        patch,
        settings["resample"],
        settings.number("rescale_factor"),
        settings.triple("image_mean") if normal else None,
        settings.triple("image_std") if normal else None,
        block,
        channels_last,
        words,
    )


def _area(
    small: Small, words: PromptWords, *, several_frames: bool = False, raster: bool = False
) -> Callable[[ImageSettings], ImageProcessorSpec]:
    """Make the builder of the processors around Qwen's."""

    def build(settings: ImageSettings) -> ImageProcessorSpec:
        least, most = settings.length("size", "shortest_edge", "longest_edge")
        patch, merge = settings.count("patch_size"), settings.count("merge_size")
        frames = settings.count("temporal_patch_size", 8) if several_frames else 1
        rule = AreaRule(patch * merge, least, most, small, frames)
        return _spec(settings, rule, words, patch=patch, block=1 if raster else merge)

    return build


def _gemma3(settings: ImageSettings) -> ImageProcessorSpec:
    height, width = settings.length("size", "height", "width")
    patch = settings.count("tower_patch")
    rule = FixedRule(patch * settings.count("tower_merge"), height, width)
    word, blank = "<start_of_image>", "\n\n"
    words = PromptWords(word, word, "<end_of_image>", beside=(blank, blank))
    return _spec(settings, rule, words, patch=patch)


def _gemma4(*, merged: bool) -> Callable[[ImageSettings], ImageProcessorSpec]:
    """Make the builder for a model with a tower, or for one that takes whole cells (`merged`)."""

    def build(settings: ImageSettings) -> ImageProcessorSpec:
        patch = settings.count("patch_size")
        cell = patch * settings.count("pooling_kernel_size")
        rule = BudgetRule(cell, settings.count("max_soft_tokens"))
        if rule.budget not in rule.budgets:
            raise UnsupportedModelError(
                f"max_soft_tokens of the image processor is {rule.budget}; it may be "
                f"{', '.join(map(str, rule.budgets))}"
            )
        words = PromptWords("<|image|>", "<|image>", "<image|>")
        return _spec(settings, rule, words, patch=cell if merged else patch, channels_last=True)

    return build


def _pixtral(settings: ImageSettings) -> ImageProcessorSpec:
    (longest,) = settings.length("size", "longest_edge")
    patch = settings.count("tower_patch")
    rule = EdgeRule(patch * settings.count("tower_merge"), longest)
    words = PromptWords("[IMG]", row_end="[IMG_BREAK]", after="[IMG_END]")
    return _spec(settings, rule, words, patch=patch)


def _smolvlm(settings: ImageSettings) -> ImageProcessorSpec:
    (longest,) = settings.length("size", "longest_edge")
    (side,) = settings.length("max_image_size", "longest_edge")
    patch = settings.count("tower_patch")
    cell = patch * settings.count("tower_merge")
    rule = SplitRule(cell, longest, side, bool(settings["do_image_splitting"]))
    if longest > MOST_TILES**0.5 * side:
        raise UnsupportedModelError(f"an edge of {longest} makes too many tiles of {side} pixels")
    around = "<fake_token_around_image>"
    words = PromptWords(
        "<image>",
        after=around,
        tile=around + "<row_{row}_col_{column}>",
        tile_row_end="\n",
        view=f"\n{around}<global-img>",
        alone=f"{around}<global-img>",
    )
    return _spec(settings, rule, words, patch=patch)


def _lfm2(settings: ImageSettings) -> ImageProcessorSpec:
    patch, merge = settings.count("encoder_patch_size"), settings.count("downsample_factor")
    cell = patch * merge
    least, most = settings.count("min_image_tokens"), settings.count("max_image_tokens")
    side = settings.count("tile_size")
    if side % cell:
        raise UnsupportedModelError(f"squares of {cell} pixels do not fill a tile of {side}")
    split = bool(settings["do_image_splitting"])
    rule = TileRule(
        cell,
        side,
        side,
        settings.count("min_tiles", MOST_TILES),
        settings.count("max_tiles", MOST_TILES) if split else 0,
        whole=AreaRule(cell, least * cell**2, most * cell**2, Small.CELL),
        threshold=most * cell**2 * settings.number("max_pixels_tolerance"),
        smallest=patch,
        view=bool(settings["use_thumbnail"]),
    )
    words = PromptWords(
        "<image>",
        "<|image_start|>",
        "<|image_end|>",
        tile="<|img_row_{row}_col_{column}|>",
        view="<|img_thumbnail|>",
    )
    return _spec(settings, rule, words, patch=patch, channels_last=True)


def _internvl(settings: ImageSettings) -> ImageProcessorSpec:
    height, width = settings.length("size", "height", "width")
    patch = settings.count("tower_patch")
    cell = patch * settings.count("tower_merge")
    least, most = (settings.count(name, MOST_TILES) for name in ("min_patches", "max_patches"))
    words = PromptWords("<IMG_CONTEXT>", "<img>", "</img>")
    rule: SizeRule = FixedRule(cell, height, width)
    if most > 1:
        rule = TileRule(cell, height, width, min(least, most), most)
    return _spec(settings, rule, words, patch=patch)


_GLM = ImageProcessor(
    _AREA | {"size": {"shortest_edge": 112**2, "longest_edge": 28**2 * 15000}},
    _area(Small.SCALE, PromptWords("<|image|>"), several_frames=True),
    frozenset({"glm4v", "glm4v_moe", "glm46v", "glm_ocr"}),
)
_SMOLVLM = ImageProcessor(
    _TOWER
    | {
        "resample": LANCZOS,
        **_HALF,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "do_image_splitting": True,
    },
    _smolvlm,
    frozenset({"smolvlm", "idefics3"}),
)
_GEMMA4 = {
    "resample": BICUBIC,
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
    "patch_size": 16,
    "max_soft_tokens": 280,
    "pooling_kernel_size": 3,
    **_UNUSED_SIZE,
}

PROCESSORS: Mapping[str, ImageProcessor] = {
    "Qwen2VLImageProcessor": ImageProcessor(
        _AREA | {"size": {"shortest_edge": 56**2, "longest_edge": 28**2 * 1280}},
        _area(Small.AS_IS, PromptWords("<|image_pad|>")),
        frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}),
    ),
    "Glm4vImageProcessor": _GLM,
    "Glm46VImageProcessor": _GLM,
    "PaddleOCRVLImageProcessor": ImageProcessor(
        _AREA
        | {
            "size": {"shortest_edge": 384**2, "longest_edge": 1536**2},
            "temporal_patch_size": 1,
        },
        _area(Small.SCALE_ROUNDED, PromptWords("<|IMAGE_PLACEHOLDER|>"), raster=True),
        frozenset({"paddleocr_vl"}),
    ),
    "Gemma3ImageProcessor": ImageProcessor(
        _TOWER | {"resample": BILINEAR, **_HALF, "size": {"height": 224, "width": 224}},
        _gemma3,
        frozenset({"gemma3"}),
    ),
    "Gemma4ImageProcessor": ImageProcessor(_GEMMA4, _gemma4(merged=False), frozenset({"gemma4"})),
    "Gemma4UnifiedImageProcessor": ImageProcessor(
        _GEMMA4, _gemma4(merged=True), frozenset({"gemma4_unified"})
    ),
    "PixtralImageProcessor": ImageProcessor(
        # The processor around it puts its own patch_size in place of the class's.
        _TOWER | {"resample": BICUBIC, **_CLIP, "size": {"longest_edge": 1024}, "patch_size": None},
        _pixtral,
        frozenset({"mistral3", "llava"}),
    ),
    "SmolVLMImageProcessor": _SMOLVLM,
    "Idefics3ImageProcessor": _SMOLVLM,
    "Lfm2VlImageProcessor": ImageProcessor(
        {
            "resample": BILINEAR,
            **_HALF,
            "downsample_factor": 2,
            "do_image_splitting": True,
            "min_tiles": 2,
            "max_tiles": 10,
            "use_thumbnail": True,
            "min_image_tokens": 64,
            "max_image_tokens": 256,
            "encoder_patch_size": 16,
            "tile_size": 512,
            "max_pixels_tolerance": 2.0,
            **_UNUSED_SIZE,
        },
        _lfm2,
        frozenset({"lfm2_vl"}),
    ),
    "GotOcr2ImageProcessor": ImageProcessor(
        _TOWER
        | {
            "resample": BICUBIC,
            **_CLIP,
            "size": {"height": 384, "width": 384},
            "min_patches": 1,
            "max_patches": 12,
        },
        _internvl,
        frozenset({"internvl"}),
    ),
}

# Those that all have.
SHARED: Mapping[str, Any] = {"do_normalize": True, "rescale_factor": 1 / 255}


def spec_of(name: str, given: Mapping[str, Any]) -> ImageProcessorSpec:
    """Make the description of a processor.

    Args:
        name: of a class in `PROCESSORS`.
        given: settings other than the class's, none of them unknown to it.

    Raises:
        UnsupportedModelError: a setting's value is not one we know.
    """
    processor = PROCESSORS[name]
    settings = ImageSettings({**SHARED, **processor.defaults, **given})
    if settings["resample"] not in (LANCZOS, BILINEAR, BICUBIC):
        raise UnsupportedModelError(
            f"the image processor resizes with filter {settings['resample']!r}; known are "
            f"{LANCZOS} (Lanczos), {BILINEAR} (bilinear) and {BICUBIC} (bicubic)"
        )
    spec = processor.build(settings)
    _check_cells(name, spec)
    return spec


def _check_cells(name: str, spec: ImageProcessorSpec) -> None:
    """Whole cells in every canvas of ordinary pictures, and bearable sizes."""
    cell = spec.size_rule.cell
    for height, width in _ORDINARY:
        canvases = spec.canvases(height, width)
        for canvas in canvases:
            if any(side % cell for side in canvas.tile):
                raise UnsupportedModelError(
                    f"{name} makes {canvas.tile[1]} x {canvas.tile[0]} pixels, which squares of "
                    f"{cell} do not fill; take the model's own files"
                )
        pixels = sum(math.prod(size) for canvas in canvases for size in canvas.sizes)
        if pixels > LARGEST:
            raise UnsupportedModelError(
                f"{name} enlarges a picture to {pixels} pixels; take the model's own files"
            )
