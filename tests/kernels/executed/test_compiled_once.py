"""All kernels that serving needs are compiled while the model is loaded, none after that.

And at load they are compiled before the first is launched, several at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import triton
from ptx_machine.driver import TARGETS
from support.engine.late_device import LateDevice
from support.engine.picture_answers import write_pictured
from support.kernels.kernel_gpu import gpu
from support.kernels.packed_weights import random_packed
from support.models import model_families
from support.models.causal_models import random_model
from triton.runtime.jit import JITFunction

from appliance.config import EngineConfig
from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.devices import Precision
from appliance.engine.engine import LLMEngine
from appliance.engine.grammars.matchers import Matchers
from appliance.engine.load.execution.torch_execution import TorchExecution
from appliance.engine.load.runner import RunnerParts, make_runner, plan_measured
from appliance.engine.memory.plan import MemoryRequest
from appliance.engine.nouns.messages import EngineInfo
from appliance.engine.nouns.moves import Rates
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.kernels_ahead import compile_adapters
from appliance.engine.run.model_runner import ModelRunner
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.engine.served_model import open_served
from appliance.engine.tiers.tiers import Tiers
from appliance.kernels.activation import Gating
from appliance.kernels.adapters.launch import add_adapters, plan_adapters
from appliance.kernels.backend import triton_backend
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.gpu.compile_ahead import compiled_ahead
from appliance.kernels.int8_matmul import launch as int8_matmul
from appliance.kernels.norm_rope.launch import rms_norm
from appliance.kernels.operations import Backend, Linear
from appliance.kernels.packed_matmul.launch import TiledLinear
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.kernels.weights.weight import Weight
from appliance.model.adapters.targets import adapter_targets
from appliance.model.adapters.torch_slots import TorchAdapterSlots
from appliance.model.decoder import Decoder
from appliance.model.experts import Experts
from appliance.model.source import open_model

CPU = torch.device("cpu")
LIMITS = SchedulerLimits(max_num_seqs=17, max_num_batched_tokens=34, context_length=70)
NUM_OPEN = 60


def with_packed_weights() -> Backend:
    """The kernels; whatever a layer's weight is, it is one of 4 bits of that shape."""
    triton = triton_backend()

    def packed(weight: Weight) -> Weight:
        rows, columns = weight.shape
        return random_packed(rows, columns, 32)

    def prepare(weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        return triton.prepare_linear(packed(weight), bias, dtype)

    def prepare_gated(
        weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype, activation: Gating
    ) -> Linear | None:
        return triton.prepare_gated(packed(weight), bias, dtype, activation)

    return replace(triton, prepare_linear=prepare, prepare_gated=prepare_gated)


def engine_of(
    model: Path,
    kv_format: KVFormat,
    on_progress: Callable[[str, int, int], None],
    limits: SchedulerLimits = LIMITS,
    *,
    rounds_prompts: bool = False,
) -> LLMEngine:
    source = open_served(EngineConfig(model=str(model)))
    precision = Precision(
        CPU,
        torch.bfloat16,
        kv_format,
        32,
        (LayerPrecision(kv_format),) * len(source.spec.cache_layers),
    )
    execution = TorchExecution(precision, with_packed_weights(), rounds_prompts=rounds_prompts)
    executor = execution.load(source, lambda stage, done, total: None, limits.context_length)
    num_open = NUM_OPEN if kv_format.is_sealed else 0
    block_bytes = 32 * execution.kv_bytes_per_token(source.spec)
    request = MemoryRequest(
        spec=source.spec,
        weight_bytes=0,
        kv_bytes_per_token=execution.kv_bytes_per_token(source.spec),
        kv_format=kv_format.value,
        block_size=32,
        activation_bytes=2,
        budget_bytes=2**31,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.context_length,
        kv_cache_memory=30 * block_bytes,
        fill=True,
        open_bytes=num_open * execution.open_block_bytes(source.spec),
    )
    steps = RunnerParts(
        execution,
        executor,
        LateDevice(),
        limits,
        execution.sample_tokens(source.spec, limits.sample_rows),
        num_open,
        with_graphs=False,
    )
    plan, graph_bytes = plan_measured(steps, request, on_progress)
    runner, *_ = make_runner(
        steps, plan, graph_bytes, (), Rates(), Matchers(source.spec.vocab_size, ())
    )
    blocks = BlockManager(plan.num_blocks, 32, num_open=num_open)
    tiers = Tiers.none(blocks)
    scheduler = Scheduler(blocks, limits, (), look_ahead=True, tiers=tiers)
    info = SimpleNamespace(vocab_size=source.spec.vocab_size, eos_token_ids=())
    return LLMEngine(scheduler, tiers, runner, cast(EngineInfo, info))


def request(name: str, length: int, **sampling: Any) -> Request:
    settings = {"temperature": 1.0, "seed": 5, "max_tokens": 2, "ignore_eos": True, **sampling}
    tokens = tuple(3 + (7 * place + length) % 500 for place in range(length))
    return Request(request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(**settings))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Kernels by name as they are first compiled, and whether that held up the engine.

    What Triton's cache has from an earlier run counts too: without it, that is when it would be.
    """
    names: list[tuple[str, bool]] = []
    seen: set[str] = set()

    def listen(*, src: Any, metadata: dict[str, Any], **_: object) -> None:
        if metadata["hash"] not in seen:
            seen.add(metadata["hash"])
            names.append((src.name, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    return names


@pytest.mark.compiled
def test_all_is_compiled_ahead_at_load_and_nothing_while_requests_wait(
    target: str, tiny_llama: Path, compiled: list[tuple[str, bool]]
) -> None:
    told: list[tuple[str, int, int]] = []
    with gpu(TARGETS[target], has_compiled=False) as machine:
        machine.executes = False  # what memory is measured with nobody looks at
        engine = engine_of(tiny_llama, KVFormat.INT4_SEALED, lambda *now: told.append(now))
        machine.executes = True
        at_load = list(compiled)
        requests = [
            request("one", 1, max_tokens=1, temperature=0.0),
            request("copies on write", 33, n=3, logprobs=2, presence_penalty=1.0),
            request("biased", 2, logit_bias={7: 1.0}, presence_penalty=1.0),
            *(request(f"r{i}", 1 + i % 2, max_tokens=1, top_p=0.9) for i in range(16)),
        ]
        for item in requests:
            engine.submit(item)
            if item.request_id == "one":
                engine.step()
        while engine.has_work:
            assert not [delta.error for delta in engine.step().deltas if delta.error]
    kernels = {name for name, _ in at_load}
    assert {"seal_kernel", "decode_kernel", "prefill_kernel", "choose_kernel"} < kernels
    assert {name for name, in_the_way in at_load if in_the_way} <= {"block_copy_kernel"}
    all_told = [("kernels", done, len(told)) for done in range(1, len(told) + 1)]
    assert told == all_told
    assert compiled == at_load, compiled[len(at_load) :]


@pytest.mark.compiled
@pytest.mark.capabilities(86, 120)
def test_prompts_in_int8_are_compiled_ahead_and_multiplied_apart_from_answers(
    target: str,
    tiny_llama: Path,
    compiled: list[tuple[str, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multiply, rounded = int8_matmul.multiply_int8, list[int]()

    def note(linear: TiledLinear, x: torch.Tensor, out: torch.Tensor) -> None:
        rounded.append(len(x))
        multiply(linear, x, out)

    monkeypatch.setattr(int8_matmul, "is_faster", lambda *_: True)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=80, context_length=90)
    with gpu(TARGETS[target], has_compiled=False) as machine:
        machine.executes = False
        engine = engine_of(tiny_llama, KVFormat.BF16, lambda *_: None, limits, rounds_prompts=True)
        machine.executes = True
        at_load = list(compiled)
        monkeypatch.setattr(int8_matmul, "multiply_int8", note)
        engine.submit(request("answer", 3, max_tokens=3))
        engine.step()
        engine.step()
        assert not rounded, "an answer and a short prompt"
        engine.submit(request("prompt", 70, max_tokens=2))
        while engine.has_work:
            assert not [delta.error for delta in engine.step().deltas if delta.error]
    assert rounded == [70] * 4  # the linears of the first of two layers, in one step
    assert "int8_matmul_kernel" in {name for name, in_the_way in at_load if not in_the_way}
    assert compiled == at_load, compiled[len(at_load) :]


@pytest.mark.compiled
def test_kernels_of_experts_are_compiled_ahead_for_steps_of_any_size(
    target: str, tmp_path: Path, compiled: list[tuple[str, bool]]
) -> None:
    sizes = model_families.SIZES | {"head_dim": 32, "vocab_size": 512, "num_hidden_layers": 2}
    own = {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    own |= {"shared_expert_intermediate_size": 64, "max_position_embeddings": 128}
    settings: dict[str, Any] = sizes | own
    random_model("qwen2_moe", **settings).save_pretrained(tmp_path)
    with gpu(TARGETS[target], has_compiled=False) as machine:
        machine.executes = False  # nobody looks at what is said
        engine = engine_of(tmp_path, KVFormat.BF16, lambda *_: None)
        at_load = list(compiled)
        assert isinstance(engine.runner, ModelRunner)
        experts = cast("Decoder", engine.runner.executor).layers[0].mlp
        assert isinstance(experts, Experts)
        for num_rows in (1, 2, 3, 7, 8, 9, 16, 17, 30, 33, 34):
            row = torch.zeros(num_rows, 64, dtype=torch.bfloat16)
            experts(row)
    assert {"logits_kernel", "route_kernel", "add_experts_kernel"} < {name for name, _ in at_load}
    assert compiled == at_load, compiled[len(at_load) :]


@pytest.mark.compiled
def test_rows_that_see_all_of_their_picture_are_compiled_ahead(
    target: str, tmp_path: Path, compiled: list[tuple[str, bool]]
) -> None:
    write_pictured("gemma3", tmp_path)
    with gpu(TARGETS[target], has_compiled=False) as machine:
        machine.executes = False  # nobody looks at what is said
        engine = engine_of(tmp_path, KVFormat.BF16, lambda *_: None)
        at_load = list(compiled)
        assert isinstance(engine.runner, ModelRunner)
        batch = RaggedBatch.of([20], [20], [[0]], block_size=32, device=CPU)
        batch = replace(batch, prompts_from=0, sees=torch.full((20,), 20, dtype=torch.int32))
        rows = torch.arange(20)
        engine.runner.executor.forward(rows, rows, batch, engine.runner.cache, rows[:1])
    # With windows and without, where rows see all of their picture and where there is none.
    assert [name for name, _ in at_load].count("prefill_kernel") == 4
    assert compiled == at_load, compiled[len(at_load) :]


@pytest.mark.compiled
def test_adapters_are_compiled_ahead_for_steps_of_any_size(
    target: str, tiny_llama: Path, compiled: list[tuple[str, bool]]
) -> None:
    source, told = open_model(tiny_llama), list[str]()
    targets = adapter_targets(source.spec, source.family.names)
    with gpu(TARGETS[target], has_compiled=False) as machine:
        machine.executes = False
        slots = TorchAdapterSlots(targets, CPU, torch.bfloat16, count=3, most_ranks=20)
        compile_adapters(slots, lambda stage, done, total: told.append(stage))
        at_load = list(compiled)
        assert {name for name, _ in at_load} > {"shrink_kernel", "expand_kernel", "sort_kernel"}
        assert not any(in_the_way for _, in_the_way in at_load)
        for num_rows in (1, 2, 16, 30, 100, 300):
            work = plan_adapters(torch.zeros(num_rows, dtype=torch.int32), slots.count)
            for factors in slots.places():
                last = max(piece.first_output + piece.num_rows for piece in factors.pieces)
                x = torch.zeros(num_rows, factors.shrink.shape[-1], dtype=torch.bfloat16)
                add_adapters(torch.zeros(num_rows, last, dtype=x.dtype), x, factors, work)
    assert set(told) == {"kernels"}
    assert compiled == at_load, compiled[len(at_load) :]


@pytest.mark.compiled
def test_what_fails_to_compile_ahead_is_left_to_its_launch(
    target: str,
    compiled: list[tuple[str, bool]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no ptxas")

    x = torch.ones(3, 64)
    with gpu(TARGETS[target], has_compiled=False):
        monkeypatch.setattr(triton, "compile", fail)
        with compiled_ahead(lambda done, total: None):
            assert rms_norm(x * torch.nan, torch.ones(64), 1e-6).shape == x.shape
        assert rms_norm(x, torch.ones(64), 0.0).equal(x)
    assert compiled == [("norm_kernel", True)]
    assert "norm_kernel was not compiled ahead: no ptxas" in caplog.text


@pytest.mark.compiled
def test_steps_that_fail_leave_nothing_behind_that_the_next_load_would_wait_for(
    target: str, compiled: list[tuple[str, bool]]
) -> None:
    before = JITFunction.parse
    with gpu(TARGETS[target], has_compiled=False) as machine:
        machine.executes = False
        with (
            pytest.raises(MemoryError, match="no room"),
            compiled_ahead(lambda done, total: None),
        ):
            raise MemoryError("no room for the largest step")
        assert JITFunction.parse is before
        with compiled_ahead(lambda done, total: None):
            rms_norm(torch.ones(3, 64), torch.ones(64), 1e-6)
    assert {name for name, _ in compiled} == {"norm_kernel"}
