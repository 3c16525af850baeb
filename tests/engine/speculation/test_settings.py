"""What may be asked for, and what is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.loading import load_parts
from appliance.engine.request import Request, SamplingParams
from appliance.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from pathlib import Path


def load(folder: Path, **options: Any) -> LLMEngine:
    usual: dict[str, Any] = {"threads": 1, "max_model_len": 64, "max_num_seqs": 4}
    config = EngineConfig(**{"model": str(folder), **usual, **options})
    return LLMEngine(*load_parts(config, (), None, lambda *_: None, None))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculate": "mtp"}, "speculate must be one of auto, off, suffix; got 'mtp'"),
        ({"speculate_tokens": 16}, "speculate_tokens must be between 1 and 15 tokens; got 16"),
        ({"speculate_tokens": 0}, "speculate_tokens must be between 1 and 15 tokens; got 0"),
    ],
)
def test_what_there_is_not_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**options)


def test_it_needs_the_cpu_library(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="--speculate suffix needs the CPU library"):
        load(tiny_llama, kernels="torch", speculate="suffix")
    assert load(tiny_llama, kernels="torch")._scheduler._speculator is None
    assert load(tiny_llama, speculate="off")._scheduler._speculator is None


def test_beams_run_without_drafts_or_are_refused(tiny_llama: Path) -> None:
    sampling = SamplingParams(use_beam_search=True, n=2, temperature=0.0, max_tokens=12)
    beams = Request(request_id="b", prompt_token_ids=(5, 6, 7, 5, 6, 7), sampling=sampling)
    with pytest.raises(RequestError, match="--speculate suffix; leave use_beam_search out"):
        load(tiny_llama, speculate="suffix").submit(beams)
    engine = load(tiny_llama)
    engine.submit(beams)
    while engine.has_work:
        engine.step()
    assert engine.stats().generation_tokens_total > 0
    assert engine.stats().drafts_total == 0


def test_no_draft_is_longer_than_asked_for(tiny_llama: Path) -> None:
    engine = load(tiny_llama, speculate_tokens=2)
    prompt = (5, 6, 7, 8) * 8
    engine.submit(Request(request_id="a", prompt_token_ids=prompt, sampling=SamplingParams()))
    speculator = engine._scheduler._speculator
    assert speculator is not None
    longest = 0
    while engine.has_work:
        engine.step()
        drafted = engine._scheduler._state.counters.last_plan.drafted
        longest = max(longest, *(len(entry.drafts) for entry in drafted), 0)
    assert longest <= 2
