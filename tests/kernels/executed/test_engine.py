"""The runner with graphs on interpreted kernels, against torch one step at a time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import triton
from msgspec.structs import replace as changed
from ptx_machine.driver import PtxDriver
from support.engine.adapter_requests import ref
from support.engine.late_device import LateDevice
from support.engine.picture_answers import (
    Served,
    by_transformers,
    canvas_of,
    prompt_of,
    request_of,
    write_pictured,
)
from support.engine.replaying import Answers, ReplayingSpeculator
from support.models.expert_models import save_experts
from support.models.lora import write_adapter
from support.models.sure_models import TWO_LAYERS, write_sure_model
from torch import Tensor

from appliance.config import EngineConfig
from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.block_pool import num_open_blocks
from appliance.engine.devices import Precision
from appliance.engine.engine import LLMEngine
from appliance.engine.grammars.matchers import Matchers
from appliance.engine.load.execution.torch_execution import TorchExecution
from appliance.engine.load.pictures import open_pictures
from appliance.engine.nouns.messages import EngineInfo
from appliance.engine.nouns.moves import Rates
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.adapters.loader import AdapterLoader
from appliance.engine.run.cuda_graphs import PROMPTS, StepSize
from appliance.engine.run.geometry import Spare
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.model_runner import ModelRunner
from appliance.engine.run.moves import HostMoves
from appliance.engine.run.prompt_reader import PromptReader
from appliance.engine.run.sampler import Sampler
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.engine.served_model import open_served
from appliance.engine.tiers.tiers import Tiers
from appliance.kernels.attention import launch as attention_launch
from appliance.kernels.attention.work import AttentionWork
from appliance.kernels.backend import REFERENCE, select_backend
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.operations import Backend
from appliance.model.adapters.targets import adapter_targets
from appliance.model.source import open_model

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE, EOS = 12, 32, 2
LIMITS = SchedulerLimits(
    max_num_seqs=3, max_num_batched_tokens=40, context_length=100, verifies=False
)


def engine_of(
    model: Path,
    backend: Backend,
    *,
    asynchronous: bool,
    num_adapters: int = 0,
    limits: SchedulerLimits = LIMITS,
    dtype: torch.dtype = torch.float32,
    kv_format: KVFormat = KVFormat.FP32,
    reads_pictures: bool = False,
) -> LLMEngine:
    config = EngineConfig(model=str(model), images=reads_pictures)
    source = open_served(config)
    precision = Precision(
        CPU,
        dtype,
        kv_format,
        BLOCK_SIZE,
        (LayerPrecision(kv_format),) * len(source.spec.cache_layers),
    )
    execution = TorchExecution(precision, backend)
    pictured, _ = open_pictures(config, source)
    if pictured is not None:
        most = limits.max_num_batched_tokens + pictured.spare_rows
        limits = replace(limits, max_num_batched_tokens=most, spare_rows=pictured.spare_rows)
    executor = execution.load(source, lambda stage, done, total: None, limits.context_length)
    num_open = 0
    if kv_format.is_sealed:
        budget = limits.max_num_seqs, limits.max_num_batched_tokens
        num_open = num_open_blocks(*budget, BLOCK_SIZE, plans=1 + asynchronous)
    cache = executor.allocate_cache(
        precision.kv_layers,
        num_blocks=NUM_BLOCKS + asynchronous,
        block_size=BLOCK_SIZE,
        num_open=num_open + (asynchronous and num_open > 0),
    )
    device = LateDevice() if asynchronous else HostDevice()
    pictures = None
    if pictured is not None:
        pictures = pictured.load(execution, device, 1, lambda stage, done, total: None)
    sampler = Sampler(
        (EOS,),
        execution.sample_tokens(
            source.spec, max(limits.sample_rows, limits.max_num_seqs + PROMPTS)
        ),
        execution.penalize,
        device,
        num_slots=limits.max_num_seqs,
        vocab_size=source.spec.vocab_size,
    )
    adapters = None
    if num_adapters:
        targets = adapter_targets(source.spec, source.family.names)
        slots = executor.adapter_slots(targets, num_adapters, 8)
        adapters = AdapterLoader(source, slots, num_adapters, 8)
    runner = ModelRunner(
        executor,
        cache,
        sampler,
        device,
        limits,
        HostMoves(cache, Rates()),
        PromptReader(executor, execution.score_tokens, device),
        spare=Spare(NUM_BLOCKS, num_open or None) if asynchronous else None,
        is_sealed=num_open > 0,
        adapters=None if adapters is None else adapters.slots,
        pictures=None if pictures is None else pictures.encoded,
        graph_bytes=2**30,
    )
    runner.capture(lambda stage, done, total: None)
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, num_open=num_open)
    tiers = Tiers.none(blocks)
    scheduler = Scheduler(blocks, limits, (EOS,), look_ahead=asynchronous, tiers=tiers)
    info = SimpleNamespace(vocab_size=source.spec.vocab_size, eos_token_ids=(EOS,))
    return LLMEngine(
        scheduler, tiers, runner, cast(EngineInfo, info), adapters=adapters, pictures=pictures
    )


def request(
    name: str, length: int, vocab: int = 500, adapter: Path | None = None, **sampling: Any
) -> Request:
    tokens = torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(length))
    defaults = {"temperature": 0.0, "seed": 5, "max_tokens": 3, "ignore_eos": True}
    return Request(
        request_id=name,
        prompt_token_ids=tuple(tokens.tolist()),
        sampling=SamplingParams(**{**defaults, **sampling}),
        adapter=None if adapter is None else ref(adapter),
    )


def run(engine: LLMEngine, *requests: Request) -> dict[tuple[str, int], list[int]]:
    for item in requests:
        engine.submit(item)
    answers: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.error is None
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    return answers


def test_an_engine_on_the_kernels_says_what_torch_says(tiny_llama: Path) -> None:
    requests = [
        request("greedy", 45),
        request("drawn", 31, temperature=1.0, top_p=0.9, top_k=40, n=2),
        request("penalties", 9, repetition_penalty=1.3),
    ]
    expected = run(engine_of(tiny_llama, REFERENCE, asynchronous=False), *requests)
    kernels = select_backend(torch.device("cuda"))
    engine = engine_of(tiny_llama, kernels, asynchronous=True)
    assert run(engine, *requests) == expected
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    assert {StepSize(1), StepSize(2, 32)} <= {*graphs.captured}
    assert run(engine, requests[0]) == {("greedy", 0): expected["greedy", 0]}


def test_adapters_are_mixed_in_graphs(tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model(tiny_llama)
    targets = adapter_targets(source.spec, source.family.names)
    shapes = {name: (one.slot.shape[0], one.slot.shape[1]) for name, one in targets.items()}
    some = {name: shape for name, shape in shapes.items() if "k_proj" in name or "up" in name}
    every = write_adapter(tmp_path / "all", shapes, rank=8)
    few = write_adapter(tmp_path / "some", some, rank=3, seed=7, spread=1.0)
    requests = [
        request("a", 20, adapter=every),
        request("base", 20),
        request("b", 20, adapter=few),
    ]
    plain = engine_of(tiny_llama, REFERENCE, asynchronous=False, num_adapters=2)
    expected = run(plain, *requests)
    assert len({tuple(tokens) for tokens in expected.values()}) == 3, "they say something"
    kernels = replace(select_backend(torch.device("cuda")), prepare_gated=REFERENCE.prepare_gated)
    engine = engine_of(tiny_llama, kernels, asynchronous=True, num_adapters=2)
    assert run(engine, *requests) == expected
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    assert StepSize(2, 32, is_adapted=True) in graphs.captured


def noting_replays(engine: LLMEngine) -> tuple[Any, set[StepSize]]:
    """Return an engine's graphs, and the sizes that it will replay from now on."""
    graphs: Any = engine.runner.graphs  # type: ignore[attr-defined]
    replayed, real = set[StepSize](), graphs.run

    def noted(size: StepSize, function: Callable[[], None]) -> None:
        replayed.add(size)
        real(size, function)

    graphs.run = noted
    return graphs, replayed


