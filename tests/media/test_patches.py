"""Patches of real pictures against transformers' Pillow processors: every number is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.media.processors import CASES

from appliance.media.decode import resize
from appliance.media.patches import patches

Array = NDArray[np.float32]
# A photograph, a scan and a drawing, cut to sizes that every processor enlarges or shrinks.
PICTURES = {
    "coffee.png": (0, 0, 599, 400),
    "page.png": (0, 0, 384, 191),
    "astronaut.png": (100, 20, 400, 511),
    "rocket.jpg": (0, 0, 640, 90),
}


def ours(name: str, picture: Image.Image) -> list[Array]:
    """Patches of each canvas: (tiles, patches of a tile, numbers of a patch)."""
    spec = CASES[name].spec
    canvases = spec.canvases(picture.height, picture.width)
    pixels = resize(picture, canvases, spec.resample)
    return [patches(spec, canvas, part) for canvas, part in zip(canvases, pixels, strict=True)]


def reference(name: str, picture: Image.Image) -> Any:
    case = CASES[name]
    return np.asarray(
        case.reference(images=picture, return_tensors="np", **case.calls)["pixel_values"]
    )


def conv_patches(tiles: Array, patch: int) -> Array:
    """What a convolution with stride `patch` multiplies, in raster order: (tiles, n, inputs)."""
    count, channels, height, width = tiles.shape
    windows = np.lib.stride_tricks.sliding_window_view(tiles, (patch, patch), axis=(2, 3))
    apart = windows[:, :, ::patch, ::patch].transpose(0, 2, 3, 1, 4, 5)
    return apart.reshape(count, (height // patch) * (width // patch), channels * patch * patch)


@pytest.fixture(params=PICTURES)
def picture(request: pytest.FixtureRequest, photographs: Path) -> Image.Image:
    box = PICTURES[request.param]
    return Image.open(photographs / request.param).convert("RGB").crop(box)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5", "glm46v", "glm4v"])
def test_patches_in_squares_are_the_references(name: str, picture: Image.Image) -> None:
    """The reference repeats a still picture for each of two frames."""
    expected = reference(name, picture)
    patch = CASES[name].spec.patch
    frames = expected.reshape(len(expected), 3, 2, patch, patch)
    assert (frames[:, :, 0] == frames[:, :, 1]).all()
    (found,) = ours(name, picture)
    np.testing.assert_array_equal(found[0], frames[:, :, 0].reshape(len(expected), -1))


def test_patches_of_paddleocr_are_the_references(picture: Image.Image) -> None:
    expected = reference("paddleocr_vl", picture)
    (found,) = ours("paddleocr_vl", picture)
    np.testing.assert_array_equal(found[0], expected.reshape(len(expected), -1))


@pytest.mark.parametrize("name", ["gemma4", "gemma4 of 70"])
def test_patches_of_gemma4_are_the_references(name: str, picture: Image.Image) -> None:
    """The reference fills up to the budget with zeros, and gives positions."""
    result = CASES[name].reference(images=picture, return_tensors="np")
    real = (result["image_position_ids"][0] >= 0).all(axis=-1)
    (found,) = ours(name, picture)
    np.testing.assert_array_equal(found[0], result["pixel_values"][0][real])
    (canvas,) = CASES[name].spec.canvases(picture.height, picture.width)
    assert CASES[name].spec.rows((canvas,)) == result["num_soft_tokens_per_image"][0]
    columns = canvas.width // 16
    raster = [[index % columns, index // columns] for index in range(real.sum())]
    assert result["image_position_ids"][0][real].tolist() == raster


@pytest.mark.parametrize(
    "name",
    ["gemma3", "mistral3", "smolvlm", "smolvlm, whole", "idefics3", "internvl", "internvl of 4"],
)
def test_patches_of_convolutions_are_the_references(name: str, picture: Image.Image) -> None:
    expected = reference(name, picture)
    tiles = expected.reshape(-1, *expected.shape[-3:])
    spec = CASES[name].spec
    found = ours(name, picture)
    np.testing.assert_array_equal(np.concatenate(found), conv_patches(tiles, spec.patch))
