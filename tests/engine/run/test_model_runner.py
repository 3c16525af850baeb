"""The runner on an asynchronous device, against the runner that does everything synchronously."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.broken_logits import break_logits
from support.engine.late_device import LateDevice
from support.gguf.gguf_files import first_layers

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.limits import SAMPLE_ROWS
from appliance.engine.nouns.messages import SequenceDelta
from appliance.engine.nouns.request import FinishReason, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.cuda_graphs import GraphCache, StepSize
from appliance.engine.run.device import Device

pytestmark = pytest.mark.usefixtures("exact_products")  # so that torch's results are reproducible

EOS = 2


def load(folder: Path, device: Device | None, **options: Any) -> LLMEngine:
    return load_telling(lambda stage, done, total: None, folder, device, options)


def load_telling(
    on_progress: Callable[[str, int, int], None],
    folder: Path,
    device: Device | None,
    options: dict[str, Any],
) -> LLMEngine:
    defaults = {"threads": 1, "max_num_seqs": 16, "max_num_batched_tokens": 64, "kernels": "torch"}
    config = EngineConfig(**{"model": str(folder), **defaults, **options})
    return load_llm_engine(config, (EOS,), None, on_progress, device)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 512, (length,), generator=generator).tolist())


def request(name: str, tokens: tuple[int, ...], **sampling: Any) -> Request:
    defaults = {"temperature": 0.0, "max_tokens": 20, "seed": 5}
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling=SamplingParams(**{**defaults, **sampling}),
    )


def deltas_of(engine: LLMEngine, *requests: Request) -> list[SequenceDelta]:
    for item in requests:
        engine.submit(item)
    deltas: list[SequenceDelta] = []
    while engine.has_work:
        deltas += engine.step().deltas
        engine.check_invariants()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_active, stats.kv_tokens) == (0, 0, 0, 0)
    return deltas


Answer = tuple[list[int], FinishReason | None, list[object]]


def run(engine: LLMEngine, *requests: Request) -> dict[tuple[str, int], Answer]:
    """Tokens, reason and log probabilities by request and choice."""
    answers: dict[tuple[str, int], Answer] = {}
    for delta in deltas_of(engine, *requests):
        tokens, reason, logprobs = answers.setdefault(
            (delta.request_id, delta.index), ([], None, [])
        )
        assert reason is None, "a delta behind the end"
        tokens += delta.token_ids
        for reported in delta.logprobs or ():
            ids = [candidate.token_id for candidate in (reported.chosen, *reported.top)]
            values = [candidate.logprob for candidate in (reported.chosen, *reported.top)]
            logprobs.append((ids, [round(value, 3) for value in values]))
        answers[delta.request_id, delta.index] = (tokens, delta.finish_reason, logprobs)
    return answers


MIXED = [
    request("greedy", prompt(50, 1)),
    request("long", prompt(150, 2), max_tokens=30),
    request("seeded", prompt(33, 3), temperature=1.0, seed=7),
    request("nucleus", prompt(20, 4), temperature=0.8, top_p=0.9, top_k=50, seed=-3),
    request("min-p", prompt(9, 5), temperature=1.5, min_p=0.05),
    request("choices", prompt(40, 6), n=3, temperature=1.0),
    request("repetition", prompt(25, 7), repetition_penalty=1.3, temperature=0.7),
    request("presence", prompt(26, 8), presence_penalty=1.5, frequency_penalty=0.5),
    request("bias", prompt(12, 9), logit_bias={30: 5.0, 31: -100.0}, temperature=1.0),
    request("min-tokens", prompt(12, 10), min_tokens=8, stop_token_ids=tuple(range(3, 200))),
    request("stops", prompt(13, 11), stop_token_ids=tuple(range(3, 100)), temperature=2.0),
    request("logprobs", prompt(14, 12), logprobs=5, temperature=1.0, logit_bias={40: 3.0}),
    request("chosen", prompt(15, 13), logprobs=0),
    request("one", prompt(70, 14), max_tokens=1),
    request("rest", prompt(240, 15), max_tokens=None),
    request("same", prompt(50, 1)),
]


def graphs_of(engine: LLMEngine) -> GraphCache:
    graphs: GraphCache | None = engine.runner.graphs  # type: ignore[attr-defined]
    assert graphs is not None
    return graphs


def test_answers_equal_those_without_anything_in_flight(tiny_llama: Path) -> None:
    expected = run(load(tiny_llama, None), *MIXED)
    engine = load(tiny_llama, LateDevice())
    assert engine.runner.depth == 1
    assert run(engine, *MIXED) == expected
    assert run(engine, *MIXED) == run(load(tiny_llama, None, prefix_caching=False), *MIXED)
    assert {reason for _, reason, _ in expected.values()} >= {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_preemption_changes_nothing(tiny_llama: Path, kv: str) -> None:
    bytes_per_block = {"bf16": 16 * 2 * 2 * 2 * 32, "int8": 16 * 2 * 2 * 2 * 18}[kv]
    penalties: list[dict[str, float]] = [{}, {"presence_penalty": 0.5, "repetition_penalty": 1.2}]
    requests = [
        request(f"r{i}", prompt(60 + i, i), max_tokens=60, **penalties[i % 2]) for i in range(6)
    ]
    options = {"kv_cache_dtype": kv, "prefix_caching": False}
    tight = load(tiny_llama, LateDevice(), kv_cache_memory=32 * bytes_per_block, **options)
    assert tight.info.num_blocks == 32
    answers = run(tight, *requests)
    assert tight.stats().preemptions_total > 0
    assert answers == run(load(tiny_llama, None, **options), *requests)


@pytest.mark.parametrize("kv", ["int4-sealed", "k8v4"])
def test_sealed_blocks_say_the_same_with_and_without_graphs(tiny_llama: Path, kv: str) -> None:
    names = ("greedy", "seeded", "choices", "repetition", "logprobs", "one", "rest")
    requests = [one for one in MIXED if one.request_id in names]
    expected = run(load(tiny_llama, None, kv_cache_dtype=kv), *requests)
    engine = load(tiny_llama, LateDevice(), kv_cache_dtype=kv)
    for _ in range(2):
        assert run(engine, *requests) == expected
    assert graphs_of(engine).captured


def test_all_graphs_are_there_before_the_first_request(tiny_llama: Path) -> None:
    device = LateDevice()
    engine = load(tiny_llama, device, max_num_seqs=9)
    graphs, decodes = graphs_of(engine), (1, 2, 4, 8, 9)
    drafts = [
        StepSize(size, draft_rows=min(size * (rows - 1), SAMPLE_ROWS - size), rows_each=rows)
        for size in decodes
        for rows in (2, 4, 8)
    ]
    mixed = StepSize(8, 32), StepSize(8, 64)
    assert graphs.captured == tuple(sorted([*map(StepSize, decodes), *mixed, *drafts]))
    assert device.captures == 22
    five = [request(f"r{i}", prompt(20 + i, i), ignore_eos=True) for i in range(5)]
    expected = run(load(tiny_llama, None), *five)
    for _ in range(2):
        assert run(engine, *five) == expected
        assert run(engine, five[0]) == {("r0", 0): expected["r0", 0]}
    assert device.captures == 22, "no request waits for a capture"


@pytest.mark.parametrize("kv", ["bf16", "int4-sealed"])
def test_prompts_beside_answers_replay_a_graph_too(
    tiny_llama: Path, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(f"r{i}", prompt(20 + 3 * i, i), ignore_eos=True) for i in range(4)]
    requests.append(request("drawn", prompt(25, 9), temperature=1.0, presence_penalty=1.0))
    expected = run(load(tiny_llama, None, kv_cache_dtype=kv), *requests)
    engine = load(tiny_llama, LateDevice(), max_num_seqs=9, kv_cache_dtype=kv)
    graphs, replayed = graphs_of(engine), list[StepSize]()
    real = graphs.run

    def counted(size: StepSize, function: Callable[[], None]) -> None:
        replayed.append(size)
        real(size, function)

    monkeypatch.setattr(graphs, "run", counted)
    answers: dict[tuple[str, int], list[int]] = {}
    for item in requests:
        engine.submit(item)
        for _ in range(2):
            answers_of(engine.step().deltas, answers)
    while engine.has_work:
        answers_of(engine.step().deltas, answers)
    assert answers == {key: tokens for key, (tokens, _, _) in expected.items()}
    assert len(replayed) == engine.stats().steps_total
    assert {StepSize(8, 32), StepSize(8, 64)} & {*replayed}
    assert set(replayed) <= set(graphs.captured)


def answers_of(deltas: Iterable[SequenceDelta], answers: dict[tuple[str, int], list[int]]) -> None:
    for delta in deltas:
        answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)


def test_graphs_are_told_while_they_are_made(tiny_llama: Path) -> None:
    told: list[tuple[str, int, int]] = []
    options = {"max_num_seqs": 3, "speculate": "off"}
    load_telling(lambda *now: told.append(now), tiny_llama, LateDevice(), options)
    assert [now for now in told if now[0] == "graphs"] == [("graphs", i, 5) for i in range(6)]


def test_graphs_can_be_turned_off(tiny_llama: Path) -> None:
    device = LateDevice()
    engine = load(tiny_llama, device, cuda_graphs="off")
    run(engine, *MIXED[:4])
    assert device.captures == 0


def test_a_step_is_in_flight_while_the_next_one_is_planned(tiny_llama: Path) -> None:
    engine = load(tiny_llama, LateDevice(), cuda_graphs="off")
    engine.submit(request("r", prompt(20), max_tokens=3, ignore_eos=True))
    reports = []
    while engine.has_work:
        reports.append(engine.step())
    assert reports[0].started == ("r",)
    # There is one report more than steps: the last one launches nothing.
    assert [sum(len(d.token_ids) for d in report.deltas) for report in reports] == [0, 1, 1, 1]
    assert engine.stats().steps_total == 3


def test_penalties_count_tokens_that_the_host_does_not_know_yet(tiny_llama: Path) -> None:
    """Sequences run in graphs and outside, beside a prompt, with a bias, and in reused slots."""
    requests = [
        request("repetition", prompt(30, 1), max_tokens=60, repetition_penalty=1.5),
        request("frequency", prompt(31, 2), max_tokens=60, frequency_penalty=1.0),
        request(
            "choices", prompt(32, 3), max_tokens=40, n=3, temperature=1.0, presence_penalty=1.5
        ),
        request("bias", prompt(9, 4), max_tokens=40, frequency_penalty=0.7, logit_bias={30: 9.0}),
        request("logprobs", prompt(10, 5), max_tokens=40, repetition_penalty=1.3, logprobs=2),
        request("late", prompt(200, 6), repetition_penalty=1.3),
    ]
    expected = run(load(tiny_llama, None), *requests)
    engine = load(tiny_llama, LateDevice(), max_num_seqs=8)
    graphs = graphs_of(engine)
    engine.submit(requests[0])
    num_calls = 0
    while engine.scheduler.has_work:
        engine.step()
        num_calls += 1
    assert num_calls == engine.stats().steps_total + 1, "it waits for each of its tokens"
    for _ in range(2):
        assert run(engine, *requests) == expected
        assert graphs.captured


def test_a_row_behind_the_end_is_dropped(tiny_llama: Path) -> None:
    reference = load(tiny_llama, None)
    free = run(reference, request("free", prompt(30, 6), max_tokens=12))["free", 0][0]
    engine = load(tiny_llama, LateDevice())
    item = request("stop", prompt(30, 6), max_tokens=12, stop_token_ids=(free[5],))
    tokens, reason, _ = run(engine, item)["stop", 0]
    assert tokens == free[: free.index(free[5]) + 1]
    assert reason is FinishReason.STOP
    assert engine.stats().generation_tokens_total == len(tokens)
    assert engine.stats().steps_total == len(tokens) + 1


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_in_every_phase(tiny_llama: Path, steps: int) -> None:
    engine = load(tiny_llama, LateDevice())
    engine.submit(request("gone", prompt(100, steps), max_tokens=100, ignore_eos=True))
    engine.submit(request("stays", prompt(20, 1)))
    deltas: list[SequenceDelta] = []
    for _ in range(steps):
        deltas += engine.step().deltas
    assert engine.abort("gone")
    deltas += deltas_of(engine)
    tokens = [token for d in deltas if d.request_id == "stays" for token in d.token_ids]
    assert tokens == run(load(tiny_llama, None), request("stays", prompt(20, 1)))["stays", 0][0]


def test_broken_logits_end_that_request_only_and_are_counted(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(name, prompt(10, i), ignore_eos=True) for i, name in enumerate("abc")]
    expected = run(load(tiny_llama, None), *requests)
    engine = load(tiny_llama, LateDevice())
    break_logits(engine, monkeypatch, lambda call, rows: call == 4)
    deltas = deltas_of(engine, *requests)
    errors = {d.request_id: d.error for d in deltas if d.finish_reason is FinishReason.ERROR}
    assert list(errors) == ["b"]
    assert "finite" in str(errors["b"])
    for name in "ac":
        tokens = [token for d in deltas if d.request_id == name for token in d.token_ids]
        assert tokens == expected[name, 0][0]
    assert engine.stats().nan_logits_total == 1


def test_banning_every_token_is_the_requests_own_fault(tiny_llama: Path) -> None:
    engine = load(tiny_llama, LateDevice())
    item = request("r", prompt(10), min_tokens=3, stop_token_ids=tuple(range(512)))
    (delta,) = deltas_of(engine, item)
    assert delta.error is not None
    assert "ban every token" in delta.error
    assert engine.stats().nan_logits_total == 0


def test_a_step_without_memory_ends_its_request_and_the_others_start_over(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = request("small", prompt(10, 8), max_tokens=9, ignore_eos=True)
    expected = run(load(tiny_llama, None), small)["small", 0][0]
    engine = load(tiny_llama, LateDevice())
    real = engine.runner.enqueue  # type: ignore[attr-defined]

    def limited(plan: Any) -> Any:
        if any(entry.sequence.request.request_id == "large" for entry in plan.scheduled):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(plan)

    monkeypatch.setattr(engine.runner, "enqueue", limited)
    engine.submit(small)
    deltas = [delta for _ in range(4) for delta in engine.step().deltas]
    deltas += deltas_of(engine, request("large", prompt(40, 9)))
    assert [d.request_id for d in deltas if d.error] == ["large"]
    tokens = [token for d in deltas if d.request_id == "small" for token in d.token_ids]
    assert tokens == expected


@pytest.mark.parametrize("sampling", [{}, {"frequency_penalty": 0.5}])
def test_an_interrupted_step_is_repeated(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, float]
) -> None:
    item = request("r", prompt(40, 8), ignore_eos=True, **sampling)
    expected = run(load(tiny_llama, None), item)["r", 0][0]
    engine = load(tiny_llama, LateDevice())
    engine.submit(item)
    deltas = [delta for _ in range(5) for delta in engine.step().deltas]
    for method in ("launch", "collect"):
        with monkeypatch.context() as patch:

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            patch.setattr(engine.runner, method, interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        deltas += [delta for _ in range(3) for delta in engine.step().deltas]
    deltas += deltas_of(engine)
    assert [token for delta in deltas for token in delta.token_ids] == expected


@pytest.mark.model
def test_a_real_model_says_the_same_token_for_token(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Its vocabulary and its first layers suffice, in exact products: the others repeat them."""
    model = first_layers(smollm2_gguf, tmp_path / "first.gguf", "llama", 2)

    def asked(name: str, text: str, **sampling: Any) -> Request:
        tokens = tuple(3 + ord(letter) for letter in text)
        return request(name, tokens, max_tokens=4, **sampling)

    requests = [
        asked("greedy", "The capital of France is"),
        asked("seeded", "Once upon a time there was a", temperature=0.8, top_p=0.95, seed=3),
        asked("choices", "def main", n=2, temperature=1.0, seed=11, logprobs=3),
        asked("penalties", "a a a a a a a a", repetition_penalty=1.2, presence_penalty=0.5),
    ]
    options = {"max_model_len": 512, "threads": 1, "max_num_seqs": 5, "speculate": "off"}
    expected = run(load(model, None, **options), *requests)
    engine = load(model, LateDevice(), **options)
    assert graphs_of(engine).captured
    assert run(engine, *requests) == expected
