"""Sizes of canvases against transformers' processors, and what a range of tokens does to them."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.media.processors import CASES
from transformers import image_processing_backends
from transformers.models.gemma4 import image_processing_pil_gemma4

from appliance.errors import ConfigError, ImageError
from appliance.media.processors import spec_of
from appliance.media.sizing import USUAL_MOST, Size, TokenRange

Steps = list[Size]
# Halves of cells of 28, 32 and 48 pixels, the least and most areas, ratios around 200, and threads.
EDGES = [
    *itertools.product((14, 42, 70, 16, 48, 80, 24, 72, 120), (14, 42, 98, 16, 80, 112, 72, 168)),
    (56, 56), (55, 57), (1008, 1008), (1003, 1003), (1001, 1009), (4096, 4096), (4097, 4095),
    (10, 1990), (10, 2000), (10, 2001), (1990, 10), (2000, 10), (2001, 10), (1, 199), (1, 200),
    (1, 1), (1, 2), (2, 1), (1, 201), (512, 512), (513, 512), (448, 448), (896, 448), (560, 448),
    (3, 150), (150, 3), (28, 5600), (27, 5400), (511, 2048), (2048, 1), (1, 2048), (1456, 364),
]  # fmt: skip


def reference_steps(
    name: str, height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> Steps | None:
    """The sizes to which transformers' processor resizes, in order; None if it refuses."""
    found: Steps = []

    def resize(image: Any, size: Size, **_: Any) -> Any:
        found.append((int(size[0]), int(size[1])))
        return np.broadcast_to(np.uint8(0), (3, *size))

    monkeypatch.setattr(image_processing_backends, "np_resize", resize)
    monkeypatch.setattr(image_processing_pil_gemma4, "resize", resize)
    picture = np.broadcast_to(np.uint8(0), (height, width, 3))
    off = {"do_rescale": False, "do_normalize": False, "do_convert_rgb": False, "do_pad": False}
    calls = {"input_data_format": "channels_last", **off, **CASES[name].calls}
    try:
        CASES[name].reference(images=picture, **calls)
    except (ValueError, ZeroDivisionError):
        return None
    return found


def our_steps(name: str, height: int, width: int) -> Steps | None:
    """The same of ours: a step that two canvases share counts once."""
    try:
        canvases = CASES[name].spec.canvases(height, width)
    except ImageError:
        return None
    return list(dict.fromkeys(itertools.chain(*(canvas.sizes for canvas in canvases))))


