from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.broken_logits import break_logits

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.beacon import Beacon, name_of
from appliance.engine.nouns.moves import SavedBlock
from appliance.engine.nouns.plan import Plan
from appliance.engine.nouns.request import FinishReason, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.model_runner import ModelRunner
from appliance.errors import ContextLengthError, MemoryPlanError, RequestError

EOS = 2


def load(folder: Path, **options: Any) -> LLMEngine:
    config = EngineConfig(
        **{
            "model": str(folder),
            "threads": 1,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            **options,
        }
    )
    return load_llm_engine(
        config, eos_token_ids=(EOS,), metadata=None, on_progress=lambda stage, done, total: None
    )


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> LLMEngine:
    return load(tiny_llama)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 512, (length,), generator=generator).tolist())


def request(name: str, tokens: tuple[int, ...], **sampling: Any) -> Request:
    defaults = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling=SamplingParams(**{**defaults, **sampling}),
    )


def run(engine: LLMEngine, *requests: Request) -> dict[tuple[str, int], list[int]]:
    """Answers by request id and choice; the engine must be empty afterwards."""
    for item in requests:
        engine.submit(item)
    answers: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_active, stats.kv_tokens) == (0, 0, 0, 0)
    return answers


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_do_not_depend_on_the_batch(tiny_llama: Path, dtype: str) -> None:
    engine = load(tiny_llama, dtype=dtype, prefix_caching=False)
    wanted = [
        request("greedy", prompt(50, 1)),
        request("seeded", prompt(33, 2), temperature=1.0, seed=7),
        request("nucleus", prompt(20, 3), temperature=0.8, top_p=0.9, top_k=50, seed=-3),
    ]
    alone = {key: value for item in wanted for key, value in run(engine, item).items()}
    crowd = [
        request(f"other{i}", prompt(10 + 13 * i, 10 + i), temperature=1.3, max_tokens=5 + 3 * i)
        for i in range(8)
    ]
    together = run(engine, *crowd[:4], *wanted, *crowd[4:])
    assert {key: together[key] for key in alone} == alone


def test_a_cached_prefix_changes_speed_and_nothing_else(tiny_llama: Path) -> None:
    tokens = prompt(100, 4)
    cold = load(tiny_llama, prefix_caching=False)
    warm = load(tiny_llama)
    expected = run(cold, request("a", tokens))
    assert run(warm, request("a", tokens)) == expected
    before = warm.stats().prefix_hits_total
    assert run(warm, request("a", tokens)) == expected
    assert warm.stats().prefix_hits_total - before == 99


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_preempted_sequences_answer_as_if_they_were_not(tiny_llama: Path, kv: str) -> None:
    # 32 blocks hold two of these requests; six are submitted.
    bytes_per_block = {"bf16": 16 * 2 * 2 * 2 * 32, "int8": 16 * 2 * 2 * 2 * 18}[kv]
    small = load(
        tiny_llama, kv_cache_dtype=kv, kv_cache_memory=32 * bytes_per_block, prefix_caching=False
    )
    roomy = load(tiny_llama, kv_cache_dtype=kv, prefix_caching=False)
    requests = [request(f"r{i}", prompt(60 + i, i), max_tokens=120) for i in range(6)]
    assert small.info.num_blocks == 32
    tight = run(small, *requests)
    assert small.stats().preemptions_total > 0
    assert tight == run(roomy, *requests)


