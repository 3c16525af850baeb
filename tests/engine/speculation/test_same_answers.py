"""Drafts of any kind change no answer, to the last bit: models, formats, sampling, neighbours."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from support.engine.draft_answers import SIZES, load, requests_of, run
from support.engine.drafting import draft_always
from support.engine.late_device import LateDevice
from support.engine.replaying import ReplayingSpeculator
from support.kernels.products import exact_products, unlike_products
from support.models.recurrent_models import RECURRENT
from support.models.sure_models import write_sure_model

from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.cuda_graphs import MOST_ROWS

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.engine import LLMEngine

# Tolerance of log probabilities: each of two logits may be off by a step of bfloat16, 0.0625 at
# their size.
CLOSENESS = 0.13


def compare(folder: Path, requests: list[Request], share: float, **options: Any) -> LLMEngine:
    """Assert that drafts, about a share of them right, change no answer."""
    expected, pieces = run(load(folder, **options), requests)
    engine = load(folder, **options, speculate="suffix")
    engine.scheduler.speculator = ReplayingSpeculator(
        expected, share, engine.grammars.matchers, random.Random(5)
    )
    found, fewer = run(engine, requests)
    assert found == expected
    stats = engine.stats()
    assert stats.accepted_tokens_total > 20
    assert stats.draft_tokens_total > stats.accepted_tokens_total
    assert sum(stats.accepted_tokens_by_place) == stats.accepted_tokens_total
    by_place = list(stats.accepted_tokens_by_place)
    assert by_place == sorted(by_place, reverse=True)
    assert fewer < pieces
    return engine


def compare_recurrent(folder: Path, name: str, **options: Any) -> None:
    model_type, settings = RECURRENT[name]
    write_sure_model(model_type, folder, **SIZES | settings)
    requests = [one for one in requests_of(97) if one.request_id in ("greedy", "several")]
    engine = compare(folder, requests, 0.7, max_num_seqs=4, **options)
    assert engine.stats().state_saves_total > 0


@pytest.mark.parametrize("kv", ["bf16", "int8", "int4", "int4-sealed", "k8v4"])
def test_answers_are_the_same_in_every_format(tiny_llama: Path, kv: str) -> None:
    compare(tiny_llama, requests_of(512), 0.8, kv_cache_dtype=kv)


@pytest.mark.parametrize("host", [0, 2**20])
def test_answers_are_the_same_where_they_have_to_make_room(tiny_llama: Path, host: int) -> None:
    engine = compare(
        tiny_llama,
        requests_of(512),
        0.6,
        max_num_seqs=3,
        kv_cache_memory=26000,
        kv_host_memory=host,
    )
    assert engine.stats().preemptions_total > 0


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_answers_of_recurrent_models_are_the_same(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    compare_recurrent(tmp_path_factory.mktemp(name), name)


@pytest.mark.parametrize(
    ("graphs", "kv", "each"),
    [("auto", "bf16", 1), ("auto", "int4-sealed", 3), ("off", "int8", 2)],
)
def test_answers_of_a_device_that_is_late_are_the_same(
    tiny_llama: Path, graphs: str, kv: str, each: int
) -> None:
    """Runs all requests, every second or every third one."""
    device = LateDevice()
    options: dict[str, Any] = {"kernels": "torch", "dtype": "float32", "cuda_graphs": graphs}
    with exact_products():
        requests = requests_of(512)[::each]
        compare(tiny_llama, requests, 0.8, device=device, kv_cache_dtype=kv, **options)
    assert bool(device.captures) == (graphs == "auto")


def test_answers_of_recurrent_models_on_a_late_device_are_the_same(tmp_path: Path) -> None:
    with exact_products():
        compare_recurrent(tmp_path, "lfm2", device=LateDevice(), kernels="torch")


def test_a_late_device_repeats_an_earlier_answer(tiny_llama: Path) -> None:
    """The shipped proposer drafts, and does not wait where it foresees nothing."""
    options: dict[str, Any] = {"kernels": "torch", "dtype": "float32", "max_model_len": 256}
    sampling = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    first, again = (
        [
            Request(
                request_id=f"{name}{at}", prompt_token_ids=(*range(at, at + 12),), sampling=sampling
            )
            for at in (20, 300)
        ]
        for name in "ab"
    )
    with exact_products():
        engine = load(tiny_llama, LateDevice(), **options, speculate="auto")
        draft_always(engine)
        expected, pieces = run(engine, first)
        found, fewer = run(engine, again)
    assert [one[0] for one in found.values()] == [one[0] for one in expected.values()]
    assert fewer < 0.4 * pieces
    assert not any(engine.stats().accepted_tokens_by_place[MOST_ROWS - 1 :]), "beyond any graph"


def test_where_sums_depend_on_rows_answers_part_only_between_tokens_that_are_nearly_equal(
    tiny_llama: Path,
) -> None:
    """As on a GPU: greedy answers in 16 bits are compared until they diverge."""
    options: dict[str, Any] = {"kernels": "torch", "dtype": "bfloat16", "kv_cache_dtype": "int8"}
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=5)
    requests = [
        Request(request_id=f"{at}", prompt_token_ids=(*range(at, at + 20),), sampling=sampling)
        for at in range(10, 400, 50)
    ]
    with unlike_products():
        expected, _ = run(load(tiny_llama, LateDevice(), **options), requests)
        engine = load(tiny_llama, LateDevice(), **options, speculate="suffix")
        engine.scheduler.speculator = ReplayingSpeculator(
            expected, 0.9, engine.grammars.matchers, random.Random(5)
        )
        found, _ = run(engine, requests)
    assert engine.stats().accepted_tokens_total > 100
    for key, (tokens, reports, _) in expected.items():
        pairs = zip(found[key][0], tokens, reports, strict=True)
        parted = next(((token, report.top) for token, own, report in pairs if token != own), None)
        if parted is not None:
            token, top = parted
            other = next(one for one in top if one.token_id == token)
            assert top[0].logprob - other.logprob < CLOSENESS
