"""Prompts with pictures for models of `TOWER_CASES`, and their answers by transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from support.models.towers import TOWER_CASES, TowerCase, with_tower

from appliance.engine.nouns.picture import CanvasPixels, PictureSpan, PromptPictures
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.picture_encoder import PictureEncoder
from appliance.media.patches import patches
from appliance.media.processor_config import read_image_processor
from appliance.media.sizing import Canvas

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.engine import LLMEngine

TOKENS = 8
IMAGE = 100  # the id that stands for a row
HALF = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.5, 0.4, 0.3]}
GEMMA4: dict[str, Any] = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "max_soft_tokens": 70,
    "do_normalize": False,
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "smolvlm": {"image_processor_type": "SmolVLMImageProcessor"},
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 84},
        "max_image_size": {"longest_edge": 42},
    },
    "lfm2_vl": {"image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 4},
    "qwen2_vl": {"image_processor_type": "Qwen2VLImageProcessor"},
    "qwen2_5_vl": {"image_processor_type": "Qwen2VLImageProcessor"},
    "qwen3_vl": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16},
    "qwen3_5": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16},
    "glm4v": {"image_processor_type": "Glm4vImageProcessor"},
    "glm4v_moe": {"image_processor_type": "Glm4vImageProcessor"},
    "glm_ocr": {"image_processor_type": "Glm46VImageProcessor"},
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 56, "width": 56},
    },
    "paddleocr_vl": {"image_processor_type": "PaddleOCRVLImageProcessor"},
    "gemma4": GEMMA4,
    "gemma4_clipped": GEMMA4,
    "gemma4_unified": GEMMA4 | {"image_processor_type": "Gemma4UnifiedImageProcessor"},
    "internvl with a last norm": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 28, "width": 28},
    },
    "mistral3": {"image_processor_type": "PixtralImageProcessor", "patch_size": 14},
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 56, "width": 56},
    },
}


@dataclass(frozen=True, slots=True)
class Served:
    """A model in transformers and here."""

    case: TowerCase
    model: Any
    engine: LLMEngine
    folder: Path


def write_pictured(name: str, folder: Path) -> tuple[TowerCase, Any]:
    """Write a model and the settings of its processor; return its case and itself."""
    case = TOWER_CASES[name]
    model = with_tower(case)
    model.config.image_token_id = IMAGE
    model.save_pretrained(folder)
    settings = PROCESSORS[name] | HALF
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return case, model


def canvas_of(served: Served, grid: tuple[int, int], seed: int) -> CanvasPixels:
    queue = served.engine.pictures
    assert queue is not None
    assert isinstance(queue.encode, PictureEncoder)
    spec = read_image_processor(served.folder)
    assert spec is not None
    tower = queue.encode.tower.spec
    height, width = (side * tower.patch.size for side in grid)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8).tobytes()
    cells = grid[0] // tower.merge, grid[1] // tower.merge
    return CanvasPixels(blake2b(pixels).digest(), Canvas(((height, width),)), pixels, cells)


def prompt_of(canvases: list[CanvasPixels]) -> tuple[list[int], PromptPictures]:
    """Words around pictures; each picture's rows lie side by side."""
    generator = torch.Generator().manual_seed(len(canvases))
    ids: list[int] = []
    spans = []
    for place, canvas in enumerate(canvases):
        ids += torch.randint(3, 97, (5 + place,), generator=generator).tolist()
        spans.append(PictureSpan(len(ids), canvas.num_rows, place))
        ids += [IMAGE] * canvas.num_rows
    ids += torch.randint(3, 97, (6,), generator=generator).tolist()
    return ids, PromptPictures(tuple(canvases), tuple(spans))


def inputs_of(served: Served, ids: list[int], canvases: list[CanvasPixels]) -> dict[str, Any]:
    """A prompt and its pictures as the class takes them."""
    spec = read_image_processor(served.folder)
    assert spec is not None
    size = spec.patch
    grids = []
    for canvas in canvases:
        rows, columns = canvas.canvas.height // size, canvas.canvas.width // size
        pixels = np.frombuffer(canvas.pixels, np.uint8)
        values = patches(spec, canvas.canvas, pixels.tobytes())
        grids.append(as_grid(values[0], spec, rows, columns))
    more = served.case.pixels(grids)
    prompt = torch.tensor([ids])
    types = (prompt == IMAGE).int()
    if served.case.kind == "gemma3":
        more["token_type_ids"] = types
    if "image_grid_thw" in more or served.case.kind.startswith("gemma4"):
        more["mm_token_type_ids"] = types
    return more | {"input_ids": prompt}


def by_transformers(served: Served, ids: list[int], canvases: list[CanvasPixels]) -> list[int]:
    inputs = inputs_of(served, ids, canvases)
    served.model.generation_config.eos_token_id = None  # no token ends an answer here
    found = served.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    answer: list[int] = found[0, len(ids) :].tolist()
    return answer


def step_by_step(served: Served, ids: list[int], canvases: list[CanvasPixels]) -> list[int]:
    """The answer without `generate`, which gives new tokens the type of a prompt's last one."""
    said = list(ids)
    with torch.no_grad():
        for _ in range(TOKENS):
            found = served.model(**inputs_of(served, said, canvases), use_cache=False)
            said.append(int(found.logits[0, -1].argmax()))
    return said[len(ids) :]


def as_grid(values: np.ndarray, spec: Any, rows: int, columns: int) -> np.ndarray:
    """Patches of a canvas as (rows, columns, 3, size, size)."""
    size, block = spec.patch, spec.block
    inner = (size, size, 3) if spec.channels_last else (3, size, size)
    each = values.reshape(rows // block, columns // block, block, block, *inner)
    each = each.swapaxes(1, 2).reshape(rows, columns, *inner)
    return each.transpose(0, 1, 4, 2, 3) if spec.channels_last else each


def run(engine: LLMEngine, requests: list[Request]) -> dict[str, list[int]]:
    for request in requests:
        engine.submit(request)
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.error is None, delta.error
            answers[delta.request_id].extend(delta.token_ids)
    return answers


def request_of(
    name: str, ids: list[int], pictures: PromptPictures | None = None, tokens: int = TOKENS
) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return Request(
        request_id=name, prompt_token_ids=tuple(ids), sampling=sampling, pictures=pictures
    )
