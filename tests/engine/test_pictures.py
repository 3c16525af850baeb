"""PromptPictures in the whole engine: greedy answers are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from support.engine.drafting import draft_always
from support.engine.picture_answers import (
    HALF,
    IMAGE,
    PROCESSORS,
    TOKENS,
    Served,
    by_transformers,
    canvas_of,
    inputs_of,
    prompt_of,
    request_of,
    run,
    step_by_step,
    write_pictured,
)
from support.gguf.picture_files import write_picture_files
from support.gguf.projector_files import as_published, is_written
from support.models.eagle_heads import write_eagle
from support.models.towers import TOWER_CASES, with_tower

from appliance.config import EngineConfig
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.load.pictures import KEPT_BYTES
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.tiers import read_ahead, write_behind
from appliance.errors import ContextLengthError, RequestError
from appliance.kernels import arrays
from appliance.model.vision.tower import PictureRows

if TYPE_CHECKING:
    from appliance.engine.engine import LLMEngine
    from appliance.engine.nouns.picture import PromptPictures
    from appliance.engine.nouns.request import Request

MANY = 60


@pytest.fixture(scope="module", params=PROCESSORS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp(request.param)
    case, model = write_pictured(request.param, folder)
    return Served(case, model, load(folder), folder)


def load(folder: Path, **settings: Any) -> LLMEngine:
    usual: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "fp32", "max_model_len": 120}
    config = EngineConfig(model=str(folder), device="cpu", **(usual | settings))
    return load_llm_engine(config, (), None, lambda *_: None)


@pytest.mark.parametrize("name", [name for name in PROCESSORS if is_written(TOWER_CASES[name])])
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
    assert Path(served.engine.info.projector).name.startswith("mmproj")
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
    assert_recomputed(served.engine, served.folder, requests, SETTINGS[name])


def assert_recomputed(
    engine: LLMEngine, folder: Path, requests: list[Request], settings: dict[str, Any]
) -> None:
    """Compare the answers of an engine with those of one with other settings, also from caches."""
    wanted = run(engine, requests)
    settings = dict(settings)
    if "kv_cache_memory" in settings:  # so little that sequences give way to each other
        info = engine.info
        lengths = [(len(one.prompt_token_ids), one.sampling.max_tokens or 0) for one in requests]
        longest = max(map(sum, lengths))
        blocks = 7 * longest // (4 * info.block_size)
        settings["kv_cache_memory"] = blocks * info.kv_bytes // info.num_blocks
        settings["max_model_len"] = longest
    other = load(folder, **settings)
    if "kv_cache_memory" in settings:  # encoded before, so that none waits until others are done
        for one in requests:
            assert one.pictures is not None
            ids = list(one.prompt_token_ids)
            run(other, [request_of(f"encodes {one.request_id}", ids, one.pictures, 1)])
    assert run(other, requests) == wanted
    if "kv_cache_memory" in settings:
        assert other.stats().preemptions_total > 0
    other.check_invariants()
    assert run(other, requests) == wanted  # from caches
    other.close()


@pytest.mark.parametrize("served", ["gemma3", "gemma4"], indirect=True)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kv", ["int8", "int4", "k8v4"])
def test_answers_in_quantized_caches_do_not_depend_on_it_either(
    served: Served, kv: str, name: str
) -> None:
    """The pictures lie across the end of a block."""
    requests = []
    for place in range(4):
        ids, pictures = prompt_of([canvas_of(served, served.case.grids[0], 40 + place)])
        words, (span,) = [3 + place] * 24, pictures.spans
        spans = (msgspec.structs.replace(span, start=span.start + len(words)),)
        assert spans[0].start < 32 < spans[0].stop
        moved = msgspec.structs.replace(pictures, spans=spans)
        requests.append(request_of(f"{place}", words + ids, moved, MANY))
    engine = load(served.folder, kv_cache_dtype=kv)
    assert_recomputed(engine, served.folder, requests, {"kv_cache_dtype": kv} | SETTINGS[name])
    engine.close()


@pytest.mark.parametrize("served", ["gemma3"], indirect=True)
@pytest.mark.parametrize("kv", ["fp32", "int8", "int4"])
def test_a_head_drafts_behind_pictures_whose_rows_see_each_other(served: Served, kv: str) -> None:
    head = served.folder / "eagle"
    if not head.exists():
        write_eagle(served.folder, served.model.lm_head.weight.detach())
    made = prompt_of([canvas_of(served, served.case.grids[0], 70 + place) for place in range(2)])
    requests = [request_of("drafted", *made, 40)]
    plain = load(served.folder, kv_cache_dtype=kv)
    engine = load(served.folder, kv_cache_dtype=kv, speculate=f"eagle={head}")
    draft_always(engine)
    assert run(engine, requests) == run(plain, requests)
    assert engine.stats().draft_tokens_total > 0
    engine.check_invariants()
    engine.close()
    plain.close()


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
    assert beams_of(engine, ids, pictures) == dict(enumerate(found[:, len(ids) :].tolist()))
    engine.close()


def beams_of(engine: LLMEngine, ids: list[int], pictures: PromptPictures) -> dict[int, list[int]]:
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
    return answers


@pytest.mark.parametrize("served", ["gemma3", "gemma4"], indirect=True)
@pytest.mark.parametrize("kv", ["int8", "int4", "k8v4"])
def test_beams_in_quantized_caches_do_not_depend_on_how_a_prompt_is_cut(
    served: Served, kv: str
) -> None:
    made = prompt_of([canvas_of(served, served.case.grids[0], 80 + place) for place in range(3)])
    answers = []
    for settings in {}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}:
        engine = load(served.folder, kv_cache_dtype=kv, **settings)
        answers += [beams_of(engine, *made), beams_of(engine, *made)]  # and from its cache
        engine.check_invariants()
        engine.close()
    assert len(set(map(tuple, answers[0].values()))) == 2
    assert answers[1:] == answers[:1] * 3


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


@pytest.mark.parametrize("served", ["qwen3_5", "smolvlm", "gemma3"], indirect=True)
@pytest.mark.parametrize("tier", ["blocks", "disk"])
def test_a_picture_whose_rows_are_cached_is_not_encoded_again(
    served: Served, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "MIN_READ_TOKENS", 16)
    monkeypatch.setattr(write_behind, "MIN_TOKENS", 16)
    grid = served.case.grids[0]
    ids, pictures = prompt_of([canvas_of(served, grid, 5)])
    ids += [7] * 24  # so that whole blocks have all rows of the picture
    settings = {"kv_disk": str(tmp_path)} if tier == "disk" else {}
    engine = load(served.folder, **settings)
    first = run(engine, [request_of("first", ids, pictures)])["first"]
    turn = [*ids, *first, 9, 8, 7, 6]
    wanted = run(served.engine, [request_of("wanted", turn, pictures)])["wanted"]
    if tier == "disk":
        run(engine, [request_of("again", ids, pictures)])  # what repeats is written
        engine.close()
        engine = load(served.folder, **settings)
    forget_encoded(engine)
    before = engine.stats()
    assert run(engine, [request_of("second", turn, pictures)])["second"] == wanted
    after = engine.stats()
    assert after.pictures_encoded_total == before.pictures_encoded_total
    assert after.prefix_hits_total > before.prefix_hits_total
    engine.check_invariants()
    other = prompt_of([canvas_of(served, grid, 6)])[1]
    run(engine, [request_of("other", turn, other)])
    assert engine.stats().pictures_encoded_total > after.pictures_encoded_total
    engine.close()


def forget_encoded(engine: LLMEngine) -> None:
    """Let a picture of all the room push the others out."""
    assert engine.pictures is not None
    rows = np.zeros((1, KEPT_BYTES // 4 + 1), np.float32)
    engine.pictures.encoded.put(b"large", PictureRows(arrays.of_numpy(rows)))
    engine.pictures.encoded.trim(set())
    assert engine.pictures.encoded.num_bytes == 0


def test_what_cannot_be_served_is_refused(served: Served) -> None:
    ids, pictures = prompt_of([canvas_of(served, served.case.grids[0], 1)])
    scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
    request = msgspec.structs.replace(
        request_of("scored", ids[: pictures.spans[-1].stop], pictures), sampling=scored
    )
    with pytest.raises(RequestError, match="no token follows the last picture"):
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
