"""Towers of every family against transformers' own, on small random models in float32."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.models.native_models import LIBRARY
from support.models.whole_models import TEXT

from appliance.kernels.cpu.engine import NativeEngine
from appliance.model.vision.positions import patch_places
from appliance.model.vision.source import open_tower
from appliance.model.vision.torch_tower import load_torch_tower
from appliance.model.vision.tower import PatchGrid, load_native_tower

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.vision.tower import Tower

SIZES: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 2}
LAYERS: dict[str, Any] = {"num_hidden_layers": 3}


@dataclass(frozen=True, slots=True)
class Case:
    """A tiny model with a tower.

    Attributes:
        grids: rows and columns of patches of each picture.
        pixels: arranges patches (rows, columns, 3, size, size) as the class wants its inputs.
    """

    kind: str
    vision: dict[str, Any]
    grids: tuple[tuple[int, int], ...]
    pixels: Callable[[list[np.ndarray]], dict[str, Any]]
    text: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)


def as_images(grids: list[np.ndarray]) -> dict[str, Any]:
    """Pixels (1, count, 3, height, width) of pictures of one size."""
    images = [one.transpose(2, 0, 3, 1, 4).reshape(3, one.shape[0] * one.shape[3], -1) for one in grids]
    return {"pixel_values": torch.tensor(np.stack(images)[None])}


def as_batch(grids: list[np.ndarray]) -> dict[str, Any]:
    return {"pixel_values": as_images(grids)["pixel_values"][0]}


def as_sized(grids: list[np.ndarray]) -> dict[str, Any]:
    """Pixels of Pixtral's classes, (count, 3, height, width) padded to the largest, with sizes."""
    sizes = [(one.shape[0] * one.shape[3], one.shape[1] * one.shape[4]) for one in grids]
    padded = torch.zeros(len(grids), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    for place, (one, (height, width)) in enumerate(zip(grids, sizes, strict=True)):
        padded[place, :, :height, :width] = as_images([one])["pixel_values"][0, 0]
    return {"pixel_values": padded, "image_sizes": torch.tensor(sizes)}


def as_cells(grids: list[np.ndarray]) -> dict[str, Any]:
    """Patches of Qwen's classes: cell by cell, each frame twice."""
    rows = []
    for one in grids:
        places = patch_places(one.shape[0], one.shape[1], 2)
        patches = one[places[0], places[1]]  # (count, 3, size, size)
        rows.append(np.repeat(patches[:, :, None], 2, 2).reshape(len(patches), -1))
    thw = torch.tensor([(1, *one.shape[:2]) for one in grids])
    return {"pixel_values": torch.tensor(np.concatenate(rows)), "image_grid_thw": thw}


def as_naflex(grids: list[np.ndarray]) -> dict[str, Any]:
    """Patches of SigLIP 2, channels last, padded to the longest, with masks and shapes."""
    rows = [one.transpose(0, 1, 3, 4, 2).reshape(one.shape[0] * one.shape[1], -1) for one in grids]
    longest = max(map(len, rows))
    pixels = np.stack([np.pad(one, ((0, longest - len(one)), (0, 0))) for one in rows])
    mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in rows])
    shapes = torch.tensor([one.shape[:2] for one in grids])
    return {
        "pixel_values": torch.tensor(pixels),
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
    }


