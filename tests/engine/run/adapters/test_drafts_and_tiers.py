"""Adapters with drafts, host memory and a disk: each answer follows from its own weights."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from support.engine.adapter_requests import PROMPT, finish, load, request
from support.engine.drafting import draft_always
from support.engine.replaying import Answers, ReplayingSpeculator

from appliance.engine.tiers import read_ahead, write_behind

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.engine import LLMEngine
    from appliance.engine.nouns.request import Request


def answers(engine: LLMEngine, requests: list[Request]) -> tuple[Answers, int]:
    """Tokens, log probabilities and reason of each choice; and the pieces they came in."""
    found: Answers = {}
    pieces = 0
    for one in requests:
        engine.submit(one)
    for delta in finish(engine):
        assert delta.error is None, delta.error
        pieces += 1
        tokens, reports, _ = found.get((delta.request_id, delta.index), ([], [], None))
        found[delta.request_id, delta.index] = (
            [*tokens, *delta.token_ids],
            [*reports, *(delta.logprobs or ())],
            delta.finish_reason,
        )
    return found, pieces


def mixed(folders: list[Path]) -> list[Request]:
    seeded: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_tokens": 40, "ignore_eos": True}
    return [
        request("base", **seeded),
        request("greedy", folders[0], max_tokens=40, logprobs=2),
        request("several", folders[1], n=2, **seeded),
        request("base again", repetition_penalty=1.2, logprobs=1, **seeded),
        request("same", folders[0], **seeded),
    ]


def test_drafts_change_no_answer(model: Path, folders: list[Path]) -> None:
    requests = mixed(folders)
    expected, pieces = answers(load(model, speculate="off"), requests)
    assert len({tuple(tokens) for tokens, *_ in expected.values()}) == len(expected)
    engine = load(model, speculate="off")
    engine.scheduler.speculator = ReplayingSpeculator(
        expected, 0.8, engine.grammars.matchers, random.Random(5)
    )
    found, fewer = answers(engine, requests)
    assert found == expected
    assert engine.stats().accepted_tokens_total > 20
    assert engine.stats().draft_tokens_total > engine.stats().accepted_tokens_total
    assert fewer < pieces


def test_earlier_answers_are_proposed_to_every_adapter(model: Path, folders: list[Path]) -> None:
    """Each adapter verifies them with its own weights."""
    engine, plain = load(model, speculate="suffix"), load(model, speculate="off")
    draft_always(engine)
    for order in (folders, folders, folders[::-1]):
        requests = mixed(order)
        assert answers(engine, requests)[0] == answers(plain, requests)[0]
    assert engine.stats().accepted_tokens_total > 10


def cached(engine: LLMEngine, one: Request) -> int:
    engine.submit(one)
    return max(delta.num_cached_tokens for delta in finish(engine))


def test_host_memory_knows_adapters_by_their_content(
    model: Path, folders: list[Path], tmp_path: Path
) -> None:
    block = 8192
    engine = load(model, kv_cache_memory=6 * block, max_model_len=64, kv_host_memory=40 * block)
    engine.tiers.host.keeps_unwanted = True  # as on a GPU
    folder = shutil.copytree(folders[0], tmp_path / "same")
    expected, _ = answers(engine, [request("first", folder)])
    for number in range(3):  # evict it
        cached(engine, request(f"r{number}", prompt=tuple(range(number + 43, number + 83))))
    assert engine.stats().kv_host_blocks > 0
    for other in (request("base"), request("other", folders[1])):
        assert cached(engine, other) == 0
    before = engine.stats().prefix_hits_host_total
    found, _ = answers(engine, [request("first", folder)])
    assert found == expected
    assert engine.stats().prefix_hits_host_total > before
    shutil.copytree(folders[2], folder, dirs_exist_ok=True)
    assert cached(engine, request("changed", folder)) == 0


def test_a_swapped_sequence_goes_on_with_its_adapter(model: Path, folders: list[Path]) -> None:
    short = PROMPT[:17]
    requests = [request(f"r{i}", folders[i % 2], short, max_tokens=40) for i in range(4)]
    expected, _ = answers(load(model), requests)
    tight = load(
        model, kv_cache_memory=9 * 8192, max_model_len=64, kv_host_memory=2**20, speculate="off"
    )
    for folder in folders[:2]:  # both in slots before, else one adapter's may run alone
        answers(tight, [request(folder.name, folder, short[:9], max_tokens=1)])
    found, _ = answers(tight, requests)
    assert tight.stats().preemptions_total > 0
    assert found == expected


def test_the_disk_knows_adapters_by_their_content(
    model: Path, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "MIN_TOKENS", 16)
    monkeypatch.setattr(read_ahead, "MIN_READ_TOKENS", 16)
    options: dict[str, Any] = {"kv_disk": str(tmp_path / "disk")}
    folder = shutil.copytree(folders[0], tmp_path / "same")
    first = load(model, **options)
    expected, _ = answers(first, [request("x", folder)])
    assert answers(first, [request("x", folder)])[0] == expected
    writes = first.tiers.writes
    assert writes is not None
    writes.flush(10.0)
    assert first.stats().kv_disk_written_total > 0
    first.close()
    second = load(model, **options)
    assert cached(second, request("base")) == cached(second, request("other", folders[1])) == 0
    found, _ = answers(second, [request("x", folder)])
    assert found == expected
    assert second.stats().prefix_hits_disk_total > 0
    shutil.copytree(folders[2], folder, dirs_exist_ok=True)
    assert cached(second, request("changed", folder)) == 0
    second.close()
