"""Engines of several ranks, and prompts that share prefixes and do not all fit into the cache."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import AdapterRef, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from appliance.engine.nouns.messages import Candidate, SequenceDelta
    from appliance.engine.run.device import Device

# The four prompts and their answers need twice as many, so that sequences are preempted and
# resumed.
CACHED_TOKENS = 192
PREFIX = list(range(3, 51))
PROMPTS = [[*PREFIX, *range(70, 80)], [*PREFIX, 80], list(range(90, 28, -1)), [5, 6, 7] * 21]


@contextlib.contextmanager
def loaded(folder: Path, device: Device | None = None, **options: Any) -> Iterator[LLMEngine]:
    """Load an engine with one thread a rank; end its ranks after the test."""
    usual: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "dtype": "float32",
        "kv_disk": "off",
    }
    config = EngineConfig(model=str(folder), **usual | options)
    engine = load_llm_engine(config, (), None, lambda stage, done, total: None, device)
    try:
        yield engine
    finally:
        engine.close()
        for rank in engine.info.ranks[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)


def answers(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], adapter: AdapterRef | None = None
) -> list[list[int]]:
    """Return the greedy answers to all prompts at once."""
    found: list[list[int]] = [[] for _ in prompts]
    for delta in _deltas(engine, prompts, adapter=adapter):
        found[int(delta.request_id)].extend(delta.token_ids)
    return found


def best_two(
    engine: LLMEngine, prompts: Sequence[Sequence[int]]
) -> list[list[tuple[Candidate, ...]]]:
    """Return the two best tokens at each place of the greedy answers, the chosen one first."""
    found: list[list[tuple[Candidate, ...]]] = [[] for _ in prompts]
    for delta in _deltas(engine, prompts, logprobs=2):
        found[int(delta.request_id)].extend(one.top for one in delta.logprobs or ())
    return found


def assert_best(
    found: Sequence[Sequence[int]],
    expected: Sequence[Sequence[tuple[Candidate, ...]]],
    closeness: float,
) -> None:
    """Assert that answers diverge only where the log probabilities of the two best are close."""
    for own, places in zip(found, expected, strict=True):
        assert len(own) == len(places)
        for token_id, (best, second) in zip(own, places, strict=True):
            if token_id != best.token_id:
                assert token_id == second.token_id
                assert best.logprob - second.logprob < closeness
                break


def assert_a_rank_takes_the_engine_along(engine: LLMEngine) -> None:
    """Kill rank 1; assert that the engine names it and runs no further step."""
    pid = engine.info.ranks[1].pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"rank 1 .*process {pid}.* ended by signal 9"):
        answers(engine, PROMPTS[:1])
    with pytest.raises(EngineError, match="was interrupted"):
        engine.step()


def _deltas(
    engine: LLMEngine,
    prompts: Sequence[Sequence[int]],
    *,
    adapter: AdapterRef | None = None,
    logprobs: int | None = None,
) -> Iterator[SequenceDelta]:
    sampling = SamplingParams(temperature=0.0, max_tokens=45, ignore_eos=True, logprobs=logprobs)
    for number, prompt in enumerate(prompts):
        engine.submit(
            Request(
                request_id=str(number),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                adapter=adapter,
            )
        )
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.error is None, delta.error
            yield delta