def test_drafts_are_verified_in_graphs(tiny_llama: Path) -> None:
    """Of two sequences, one with penalties and a seed, by the kernel that decodes."""
    penalties: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    penalties["temperature"] = 0.8
    requests = [request("a", 20, max_tokens=14), request("b", 30, max_tokens=14, **penalties)]
    expected = run(engine_of(tiny_llama, REFERENCE, asynchronous=False), *requests)
    limits = replace(LIMITS, max_num_seqs=2, verifies=True)
    kernels = select_backend(torch.device("cuda"))
    engine = engine_of(tiny_llama, kernels, asynchronous=True, limits=limits)
    known: Answers = {name: (tokens, [], None) for name, tokens in expected.items()}
    engine.scheduler.speculator = ReplayingSpeculator(
        known, 0.9, Matchers(512, ()), random.Random(1)
    )
    graphs, replayed = noting_replays(engine)
    assert run(engine, *requests) == expected
    assert len({size.rows_each for size in replayed}) > 2
    assert replayed <= {*graphs.captured}
    stats = engine.scheduler.stats()
    assert 4 < stats.accepted_tokens_total < stats.draft_tokens_total


def test_experts_run_in_graphs(tmp_path: Path) -> None:
    save_experts("qwen3_moe", tmp_path)
    requests = [request("one", 20, vocab=50), request("other", 7, vocab=50)]
    expected = run(engine_of(tmp_path, REFERENCE, asynchronous=False), *requests)
    engine = engine_of(tmp_path, select_backend(torch.device("cuda")), asynchronous=True)
    graphs, replayed = noting_replays(engine)
    assert run(engine, *requests) == expected
    assert {StepSize(2), StepSize(2, 32)} <= replayed <= {*graphs.captured}


