"""Towers of every family against transformers' own, on small random models in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.gguf.projector_files import as_published, is_written, write_projector
from support.models.native_models import LIBRARY
from support.models.towers import TOWER_CASES, TowerCase, text_of, with_tower

from appliance.kernels.cpu.engine import NativeEngine
from appliance.model.encoder.encoder import BiasedLinear
from appliance.model.vision.positions import patch_places
from appliance.model.vision.projector import PatchEmbedding, Projector
from appliance.model.vision.source import open_projector, open_tower
from appliance.model.vision.torch_tower import load_torch_tower
from appliance.model.vision.tower import PatchGrid, load_native_tower

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.vision.source import TowerSource
    from appliance.model.vision.tower import Tower


def some_patches(case: TowerCase, size: int) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.normal(size=(*grid, 3, size, size)).astype(np.float32) for grid in case.grids]


def wanted_rows(model: Any, case: TowerCase, grids: list[np.ndarray]) -> tuple[Any, list[Any]]:
    """Rows of all pictures by transformers, and what each tap of DeepStack adds to them."""
    with torch.no_grad():
        found = model.model.get_image_features(**case.pixels(grids))
    rows = torch.cat([one.reshape(-1, one.shape[-1]) for one in found.pooler_output])
    taps = getattr(found, "deepstack_features", None) or []
    return rows, [torch.cat(list(tap)) for tap in taps]


def assert_rows(tower: Tower, case: TowerCase, model: Any) -> None:
    grids = some_patches(case, tower.spec.patch.size)
    pictures = [as_picture(one, tower) for one in grids]
    wanted, taps = wanted_rows(model, case, grids)
    found = tower(pictures)
    assert wanted.std() > 0.1
    ours = np.concatenate([one.embeddings for one in found])
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-4)
    for place, tap in enumerate(taps):
        added = np.concatenate([np.asarray(one.addends)[place] for one in found])
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


def native_tower(source: TowerSource | None) -> Tower:
    assert source is not None
    return load_native_tower(source, NativeEngine(LIBRARY, 2), np.float32)


def torch_tower(source: TowerSource | None) -> Tower:
    assert source is not None
    return load_torch_tower(source, torch.device("cpu"), torch.float32)


LOADERS = {"native": native_tower, "torch": torch_tower}
PROJECTORS = [name for name, case in TOWER_CASES.items() if is_written(case)]
PROCESSOR = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"longest_edge": 112}}


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("name", TOWER_CASES)
def test_rows_are_those_of_transformers(name: str, load: str, save: Callable[[Any], Path]) -> None:
    case = TOWER_CASES[name]
    model = with_tower(case)
    source = open_tower(save(model), in_torch=load == "torch")
    assert_rows(LOADERS[load](source), case, model)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("name", PROJECTORS)
def test_rows_of_projector_files_are_those_of_transformers(
    name: str, load: str, save: Callable[[Any], Path], tmp_path: Path
) -> None:
    case = as_published(TOWER_CASES[name])
    model = with_tower(case)
    file = write_projector(tmp_path / "mmproj-F32.gguf", model, PROCESSOR)
    source = open_projector(file, text_of(save(model), case.kind), in_torch=load == "torch")
    assert_rows(LOADERS[load](source), case, model)


@pytest.mark.parametrize("name", TOWER_CASES)
def test_names_of_the_classes_are_read_too(name: str, tmp_path: Path) -> None:
    """What is saved may have older names than the class's own parameters."""
    case = TOWER_CASES[name]
    model = with_tower(case)
    model.config.save_pretrained(tmp_path)
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_rows(native_tower(open_tower(tmp_path, in_torch=False)), case, model)


@pytest.mark.parametrize("name", ["lfm2_vl", "internvl", "glm4v"])
def test_what_is_around_the_layers_is_on_the_device(name: str, save: Callable[[Any], Path]) -> None:
    """Torch refuses to compute with tensors of two devices."""
    case, device = TOWER_CASES[name], torch.device("meta")
    found = open_tower(save(with_tower(case)))
    assert found is not None
    source, spec = replace(found, device=device), found.spec
    rows, columns = case.grids[0]
    patches = np.zeros((rows * columns, spec.patch.inputs), np.float32)
    places = patch_places(rows, columns, spec.merge)
    stream = PatchEmbedding.of(source, BiasedLinear)(patches, places, (rows, columns))
    assert stream.device == device
    projector = Projector.of(source, spec.projector, spec.merge, BiasedLinear)
    assert projector(stream[-rows * columns :]).device == device


def test_progress_goes_on_from_run_to_run(save: Callable[[Any], Path]) -> None:
    source = open_tower(save(with_tower(TOWER_CASES["qwen2_5_vl"])), in_torch=False)
    assert source is not None
    assert len(source.spec.runs) == 4
    seen: list[tuple[int, int]] = []
    load_native_tower(
        source,
        NativeEngine(LIBRARY, 1),
        np.float32,
        lambda _, done, total: seen.append((done, total)),
    )
    assert sorted(seen) == seen
    assert (seen[0], seen[-1]) == ((0, 9), (9, 9))
