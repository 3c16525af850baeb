"""Positions around pictures are those that transformers' Qwen 3 VL computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.models.towers import TOWER_CASES, with_tower

from appliance.engine.nouns.picture import CanvasPixels, PictureSpan, PromptPictures
from appliance.engine.nouns.row_axes import RowAxes
from appliance.media.sizing import Canvas

# Words before each picture and its cells, and the words at the end.
PROMPTS = [
    ([(4, (3, 5))], 6),
    ([(0, (2, 2))], 1),
    ([(3, (1, 7)), (2, (4, 2)), (1, (1, 1))], 5),
    ([(1, (6, 6)), (1, (6, 6))], 2),
]


def pictures_of(parts: list[tuple[int, tuple[int, int]]]) -> PromptPictures:
    canvases, spans, place = [], [], 0
    for number, (words, cells) in enumerate(parts):
        canvases.append(CanvasPixels(bytes((number,)), Canvas(((1, 1),)), b"", cells))
        spans.append(PictureSpan(place + words, cells[0] * cells[1], number))
        place = spans[-1].stop
    return PromptPictures(tuple(canvases), tuple(spans))


@pytest.mark.parametrize(("parts", "end"), PROMPTS)
def test_positions_are_those_of_transformers(
    parts: list[tuple[int, tuple[int, int]]], end: int
) -> None:
    model = with_tower(TOWER_CASES["qwen3_vl"])
    pictures = pictures_of(parts)
    length = pictures.spans[-1].stop + end
    types = torch.zeros(1, length, dtype=torch.int64)
    for span in pictures.spans:
        types[:, span.start : span.stop] = 1
    grids = torch.tensor([(1, 2 * rows, 2 * columns) for _, (rows, columns) in parts])
    wanted, deltas = model.model.get_rope_index(
        types * 5, types, image_grid_thw=grids, attention_mask=torch.ones_like(types)
    )
    axes = RowAxes.of(pictures)
    np.testing.assert_array_equal(axes(0, length), wanted[:, 0])
    for cut in range(1, length):  # a prompt may be cut anywhere
        halves = np.concatenate((axes(0, cut), axes(cut, length)), 1)
        np.testing.assert_array_equal(halves, wanted[:, 0])
    answer = axes(length, length + 3)
    np.testing.assert_array_equal(answer, np.tile(np.arange(3) + length + deltas.item(), (3, 1)))
