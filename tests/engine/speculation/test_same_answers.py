"""Drafts of any kind change no answer, to the last bit: models, formats, sampling, company."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from draft_answers import SIZES, load, requests_of, run
from recurrent_models import RECURRENT
from replaying import ReplayingSpeculator
from sure_models import write_sure_model

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.engine import LLMEngine
    from appliance.engine.request import Request


def compare(folder: Path, requests: list[Request], share: float, **options: Any) -> LLMEngine:
    """Assert that answers are the same with drafts, of which about a share is right."""
    expected, pieces = run(load(folder, **options), requests)
    engine = load(folder, **options)
    engine._scheduler._speculator = ReplayingSpeculator(
        expected, share, engine._grammars._matchers, random.Random(5)
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
    model_type, settings = RECURRENT[name]
    folder = tmp_path_factory.mktemp(name)
    write_sure_model(model_type, folder, **SIZES | settings)
    requests = [one for one in requests_of(97) if one.request_id in ("greedy", "seeded", "several")]
    engine = compare(folder, requests, 0.7, max_num_seqs=4)
    assert engine.stats().state_saves_total > 0