# A capture writes codes of latents that no step computed, at which the interpreter warns.
@pytest.mark.parametrize(
    "kv_format",
    [
        pytest.param(KVFormat.INT8, marks=pytest.mark.compiled),
        pytest.param(KVFormat.FP32, marks=pytest.mark.interpreted),
    ],
)
def test_latents_and_their_drafts_run_in_graphs(tmp_path: Path, kv_format: KVFormat) -> None:
    """Prompts of several chunks, rows of one token, and rows that verify drafts."""
    save_experts("deepseek_v3", tmp_path)
    requests = [
        request("one", 45, vocab=50, max_tokens=12),
        request("other", 7, vocab=50, max_tokens=12),
    ]
    exact = engine_of(tmp_path, REFERENCE, asynchronous=False, kv_format=kv_format)
    expected = run(exact, *requests)
    limits = replace(LIMITS, max_num_seqs=2, verifies=True)
    kernels = select_backend(torch.device("cuda"))
    engine = engine_of(tmp_path, kernels, asynchronous=True, limits=limits, kv_format=kv_format)
    known: Answers = {name: (tokens, [], None) for name, tokens in expected.items()}
    engine.scheduler.speculator = ReplayingSpeculator(
        known, 0.9, Matchers(512, ()), random.Random(1)
    )
    graphs, replayed = noting_replays(engine)
    assert run(engine, *requests) == expected
    assert {size.rows_each for size in replayed} > {1}
    assert replayed <= {*graphs.captured}


def test_rows_of_a_picture_see_all_of_it(tmp_path: Path) -> None:
    """Beside an answer, whose steps are graphs."""
    case, model = write_pictured("gemma3", tmp_path)
    kernels = select_backend(torch.device("cuda"))
    limits = replace(LIMITS, max_num_batched_tokens=24, context_length=96)
    engine = engine_of(tmp_path, kernels, asynchronous=True, limits=limits, reads_pictures=True)
    served = Served(case, model, engine, tmp_path)
    pictures = [canvas_of(served, case.grids[0], seed) for seed in (1, 2, 3)]
    prompts = {"one": pictures[:1], "two": pictures[1:]}
    made = {name: prompt_of(canvases) for name, canvases in prompts.items()}
    wanted = {(name, 0): by_transformers(served, made[name][0], prompts[name]) for name in prompts}
    requests = [request_of(name, *made[name]) for name in prompts]
    _, replayed = noting_replays(engine)
    assert run(engine, *requests) == wanted
    assert replayed
    assert run(engine, requests[1]) == {("two", 0): wanted["two", 0]}