def sizes_of(name: str) -> list[Size]:
    """Random sizes of all magnitudes, the same in every run."""
    numbers = random.Random(name)
    sides = [int(2 ** numbers.uniform(0, 11.5)) for _ in range(600)]
    return [*EDGES, *zip(sides[::2], sides[1::2], strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_sizes_are_the_references(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = 0
    for height, width in sizes_of(name):
        expected = reference_steps(name, height, width, monkeypatch)
        ours = our_steps(name, height, width)
        if expected is None:
            refused += 1
            assert ours is None or name == "mistral3", (height, width)
            continue
        if name.startswith("gemma4"):
            expected = expected or [(height, width)]  # the reference leaves what has its size
        assert ours == list(dict.fromkeys(expected)), (height, width)
    assert refused < 150


def test_a_thread_becomes_a_line_of_cells_where_the_reference_fails() -> None:
    with pytest.raises(ValueError, match="height=0, width=1540"):
        CASES["mistral3"].reference(images=Image.new("RGB", (4000, 1)), patch_size=28)
    (canvas,) = CASES["mistral3"].spec.canvases(1, 4000)
    assert canvas.sizes == ((28, 1540),)


@pytest.mark.parametrize(
    ("name", "tokens", "least", "most"),
    [
        ("qwen3_5", TokenRange(1, 256), 64, 256),
        ("qwen3_5", TokenRange(300, 1024), 300, 1024),
        ("glm46v", TokenRange(16, 512), 16, 512),
        ("paddleocr_vl", TokenRange(1, 200), 150, 200),
        ("paddleocr_vl", TokenRange(1, 20), 12, 20),
        ("gemma3", TokenRange(1, 256), 256, 256),
        ("gemma4", TokenRange(1, 256), 100, 140),
        ("gemma4", TokenRange(300, None), 480, 560),
        ("mistral3", TokenRange(1, 400), 1, 400),
        ("smolvlm", TokenRange(1, 64), 64, 64),
        ("smolvlm", TokenRange(1, 400), 64, 5 * 64),
        ("internvl", TokenRange(1, 300), 256, 256),
        ("internvl", TokenRange(1, 1024), 256, 4 * 256),
    ],
)
def test_a_range_of_tokens_holds(name: str, tokens: TokenRange, least: int, most: int) -> None:
    spec = CASES[name].spec.narrowed(tokens)
    numbers = random.Random(name)
    rows = []
    for _ in range(300):
        height = int(2 ** numbers.uniform(4, 12))
        width = int(height * 2 ** numbers.uniform(-2, 2)) + 1
        rows.append(spec.rows(spec.canvases(height, width)))
    assert least <= min(rows)
    assert max(rows) <= most
    assert max(rows) > most * 0.75, "not narrower than asked for"


@pytest.mark.parametrize("name", ["qwen3_5", "glm46v", "paddleocr_vl", "mistral3"])
@pytest.mark.parametrize("most", [4, 30, 77])
def test_no_strip_exceeds_a_range(name: str, most: int) -> None:
    spec = CASES[name].spec.narrowed(TokenRange(1, most))
    for height, width in [*EDGES, (20, 3980), (3980, 20), (100, 12000)]:
        if our_steps(name, height, width):
            assert spec.rows(spec.canvases(height, width)) <= most


@pytest.mark.parametrize(
    ("name", "tokens", "possible"),
    [
        ("gemma3", TokenRange(1, 255), "256"),
        ("gemma4", TokenRange(1, 69), "70, 140, 280, 560, 1120"),
        ("smolvlm", TokenRange(1, 63), "64, 1088"),
        ("internvl", TokenRange(1, 200), "256, 3328"),
    ],
)
def test_a_range_that_a_model_cannot_keep_is_refused(
    name: str, tokens: TokenRange, possible: str
) -> None:
    with pytest.raises(ConfigError, match=f"it can: {possible}"):
        CASES[name].spec.narrowed(tokens)


@pytest.mark.parametrize(
    ("name", "limit"),
    # By arithmetic on the published settings: areas by cells, trained budgets, tiles and a view.
    [
        ("gemma3", 256),
        ("gemma4", 1120),
        ("smolvlm", 17 * 64),
        ("internvl", 13 * 256),
        ("qwen3_5", 2**21 // 32**2),
        ("mistral3", 55**2),
    ],
)
def test_bounds_beyond_the_largest_picture_are_refused(name: str, limit: int) -> None:
    spec = CASES[name].spec
    for tokens in TokenRange(limit + 1), TokenRange(1, limit + 1):
        with pytest.raises(ConfigError, match=f"at most {limit} tokens .* within 1:{limit}$"):
            spec.narrowed(tokens)
    largest = spec.narrowed(TokenRange(limit, limit))
    assert largest.size_rule.most_rows == limit
    assert spec.narrowed(TokenRange()).size_rule.most_rows <= USUAL_MOST
    sizes = ((3000, 3000), (3000, 4000))
    assert max(largest.rows(largest.canvases(*size)) for size in sizes) > 0.9 * limit


@pytest.mark.parametrize("name", [*CASES, "lfm2_vl"])
@pytest.mark.parametrize("tokens", [TokenRange(), TokenRange(1, 256)])
def test_no_picture_exceeds_what_the_plan_has_room_for(name: str, tokens: TokenRange) -> None:
    spec = spec_of("Lfm2VlImageProcessor", {}) if name == "lfm2_vl" else CASES[name].spec
    with contextlib.suppress(ConfigError):  # one tile has more
        spec = spec.narrowed(tokens)
    tiles, cells = spec.size_rule.most_tiles
    seen = []
    for height, width in [*EDGES, (9000, 9000), (16, 9000), (1, 60000), (9000, 50), (45, 8999)]:
        with contextlib.suppress(ImageError):
            canvases = spec.canvases(height, width)
            seen.append(spec.rows(canvases))
            assert all(one.tiles <= tiles for one in canvases)
            assert all(spec.rows((one,)) <= cells * one.tiles for one in canvases)
    assert max(seen) <= spec.size_rule.most_rows


@pytest.mark.parametrize("name", ["qwen3_5", "glm46v", "paddleocr_vl"])
def test_a_long_strip_is_refused_with_its_size(name: str) -> None:
    for height, width in ((10, 2001), (1, 1000), (1000, 1)):
        with pytest.raises(ImageError, match=f" {width} x {height} pixels"):
            CASES[name].spec.canvases(height, width)
    assert CASES[name].spec.canvases(10, 2000)
