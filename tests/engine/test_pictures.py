"""PromptPictures in the whole engine: greedy answers are transformers'."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from support.gguf.picture_files import write_picture_files
from support.gguf.projector_files import TYPES, as_published
from support.models.towers import TOWER_CASES, TowerCase, with_tower

from appliance.config import EngineConfig
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.picture import CanvasPixels, PictureSpan, PromptPictures
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.picture_encoder import PictureEncoder
from appliance.errors import ContextLengthError, RequestError
from appliance.media.patches import patches
from appliance.media.processor_config import read_image_processor
from appliance.media.sizing import Canvas

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.engine import LLMEngine

TOKENS, MANY = 8, 60
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


@pytest.fixture(scope="module", params=PROCESSORS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    case = TOWER_CASES[request.param]
    folder = tmp_path_factory.mktemp(case.kind)
    model = with_tower(case)
    model.config.image_token_id = IMAGE
    model.save_pretrained(folder)
    settings = PROCESSORS[request.param] | HALF
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return Served(case, model, load(folder), folder)


def load(folder: Path, **settings: Any) -> LLMEngine:
    usual: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "fp32", "max_model_len": 120}
    config = EngineConfig(model=str(folder), device="cpu", **(usual | settings))
    return load_llm_engine(config, (), None, lambda *_: None)


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
    if "image_grid_thw" in more or served.case.kind == "gemma4":
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


@pytest.mark.parametrize("name", [name for name in PROCESSORS if TOWER_CASES[name].kind in TYPES])
def test_answers_of_gguf_files_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = as_published(TOWER_CASES[name])
    model = with_tower(case, seed=2 if name == "gemma4" else 1)  # no answer has IMAGE in it
    model.config.image_token_id = IMAGE
    model.config.save_pretrained(tmp_path)
    settings = PROCESSORS[case.kind] | HALF
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    path = write_picture_files(tmp_path, model, settings | {"size": {"longest_edge": 112}})
    served = Served(case, model, load(path), tmp_path)
    assert served.engine.info.reads_pictures
    assert_answers(served)
    served.engine.close()


def test_answers_are_those_of_transformers(served: Served) -> None:
    assert_answers(served)


def assert_answers(served: Served) -> None:
    grids = served.case.grids
    one = [canvas_of(served, grids[0], 1)]
    several = [canvas_of(served, grid, 2 + place) for place, grid in enumerate(grids)]
    prompts = {"one": one, "several": several, "other": [canvas_of(served, grids[0], 9)]}
    made = {name: prompt_of(canvases) for name, canvases in prompts.items()}
    wanted = {name: by_transformers(served, made[name][0], prompts[name]) for name in prompts}
    assert wanted["one"] != wanted["other"], "the same words about another picture"
    text = made["one"][0][:5]
    requests = [request_of(name, *made[name]) for name in prompts]
    found = run(served.engine, [*requests, request_of("text", text)])
    assert {name: found[name] for name in prompts} == wanted
    again = run(served.engine, [request_of("again", *made["several"])])
    assert again["again"] == wanted["several"]


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "little cache": {"max_num_batched_tokens": 32, "kv_cache_memory": 0, "kv_host_memory": 0},
    "swaps": {"max_num_batched_tokens": 32, "kv_cache_memory": 0, "kv_host_memory": 1 << 24},
    "drafts": {"speculate": "suffix"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_do_not_depend_on_how_they_are_computed(served: Served, name: str) -> None:
    grids = served.case.grids
    prompts = {
        f"{place}": prompt_of([canvas_of(served, grids[place % len(grids)], 30 + place)])
        for place in range(4)
    }
    requests = [request_of(key, *made, MANY) for key, made in prompts.items()]
    wanted = run(served.engine, requests)
    settings = dict(SETTINGS[name])
    if "kv_cache_memory" in settings:  # so little that sequences give way to each other
        info = served.engine.info
        longest = max(len(ids) for ids, _ in prompts.values()) + MANY
        blocks = 2 * longest // info.block_size + 1
        settings["kv_cache_memory"] = blocks * info.kv_bytes // info.num_blocks
        settings["max_model_len"] = longest
    engine = load(served.folder, **settings)
    if "kv_cache_memory" in settings:  # encoded before, so that none waits until others are done
        run(engine, [request_of(f"encodes {key}", *made, 1) for key, made in prompts.items()])
    assert run(engine, requests) == wanted
    if "kv_cache_memory" in settings:
        assert engine.stats().preemptions_total > 0
    engine.check_invariants()
    assert run(engine, requests) == wanted  # from caches
    engine.close()


def test_a_prompt_may_end_in_a_picture(served: Served) -> None:
    """Its last row runs again for each answer, and where all of it is cached."""
    canvas = canvas_of(served, served.case.grids[0], 55)
    ids, pictures = prompt_of([canvas])
    ids = ids[: pictures.spans[-1].stop]
    wanted = step_by_step(served, ids, [canvas])
    engine = load(served.folder, max_num_batched_tokens=16, max_num_seqs=4)
    several = SamplingParams(n=3, temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    asked = msgspec.structs.replace(request_of("ends", ids, pictures), sampling=several)
    engine.submit(asked)
    answers: dict[int, list[int]] = {index: [] for index in range(3)}
    while engine.has_work:
        for delta in engine.step().deltas:
            answers[delta.index].extend(delta.token_ids)
    assert answers == dict.fromkeys(range(3), wanted)
    assert run(engine, [request_of("again", ids, pictures)])["again"] == wanted
    engine.check_invariants()
    engine.close()


def test_beams_after_a_picture_are_those_of_transformers(served: Served) -> None:
    canvas = canvas_of(served, served.case.grids[0], 66)
    ids, pictures = prompt_of([canvas])
    beams = {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True}
    served.model.generation_config.eos_token_id = None
    found = served.model.generate(
        **inputs_of(served, ids, [canvas]), **beams, max_new_tokens=TOKENS, do_sample=False
    )
    engine = load(served.folder, max_num_batched_tokens=16, max_num_seqs=4)
    sampling = SamplingParams(
        use_beam_search=True,
        n=2,
        best_of=3,
        early_stopping=True,
        max_tokens=TOKENS,
        ignore_eos=True,
    )
    engine.submit(msgspec.structs.replace(request_of("beams", ids, pictures), sampling=sampling))
    answers: dict[int, list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            answers[delta.index] = list(delta.token_ids)
    assert answers == dict(enumerate(found[:, len(ids) :].tolist()))
    engine.close()


def test_a_picture_is_encoded_once_and_no_other_is_taken_for_it(served: Served) -> None:
    engine = load(served.folder)
    one, other = (canvas_of(served, served.case.grids[0], seed) for seed in (1, 2))
    first = run(engine, [request_of("first", *prompt_of([one]))])["first"]
    before = engine.stats()
    assert run(engine, [request_of("second", *prompt_of([one]))])["second"] == first
    after = engine.stats()
    assert after.pictures_encoded_total == before.pictures_encoded_total == 1
    assert after.picture_hits_total == 1
    assert after.prefix_hits_total > before.prefix_hits_total
    assert run(engine, [request_of("third", *prompt_of([other]))])["third"] != first
    assert engine.stats().pictures_encoded_total == 2
    engine.close()


def test_what_cannot_be_served_is_refused(served: Served) -> None:
    ids, pictures = prompt_of([canvas_of(served, served.case.grids[0], 1)])
    scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
    request = msgspec.structs.replace(request_of("scored", ids, pictures), sampling=scored)
    with pytest.raises(RequestError, match="no tokens to score"):
        served.engine.submit(request)
    texts = load(served.folder, images=False)
    with pytest.raises(RequestError, match="reads texts only"):
        texts.submit(request_of("any", ids, pictures))
    long = request_of("long", ids * 20, pictures)
    with pytest.raises(ContextLengthError):
        served.engine.submit(long)
    assert not served.engine.has_work
    texts.close()


def test_a_request_that_leaves_while_its_picture_is_encoded_leaves_nothing(served: Served) -> None:
    canvas = canvas_of(served, served.case.grids[0], 77)
    ids, pictures = prompt_of([canvas])
    served.engine.submit(request_of("leaves", ids, pictures))
    assert served.engine.has_work
    assert served.engine.abort("leaves")
    assert not served.engine.abort("leaves")
    run(served.engine, [request_of("text", ids[:5])])
    assert served.engine.stats().waiting == 0
    answer = run(served.engine, [request_of("stays", ids, pictures)])
    assert len(answer["stays"]) == TOKENS