_QWEN = {"hidden_size": 40, "intermediate_size": 56, "num_heads": 2, "depth": 4}
_QWEN |= {"out_hidden_size": 64, "num_position_embeddings": 25}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
CASES = {
    "smolvlm": Case(
        "smolvlm", SIZES | LAYERS | {"image_size": 56, "patch_size": 7}, ((8, 8), (8, 8)),
        as_images, whole={"scale_factor": 2},
    ),
    "idefics3": Case(
        "idefics3", SIZES | LAYERS | {"image_size": 42, "patch_size": 7}, ((6, 6),),
        as_images, whole={"scale_factor": 3},
    ),
    "gemma3": Case(
        "gemma3",
        SIZES | LAYERS | {"image_size": 56, "patch_size": 7, "vision_use_head": False},
        ((8, 8), (8, 8)), as_batch, whole={"mm_tokens_per_image": 16},
    ),
    "lfm2_vl": Case(
        "lfm2_vl",
        SIZES | LAYERS | {"patch_size": 4, "num_patches": 16, "vision_use_head": False},
        ((8, 8), (2, 6), (10, 2)), as_naflex, whole={"projector_hidden_size": 72},
    ),
    "qwen3_vl": Case(
        "qwen3_vl", _QWEN | {"deepstack_visual_indexes": [0, 2]}, ((6, 8), (2, 2), (10, 2)),
        as_cells, text={"rope_parameters": _ROPE | {"mrope_interleaved": True}},
    ),
    "qwen3_5": Case("qwen3_5", _QWEN, ((6, 8), (2, 2), (10, 2)), as_cells),
    "mistral3": Case(
        "mistral3",
        SIZES | LAYERS
        | {"model_type": "pixtral", "image_size": 140, "patch_size": 14, "hidden_act": "silu"},
        ((6, 8), (2, 2), (10, 2)), as_sized, text={"model_type": "ministral3"},
    ),
}  # fmt: skip


def make(case: Case) -> Any:
    """Build a random model, whose tower's every part shows in the rows."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    made = transformers.AutoConfig.for_model(case.kind).__class__
    config = made(text_config=TEXT | case.text, vision_config=case.vision, **case.whole)
    config._attn_implementation = "eager"
    model = getattr(transformers, names[case.kind])(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "position" not in name and "pos_embed" not in name:
                parameter.normal_(std=1.5 * parameter[0].numel() ** -0.5, generator=generator)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def some_patches(case: Case, size: int) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.normal(size=(*grid, 3, size, size)).astype(np.float32) for grid in case.grids]


def wanted_rows(model: Any, case: Case, grids: list[np.ndarray]) -> tuple[Any, list[Any]]:
    """Rows of all pictures by transformers, and what each tap of DeepStack adds to them."""
    with torch.no_grad():
        found = model.model.get_image_features(**case.pixels(grids))
    rows = torch.cat([one.reshape(-1, one.shape[-1]) for one in found.pooler_output])
    taps = getattr(found, "deepstack_features", None) or []
    return rows, [torch.cat(list(tap)) for tap in taps]


def assert_rows(tower: Tower, case: Case, model: Any) -> None:
    grids = some_patches(case, tower.spec.patch.size)
    pictures = [as_picture(one, tower) for one in grids]
    wanted, taps = wanted_rows(model, case, grids)
    found = tower(pictures)
    assert wanted.std() > 0.1
    ours = np.concatenate([one.embeddings for one in found])
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-4)
    for place, tap in enumerate(taps):
        added = np.concatenate([one.addends[place] for one in found])
        np.testing.assert_allclose(added, tap, rtol=0, atol=1e-4)
    assert all(len(taps) == (0 if one.addends is None else len(one.addends)) for one in found)
    for picture, rows in zip(pictures, found, strict=True):
        alone = tower([picture])[0]
        np.testing.assert_allclose(alone.embeddings, rows.embeddings, rtol=0, atol=1e-5)
        is_native = isinstance(rows.embeddings, np.ndarray)
        assert not is_native or np.array_equal(alone.embeddings, rows.embeddings)


def as_picture(grid: np.ndarray, tower: Tower) -> PatchGrid:
    rows, columns = grid.shape[:2]
    places = patch_places(rows, columns, tower.spec.merge)
    patches = grid[places[0], places[1]]
    if tower.spec.patch.channels_last:
        patches = patches.transpose(0, 2, 3, 1)
    return PatchGrid(np.ascontiguousarray(patches.reshape(len(patches), -1)), rows, columns)


def native_tower(folder: Path) -> Tower:
    source = open_tower(folder, in_torch=False)
    assert source is not None
    return load_native_tower(source, NativeEngine(LIBRARY, 2), np.float32)


def torch_tower(folder: Path) -> Tower:
    source = open_tower(folder)
    assert source is not None
    return load_torch_tower(source, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("load", [native_tower, torch_tower])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_transformers(
    name: str, load: Callable[[Path], Tower], save: Callable[[Any], Path]
) -> None:
    case = CASES[name]
    model = make(case)
    assert_rows(load(save(model)), case, model)
