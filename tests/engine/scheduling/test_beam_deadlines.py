"""A beam search that runs out of time ends with its best answers so far, not with nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.messages import Candidate
from appliance.engine.nouns.plan import Continuations
from appliance.engine.nouns.request import FinishReason, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.scheduling.beams import Beam, BeamSearch

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.nouns.messages import SequenceDelta

EOS = 3
TIMEOUT = 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def loaded(tiny_llama: Path) -> LLMEngine:
    config = EngineConfig(
        model=str(tiny_llama),
        threads=1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        dtype="float32",
        kv_cache_dtype="fp32",
        prefix_caching=False,
    )
    return load_llm_engine(
        config, eos_token_ids=(EOS,), metadata=None, on_progress=lambda stage, done, total: None
    )


@pytest.fixture
def clock(loaded: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loaded, "clock", clock)
    return clock


def request(name: str, **fields: Any) -> Request:
    sampling: dict[str, Any] = {
        "n": 3,
        "best_of": 4,
        "use_beam_search": True,
        "max_tokens": 30,
        "ignore_eos": True,
    }
    sampling |= fields.pop("sampling", {})
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(20, 50)),
        sampling=SamplingParams(**sampling),
        **fields,
    )


def finish(engine: LLMEngine) -> list[SequenceDelta]:
    deltas: list[SequenceDelta] = []
    while engine.has_work:
        deltas += engine.step().deltas
        engine.check_invariants()
    assert engine.stats().blocks_active == 0
    return deltas


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_it_ends_with_what_it_would_have_found_with_so_many_tokens(
    loaded: LLMEngine, clock: Clock, num_tokens: int
) -> None:
    loaded.submit(request("whole", sampling={"max_tokens": num_tokens, "logprobs": 2}))
    whole = finish(loaded)
    loaded.submit(request("cut", timeout=TIMEOUT, sampling={"logprobs": 2}))
    while next(iter(loaded.scheduler.sequences())).num_output_tokens < num_tokens:
        assert not loaded.step().deltas
    clock.now = TIMEOUT
    cut = finish(loaded)
    assert [delta.index for delta in cut] == [0, 1, 2]
    for one, other in zip(cut, whole, strict=True):
        assert len(one.token_ids) == num_tokens
        assert one.finish_reason is FinishReason.TIMEOUT
        assert one.error is None
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
        assert one.cumulative_logprob == other.cumulative_logprob


def test_before_its_first_token_it_ends_with_empty_answers(loaded: LLMEngine, clock: Clock) -> None:
    loaded.submit(request("long", timeout=TIMEOUT))
    loaded.scheduler.plan(0.0)
    loaded.discard_plans()  # it was started, but computed nothing
    clock.now = TIMEOUT
    deltas = finish(loaded)
    assert [(delta.index, delta.token_ids) for delta in deltas] == [(0, ()), (1, ()), (2, ())]
    assert {delta.finish_reason for delta in deltas} == {FinishReason.TIMEOUT}


def test_one_that_was_never_started_ends_with_an_error(loaded: LLMEngine, clock: Clock) -> None:
    loaded.submit(request("waits", timeout=TIMEOUT))
    clock.now = TIMEOUT
    deltas = finish(loaded)
    assert len(deltas) == 3
    assert all(delta.expired and "was not started" in str(delta.error) for delta in deltas)


def test_one_that_was_preempted_still_has_its_beams(loaded: LLMEngine, clock: Clock) -> None:
    loaded.submit(request("cut", timeout=TIMEOUT))
    for _ in range(6):
        loaded.step()
    loaded.scheduler.plan(0.0)
    loaded.discard_plans()
    assert loaded.stats().waiting == 4
    clock.now = TIMEOUT
    assert [len(delta.token_ids) for delta in finish(loaded)] == [6, 6, 6]


def test_finished_answers_stay_what_they_are_among_those_cut_off() -> None:
    search = BeamSearch(
        request("r", sampling={"n": 2, "best_of": 2, "ignore_eos": False}), (EOS,), 9
    )
    likely = Continuations((Candidate(EOS, -0.1), Candidate(5, -0.2), Candidate(6, -0.3)))
    grown = [beam for _, beam in search.advance([(Beam(), likely)])]
    search.cut(grown)
    assert search.over
    found = [(one.token_ids, one.reason) for one in search.finished]
    assert found == [((EOS,), FinishReason.STOP), ((5,), FinishReason.TIMEOUT)]
