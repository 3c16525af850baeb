"""The settings of speculation that are accepted, and those that are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from support.engine.draft_answers import SIZES
from support.models.recurrent_models import RECURRENT
from support.models.sure_models import write_sure_model

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.draft import open_draft
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.load.memory_request import request_memory
from appliance.engine.memory.admission import total_bytes
from appliance.engine.memory.plan import plan_memory, workspace_bytes
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.errors import ConfigError, MemoryPlanError, RequestError
from appliance.model.source import open_model

if TYPE_CHECKING:
    from pathlib import Path


def load(folder: Path, **options: Any) -> LLMEngine:
    usual: dict[str, Any] = {"threads": 1, "max_model_len": 64, "max_num_seqs": 4}
    config = EngineConfig(**{"model": str(folder), **usual, **options})
    return load_llm_engine(config, (), None, lambda *_: None, None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculate": "eagle"}, "one of auto, off, suffix, mtp, draft=MODEL, eagle=PATH; got 'ea"),
        ({"speculate": "draft="}, "mtp, draft=MODEL, eagle=PATH; got 'draft='"),
        ({"speculate_tokens": 16}, "speculate_tokens must be between 1 and 15 tokens; got 16"),
        ({"speculate_tokens": 0}, "speculate_tokens must be between 1 and 15 tokens; got 0"),
    ],
)
def test_what_there_is_not_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**options)


def test_it_needs_a_gpu_or_the_cpu_library(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="--speculate suffix needs a GPU or the CPU library"):
        load(tiny_llama, kernels="torch", speculate="suffix")
    assert load(tiny_llama, kernels="torch").scheduler.speculator is None
    assert load(tiny_llama, speculate="off").scheduler.speculator is None


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
    speculator = engine.scheduler.speculator
    assert speculator is not None
    longest = 0
    while engine.has_work:
        engine.step()
        drafted = engine.scheduler.state.counters.last_plan.drafted
        longest = max(longest, *(len(entry.drafts) for entry in drafted), 0)
    assert longest <= 2


def random_model(folder: Path, model_type: str = "llama", **settings: Any) -> Path:
    write_sure_model(model_type, folder, **{**SIZES, "vocab_size": 512, **settings})
    return folder


def test_a_model_that_cannot_draft_is_refused_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    model_type, settings = RECURRENT["lfm2"]
    others = {
        "vocabulary": random_model(tmp_path / "vocabulary", vocab_size=2048),
        "context": random_model(tmp_path / "context", max_position_embeddings=32),
        "state": random_model(tmp_path / "state", model_type, **settings),
    }
    for name, says in {
        "vocabulary": "the draft model has 2,048 tokens and the model 512",
        "context": "was made for 32 tokens and a context has 64; .* --max-model-len 32",
        "state": "recurrent layers, whose state cannot go back",
    }.items():
        with pytest.raises(ConfigError, match=f"--speculate draft=.*{name}: .*{says}"):
            load(tiny_llama, speculate=f"draft={others[name]}")
    with pytest.raises(ConfigError, match="draft=self needs the CPU library"):
        load(tiny_llama, kernels="torch", speculate="draft=self")


@pytest.mark.model
def test_a_model_of_few_bits_does_not_draft_for_itself(smollm2_gguf: Path) -> None:
    with pytest.raises(ConfigError, match="its weights have no more than that already; name a"):
        load(smollm2_gguf, speculate="draft=self")


def test_a_draft_model_counts_in_the_memory_plan(tiny_llama: Path) -> None:
    config = EngineConfig(model=str(tiny_llama), max_model_len=64, max_num_seqs=4)
    source = open_model(tiny_llama)
    asked = msgspec.structs.replace(config, speculate="draft=self")
    _, without = request_memory(config, source)
    execution, with_ = request_memory(asked, source)
    draft = open_draft(asked, source, execution)
    assert draft is not None
    assert draft.weight_bytes < with_.draft_bytes < without.weight_bytes
    assert with_.kv_bytes_per_token > without.kv_bytes_per_token
    full = replace(with_, budget_bytes=with_.process_bytes + with_.weight_bytes)
    with pytest.raises(MemoryPlanError, match="of what drafts and"):
        plan_memory(full)
    context = 64 * with_.kv_bytes_per_token
    least = full.budget_bytes + workspace_bytes(with_) + context + with_.draft_bytes
    plan = plan_memory(replace(with_, budget_bytes=least))
    assert total_bytes(plan, with_) == least
    with pytest.raises(MemoryPlanError, match="--speculate auto, without what drafts, would fit"):
        plan_memory(replace(with_, budget_bytes=least - 1))