# A capture writes codes of keys that no step computed, at which the interpreter warns.
@pytest.mark.compiled
@pytest.mark.parametrize("kv_format", [KVFormat.INT8, KVFormat.INT4_SEALED])
def test_rows_of_pictures_see_all_of_them_in_quantized_blocks(
    tmp_path: Path, kv_format: KVFormat
) -> None:
    """The second picture lies across the end of a block."""
    case, model = write_pictured("gemma3", tmp_path)
    limits = replace(LIMITS, max_num_batched_tokens=24, context_length=96)
    answers = []
    for backend in REFERENCE, select_backend(torch.device("cuda")):
        engine = engine_of(
            tmp_path, backend,
            asynchronous=backend is not REFERENCE,
            limits=limits,
            kv_format=kv_format,
            reads_pictures=True,
        )  # fmt: skip
        served = Served(case, model, engine, tmp_path)
        pictures = [canvas_of(served, case.grids[0], seed) for seed in (1, 2, 3)]
        requests = [
            request_of("one", *prompt_of(pictures[:1])),
            request_of("two", *prompt_of(pictures[1:])),
        ]
        answers.append(run(engine, *requests))
    assert len(set(answers[0]["two", 0])) > 1, "it says something"
    assert answers[1] == answers[0]


# A capture writes codes of keys that no step computed, at which the interpreter warns.
@pytest.mark.compiled
def test_layers_of_unlike_heads_that_share_keys_run_in_graphs(tmp_path: Path) -> None:
    settings = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "sliding_window": 9,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "tie_word_embeddings": False,
    }
    write_sure_model("gemma4_text", tmp_path, **TWO_LAYERS | settings)
    # Their likeliest tokens lead by 0.28 nats and more: others of these would be near ties.
    requests = [request("one", 42, vocab=97), request("other", 3, vocab=97)]
    expected, found = (
        run(
            engine_of(
                tmp_path, backend,
                asynchronous=backend is not REFERENCE,
                dtype=torch.float16,
                kv_format=KVFormat.INT8,
            ),
            *requests,
        )
        for backend in (REFERENCE, select_backend(torch.device("cuda")))
    )  # fmt: skip
    assert len(set(expected["one", 0])) > 1, "it says something"
    assert found == expected


@pytest.mark.compiled
def test_answers_that_begin_alike_share_passes_over_their_blocks(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 6 blocks each the first 5 are the same, and the first span has 4 of these."""
    driver = triton.runtime.driver.active
    assert isinstance(driver, PtxDriver)
    together, apart = Counter[str](), Counter[str]()
    kernels, alone = select_backend(torch.device("cuda")), attention_launch.decode_spans

    def compared(query: Tensor, cache: Any, work: object, **options: Any) -> Tensor:
        assert isinstance(work, AttentionWork)
        is_shared = work.batch.num_decodes == 3
        driver.traffic = together if is_shared else None
        out = kernels.paged_attention(query, cache, work, **options)
        if is_shared:
            driver.traffic = apart
            with monkeypatch.context() as plain:
                plain.setattr(attention_launch, "decode_spans", lambda *args: alone(*args[:2]))
                assert torch.equal(kernels.paged_attention(query, cache, work, **options), out)
        driver.traffic = None
        return out

    counting = replace(kernels, paged_attention=compared)
    limits = replace(LIMITS, max_num_batched_tokens=192, context_length=192)
    engine = engine_of(tiny_llama, counting, asynchronous=False, limits=limits)
    common = request("first", 160)
    endings = {name: (*common.prompt_token_ids, i, 7) for i, name in enumerate("abc", 3)}
    others = [changed(common, request_id=i, prompt_token_ids=ids) for i, ids in endings.items()]
    run(engine, common)
    answers = run(engine, *others)
    expected = run(engine_of(tiny_llama, REFERENCE, asynchronous=False, limits=limits), *others)
    assert answers == expected
    assert 0 < together["global load sectors"] < 0.7 * apart["global load sectors"]