def test_choices_share_the_prompt(engine: LLMEngine) -> None:
    item = request("n", prompt(70, 5), n=4, temperature=1.0, seed=11, max_tokens=8)
    engine.submit(item)
    most_shared = 0
    answers: dict[int, list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            answers.setdefault(delta.index, []).extend(delta.token_ids)
        most_shared = max(most_shared, engine.stats().blocks_shared)
    assert most_shared >= 4  # the prompt's 4 full blocks
    assert [len(answers[index]) for index in range(4)] == [8] * 4
    assert len({tuple(answer) for answer in answers.values()}) > 1
    first = run(engine, request("one", prompt(70, 5), temperature=1.0, seed=11, max_tokens=8))
    assert first["one", 0] == answers[0]


def test_abort_frees_blocks_at_once_in_every_phase(engine: LLMEngine) -> None:
    for steps in (0, 1, 2, 5):  # queued, in prefill, at its end, in decode
        engine.submit(request("gone", prompt(100, steps), max_tokens=100))
        for _ in range(steps):
            engine.step()
        assert (engine.stats().blocks_active > 0) == (steps > 0)
        assert engine.abort("gone")
        assert not engine.has_work
        assert engine.stats().blocks_active == 0
    assert not engine.abort("gone")


def test_one_choice_can_be_ended(engine: LLMEngine) -> None:
    engine.submit(request("n", prompt(20), n=2, temperature=1.0, max_tokens=10))
    for _ in range(4):
        engine.step()
    assert engine.abort("n", 0)
    indexes = set()
    while engine.has_work:
        indexes |= {delta.index for delta in engine.step().deltas}
    assert indexes == {1}


def test_every_way_to_end(engine: LLMEngine) -> None:
    free = run(engine, request("free", prompt(30, 6), max_tokens=12))["free", 0]
    engine.submit(request("stop", prompt(30, 6), max_tokens=12, stop_token_ids=(free[5],)))
    reasons = {}
    answer: list[int] = []
    while engine.has_work:
        for delta in engine.step().deltas:
            answer += delta.token_ids
            reasons[delta.request_id] = delta.finish_reason
    assert answer == free[: free.index(free[5]) + 1]
    assert reasons == {"stop": FinishReason.STOP}
    long = run(engine, request("long", prompt(200, 7), max_tokens=None))["long", 0]
    assert len(long) == 56  # up to the context of 256, and not one token further


@pytest.mark.chaos
def test_broken_logits_end_that_request_only(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_logits(engine, monkeypatch, lambda call, rows: rows == 3)
    before = engine.stats().nan_logits_total
    for name in ("a", "b", "c"):
        engine.submit(request(name, prompt(10, ord(name)), max_tokens=5))
    errors = {}
    counts = {"a": 0, "b": 0, "c": 0}
    while engine.has_work:
        for delta in engine.step().deltas:
            counts[delta.request_id] += len(delta.token_ids)
            if delta.error:
                errors[delta.request_id] = delta.finish_reason
    assert errors == {"b": FinishReason.ERROR}
    assert (counts["a"], counts["b"], counts["c"]) == (5, 0, 5)
    assert engine.stats().nan_logits_total == before + 1


def test_a_step_without_memory_ends_the_requests_that_made_it_large(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(engine, request("small", prompt(10, 8), max_tokens=9))
    runner = engine.runner
    real = runner.launch

    def limited(plan: Plan) -> tuple[SavedBlock, ...]:
        if any(entry.sequence.request.request_id == "large" for entry in plan.scheduled):
            raise MemoryError("no memory for the workspace of this step")
        return real(plan)

    monkeypatch.setattr(runner, "launch", limited)
    engine.submit(request("small", prompt(10, 8), max_tokens=9))
    report = engine.step()
    answer = [token for delta in report.deltas for token in delta.token_ids]
    engine.submit(request("large", prompt(40, 9)))
    errors = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            answer += delta.token_ids
            if delta.error:
                errors[delta.request_id] = delta.error
    assert errors == {"large": "no memory for the workspace of this step"}
    assert answer == expected["small", 0]
    monkeypatch.undo()
    assert run(engine, request("large", prompt(40, 9)))["large", 0]


def test_an_interrupted_step_is_repeated(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(engine, request("r", prompt(40, 8)))
    engine.submit(request("r", prompt(40, 8)))
    answer: list[int] = []
    for _ in range(5):
        answer += [token for delta in engine.step().deltas for token in delta.token_ids]
    with monkeypatch.context() as patch:
        patch.setattr(
            engine.runner, "launch", lambda plan: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_work:
        answer += [token for delta in engine.step().deltas for token in delta.token_ids]
    assert answer == expected["r", 0]


def test_what_can_never_run_is_refused(engine: LLMEngine, tiny_llama: Path) -> None:
    with pytest.raises(ContextLengthError, match="256"):
        engine.submit(request("long", prompt(256)))
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.submit(request("wild", (3, 512)))
    with pytest.raises(RequestError, match="outside the vocabulary") as caught:
        engine.submit(request("bias", (3,), logit_bias={512: 1.0}))
    assert caught.value.param == "logit_bias"
    with pytest.raises(RequestError, match="outside the vocabulary") as caught:
        engine.submit(request("stop", (3,), stop_token_ids=(512,), min_tokens=1))
    assert caught.value.param == "stop_token_ids"
    assert not engine.has_work
    with pytest.raises(MemoryPlanError, match="--kv-cache-memory"):
        load(tiny_llama, kv_cache_memory=2**16, kv_cache_dtype="fp32")


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_signs_of_life_of_a_step(
    tiny_llama: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(tiny_llama), threads=1, kernels=kernels)
    beacon = Beacon()
    engine = load_llm_engine(
        config,
        eos_token_ids=(EOS,),
        metadata=None,
        on_progress=lambda stage, done, total: None,
        beacon=beacon,
    )
    layers, names = 2, {name_of("a"), name_of("b")}
    launch = ModelRunner.launch

    def noted(runner: ModelRunner[Any], plan: Plan) -> tuple[SavedBlock, ...]:
        if plan.started:
            assert beacon.started() == names, "before anything is computed for them"
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    for name in ("a", "b"):
        engine.submit(request(name, prompt(5), max_tokens=3))
    while engine.has_work:
        before = beacon.progress
        engine.step()
        assert beacon.progress >= before + layers + 1


def test_an_end_that_only_the_tokenizer_knows_is_never_banned(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`min_tokens` would ban it by writing its logit, past the end of a row."""
    monkeypatch.setattr(f"{__name__}.EOS", 10**9)
    engine = load(tiny_llama)
    assert engine.info.eos_token_ids == ()
    answers = run(engine, request("r", prompt(5), min_tokens=3, ignore_eos=False))
    assert len(answers["r", 0]) == 20


def test_the_budget_of_a_step_holds_and_prompts_are_chunked(engine: LLMEngine) -> None:
    for i in range(4):
        engine.submit(request(f"r{i}", prompt(150, 20 + i), max_tokens=4))
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        assert stats.step_prefill_tokens + stats.step_decode_tokens <= 64


def test_each_step_is_told_once_with_what_it_held(tiny_llama: Path) -> None:
    engine = load(tiny_llama, prefix_caching=False)
    run(engine, request("a", prompt(100), max_tokens=4), request("b", prompt(20), max_tokens=4))
    steps = engine.take_steps()
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert steps[0].prefill_tokens == 64, "as many rows as a step may have"
    assert sum(step.prefill_tokens for step in steps) == 120
    assert sum(step.decode_tokens for step in steps) == 6
    assert max(step.sequences for step in steps) == 2
    assert all(step.seconds > 0 for step in steps)
    assert engine.take_steps() == ()


def test_a_block_table_is_that_of_the_sequence(tiny_llama: Path) -> None:
    engine = load(tiny_llama)
    engine.submit(request("a", prompt(40), n=2))
    engine.step()
    engine.step()
    first, second = (engine.block_table("a", index) for index in (0, 1))
    assert first.num_tokens >= 40
    assert len(first.blocks) == -(-first.num_tokens // 16)
    assert len(first.hashes) == first.num_tokens // 16 * 16, "16 bytes for each full block"
    assert second.blocks[:2] == first.blocks[:2], "they share the prompt"
    assert second.hashes[:32] == first.hashes[:32]
    views = {view.index: view for view in engine.sequences()}
    assert views[0].computed_tokens == first.num_tokens
    for gone in (("a", 2), ("b", 0)):
        table = engine.block_table(*gone)
        assert (table.blocks, table.hashes, table.num_tokens) == ((), b"", 0)
    engine.abort("a")
