"""Scores and hidden states of prompts, by both executors, in any chunks."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.engine.broken_logits import break_logits
from support.engine.late_device import LateDevice
from support.models.teacher_forcing import BLOCK_SIZE, logits_of, one_sequence

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.messages import SequenceDelta
from appliance.engine.nouns.request import FinishReason, Pooling, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run import prompt_reader
from appliance.errors import ContextLengthError, RequestError
from appliance.kernels.arrays import dtype_name

pytestmark = pytest.mark.usefixtures("exact_products")  # so that torch's results are reproducible

EOS = 2
EXECUTORS = ["library", "torch", "late"]


def load(folder: Path, executor: str = "library", **options: Any) -> LLMEngine:
    given = {
        "threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kernels": "auto" if executor == "library" else "torch",
        **options,
    }
    config = EngineConfig(model=str(folder), **given)
    device = LateDevice() if executor == "late" else None
    return load_llm_engine(config, (EOS,), None, lambda stage, done, total: None, device)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 512, (length,), generator=generator).tolist())


def request(
    name: str, tokens: tuple[int, ...], pooling: Pooling | None = None, **sampling: Any
) -> Request:
    defaults = {"temperature": 0.0, "max_tokens": 0, "ignore_eos": True}
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling=SamplingParams(**{**defaults, **sampling}),
        pooling=pooling,
    )


def scored(name: str, tokens: tuple[int, ...], count: int = 3, **sampling: Any) -> Request:
    return request(name, tokens, prompt_logprobs=count, **sampling)


def run(engine: LLMEngine, *requests: Request) -> list[SequenceDelta]:
    for item in requests:
        engine.submit(item)
    deltas: list[SequenceDelta] = []
    while engine.has_work:
        deltas += engine.step().deltas
        engine.check_invariants()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_active, stats.kv_tokens) == (0, 0, 0, 0)
    return deltas


def scores_of(deltas: list[SequenceDelta], name: str) -> list[tuple[float, list[int]]]:
    """The log probability of each token, and the likeliest tokens in its place."""
    return [
        (score.chosen.logprob, [one.token_id for one in score.top])
        for delta in deltas
        if delta.request_id == name
        for score in delta.prompt_logprobs or ()
    ]


def executor_of(engine: LLMEngine) -> Any:
    runner: Any = engine.runner
    return runner.executor


def expected_scores(engine: LLMEngine, tokens: tuple[int, ...]) -> torch.Tensor:
    logits = logits_of(executor_of(engine), tokens)[:-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def hidden_of(engine: LLMEngine, tokens: tuple[int, ...]) -> torch.Tensor:
    executor = executor_of(engine)
    table = tuple(range(-(-len(tokens) // BLOCK_SIZE)))
    cache = executor.allocate_cache(
        executor_kv(executor), num_blocks=len(table), block_size=BLOCK_SIZE
    )
    batch = one_sequence(table, 0, len(tokens), executor.device)
    found: torch.Tensor = executor.hidden(
        torch.tensor(tokens), torch.arange(len(tokens)), batch, cache
    )
    return found.float()


def executor_kv(executor: Any) -> Any:
    from appliance.kernels.cache.kv_format import KVFormat

    formats = {"float32": KVFormat.FP32, "bfloat16": KVFormat.BF16}
    return formats[dtype_name(executor.dtype)]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_tokens_of_a_prompt_have_the_models_log_probabilities(
    tiny_llama: Path, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_reader, "LOGIT_ROWS", 7)
    engine = load(tiny_llama, executor, dtype="float32", kv_cache_dtype="fp32")
    texts = {f"r{length}": prompt(length, length) for length in (1, 2, 65, 150)}
    deltas = run(engine, *(scored(name, tokens) for name, tokens in texts.items()))
    for name, tokens in texts.items():
        found = scores_of(deltas, name)
        assert len(found) == len(tokens) - 1
        expected = expected_scores(engine, tokens)
        torch.testing.assert_close(
            torch.tensor([score for score, _ in found]), expected, atol=2e-4, rtol=0
        )
        logits = logits_of(executor_of(engine), tokens)[:-1]
        assert [top for _, top in found] == logits.topk(3).indices.tolist()
        (last,) = [one for one in deltas if one.request_id == name and one.finish_reason]
        assert (last.finish_reason, last.token_ids) == (FinishReason.LENGTH, ())
        assert last.queue_seconds is not None
    assert engine.stats().generation_tokens_total == 0


@pytest.mark.parametrize("executor", EXECUTORS)
def test_scores_leave_the_answer_and_its_neighbours_as_they_are(
    tiny_llama: Path, executor: str
) -> None:
    engine = load(tiny_llama, executor, dtype="float32")
    plain = request("plain", prompt(90, 1), max_tokens=12, logprobs=1)
    both = scored("both", prompt(90, 1), max_tokens=12, logprobs=1, n=2)

    def answers(deltas: list[SequenceDelta], name: str, index: int = 0) -> list[int]:
        own = [one for one in deltas if (one.request_id, one.index) == (name, index)]
        return [token for one in own for token in one.token_ids]

    alone = run(engine, plain)
    deltas = run(engine, plain, both)
    assert answers(deltas, "plain") == answers(alone, "plain")
    for index in (0, 1):
        assert answers(deltas, "both", index) == answers(alone, "plain")
    assert len(scores_of(deltas, "both")) == 89
    assert not any(one.prompt_logprobs for one in deltas if one.index == 1)


def test_a_cached_prefix_is_computed_again_and_kept_for_others(tiny_llama: Path) -> None:
    engine = load(tiny_llama)
    tokens = prompt(100, 4)
    first = scores_of(run(engine, scored("a", tokens)), "a")
    before = engine.stats().prefix_hits_total
    assert scores_of(run(engine, scored("b", tokens)), "b") == first
    assert engine.stats().prefix_hits_total == before
    run(engine, request("c", tokens, max_tokens=1))
    assert engine.stats().prefix_hits_total - before == 99
    last = run(engine, request("d", tokens, Pooling.LAST))
    assert engine.stats().prefix_hits_total - before == 2 * 99
    whole = run(engine, request("e", tokens, Pooling.MEAN))
    assert engine.stats().prefix_hits_total - before == 2 * 99
    assert [one.pooled is not None for one in last] == [True, False]
    assert [one.pooled is not None for one in whole] == [True, False]


@pytest.mark.parametrize(
    ("executor", "caching"),
    [("library", False), ("library", True), ("torch", False), ("late", True)],
)
def test_preemption_changes_no_score(tiny_llama: Path, executor: str, caching: bool) -> None:
    options = {"kv_cache_dtype": "int8", "prefix_caching": caching, "max_model_len": 256}
    roomy = load(tiny_llama, executor, **options)
    bytes_per_block = roomy.info.kv_bytes // roomy.info.num_blocks
    num_blocks = 256 // roomy.info.block_size + 1
    small = load(tiny_llama, executor, kv_cache_memory=num_blocks * bytes_per_block, **options)
    texts = [prompt(90 + 7 * i, i) for i in range(6)]
    requests = [
        scored(f"r{i}", text, max_tokens=64) if i % 2 else scored(f"r{i}", text)
        for i, text in enumerate(texts)
    ]
    requests += [request(f"m{i}", text, Pooling.MEAN) for i, text in enumerate(texts)]
    tight, wide = run(small, *requests), run(roomy, *requests)
    assert small.stats().preemptions_total > 0
    for item in requests:
        name = item.request_id
        assert scores_of(tight, name) == scores_of(wide, name)
        pooled = [
            [one.pooled for one in deltas if one.request_id == name and one.pooled]
            for deltas in (tight, wide)
        ]
        assert len(pooled[0]) == len(pooled[1]) == (item.pooling is not None)
        for a, b in zip(*pooled, strict=True):
            torch.testing.assert_close(floats(a), floats(b), atol=1e-5, rtol=1e-5)


def floats(content: bytes) -> torch.Tensor:
    return torch.tensor(array("f", content))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_pooled_hidden_states_are_those_that_the_head_reads(
    tiny_llama: Path, executor: str
) -> None:
    engine = load(tiny_llama, executor, dtype="float32", kv_cache_dtype="fp32")
    texts = [prompt(length, length) for length in (1, 30, 150)]
    requests = [
        request(f"{pooling.value}{len(text)}", text, pooling)
        for pooling in Pooling
        for text in texts
    ]
    deltas = run(engine, *requests)
    for item in requests:
        (content,) = [
            one.pooled for one in deltas if one.request_id == item.request_id and one.pooled
        ]
        hidden = hidden_of(engine, item.prompt_token_ids)
        wanted = {Pooling.LAST: hidden[-1], Pooling.MEAN: hidden.mean(0), Pooling.CLS: hidden[0]}
        expected = wanted[item.pooling or Pooling.LAST]
        torch.testing.assert_close(floats(content), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_labels_are_logits_of_the_last_row(
    tiny_llama: Path, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_reader, "LOGIT_ROWS", 2)
    engine = load(tiny_llama, executor, dtype="float32", kv_cache_dtype="fp32")
    wanted = {"a": (7, 300), "b": (511,), "c": (5, 6, 7)}
    texts = {name: prompt(40 + 50 * place, place) for place, name in enumerate(wanted)}
    requests = [labelled(name, texts[name], *labels) for name, labels in wanted.items()]
    beside = [request("pooled", texts["a"], Pooling.MEAN), scored("scored", texts["b"])]
    deltas = run(engine, *requests, *beside)
    for name, labels in wanted.items():
        (content,) = [one.pooled for one in deltas if one.request_id == name and one.pooled]
        expected = logits_of(executor_of(engine), texts[name])[-1, list(labels)]
        torch.testing.assert_close(floats(content), expected, atol=2e-4, rtol=1e-4)
    assert len(scores_of(deltas, "scored")) == len(texts["b"]) - 1
    with pytest.raises(RequestError, match="token id 512") as caught:
        engine.submit(labelled("d", texts["a"], 512))
    assert caught.value.param == "labels"


def labelled(name: str, tokens: tuple[int, ...], *labels: int) -> Request:
    return msgspec.structs.replace(request(name, tokens, Pooling.LAST), labels=labels)


def test_without_an_answer_a_prompt_may_fill_the_context(tiny_llama: Path) -> None:
    engine = load(tiny_llama, max_model_len=128)
    full = prompt(128, 3)
    assert len(scores_of(run(engine, scored("full", full)), "full")) == 127
    assert len(run(engine, request("pooled", full, Pooling.MEAN))) == 2
    with pytest.raises(ContextLengthError):
        engine.submit(scored("answered", full, max_tokens=1))
    with pytest.raises(ContextLengthError):
        engine.submit(scored("longer", prompt(129)))


def test_numbers_that_are_none_end_the_request_that_asked(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(tiny_llama)
    executor = executor_of(engine)
    break_logits(engine, monkeypatch, lambda call, rows: False)
    runner: Any = engine.runner
    monkeypatch.setattr(runner.reader, "executor", BrokenHead(executor, float("nan")))
    (delta,) = run(engine, scored("a", prompt(20)))
    assert delta.finish_reason is FinishReason.ERROR
    assert "no finite logits" in (delta.error or "")
    (delta,) = run(engine, request("b", prompt(20), max_tokens=1))
    assert delta.finish_reason is FinishReason.LENGTH


class BrokenHead:
    def __init__(self, executor: Any, value: float) -> None:
        self._executor = executor
        self._value = value

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._executor.logits(hidden) + self._value
        return found


def test_beams_and_empty_wishes_are_refused() -> None:
    with pytest.raises(RequestError, match="scores of the prompt"):
        SamplingParams(prompt_logprobs=1, use_beam_search=True, best_of=2, temperature=0.0)
    with pytest.raises(RequestError, match="max_tokens is 0"):
        request("a", (1, 2))
