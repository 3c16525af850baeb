"""All kernels that serving needs are compiled while the model is loaded."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import triton.language as tl
from packed_weights import random_packed
from triton.runtime.interpreter import InterpretedFunction

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.device.device import HostDevice
from appliance.engine.device.device_loading import load_device_runner
from appliance.engine.engine import LLMEngine
from appliance.engine.execution import Precision, TorchExecution
from appliance.engine.memory_plan import MemoryRequest
from appliance.engine.messages import EngineInfo
from appliance.engine.rates import Rates
from appliance.engine.request import Request, SamplingParams
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.kernels.activation import Activation
from appliance.kernels.backend import Backend, Linear, triton_backend
from appliance.kernels.kv_cache import KVFormat
from appliance.kernels.weight import Weight
from appliance.model.source import open_model

CPU = torch.device("cpu")
LIMITS = SchedulerLimits(max_num_seqs=17, max_num_batched_tokens=34, context_length=70)
NUM_OPEN = 60


class Launches:
    """What Triton would compile: each kernel with all that it specializes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[tuple[object, ...]] = set()
        run = InterpretedFunction.run

        def note(function: Any, *args: object, **kwargs: Any) -> object:
            self.seen.add(specialization(function, args, kwargs))
            return run(function, *args, **kwargs)

        monkeypatch.setattr(InterpretedFunction, "run", note)


def specialization(
    function: Any, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[object, ...]:
    parameters = inspect.signature(function.fn).parameters
    loose = function.kwargs.get("do_not_specialize") or ()
    given = dict(zip(parameters, args, strict=False)) | kwargs
    parts: list[object] = [function.fn.__qualname__]
    for name, value in given.items():
        is_argument = name in parameters and parameters[name].annotation is not tl.constexpr
        if name in ("grid", "warmup"):
            continue
        if isinstance(value, torch.Tensor):
            parts.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif is_argument and type(value) is int:
            parts.append((name, name in loose or (value == 1, value % 16 == 0), value < 2**31))
        elif is_argument and type(value) is float:
            parts.append((name, float))
        else:
            parts.append((name, str(value)))
    return tuple(parts)


def with_packed_weights() -> Backend:
    """The kernels; whatever a layer's weight is, it is one of 4 bits of that shape."""
    triton = triton_backend()

    def packed(weight: Weight) -> Weight:
        rows, columns = weight.shape
        return random_packed(rows, columns, 32)

    def prepare(weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        return triton.prepare_linear(packed(weight), bias, dtype)

    def prepare_gated(
        weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype, activation: Activation
    ) -> Linear | None:
        return triton.prepare_gated(packed(weight), bias, dtype, activation)

    return replace(triton, prepare_linear=prepare, prepare_gated=prepare_gated)


def engine_of(model: Path, kv_format: KVFormat) -> LLMEngine:
    source = open_model(model)
    precision = Precision(CPU, torch.bfloat16, kv_format, 32)
    execution = TorchExecution(precision, with_packed_weights())
    executor, _ = execution.load(source, lambda stage, done, total: None, LIMITS.context_length)
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
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_model_len=LIMITS.context_length,
        kv_cache_memory=30 * block_bytes,
        fill=True,
        open_bytes=num_open * execution.open_page_bytes(source.spec),
    )
    runner, plan, _ = load_device_runner(
        execution,
        executor,
        HostDevice(),
        LIMITS,
        request,
        (),
        Rates(),
        lambda stage, done, total: None,
        graphs=False,
        num_open=num_open,
    )
    blocks = BlockManager(plan.num_blocks, 32, num_open=num_open)
    scheduler = Scheduler(blocks, LIMITS, (), look_ahead=True)
    info = SimpleNamespace(vocab_size=source.spec.vocab_size, eos_token_ids=())
    return LLMEngine(scheduler, runner, cast(EngineInfo, info))


def request(name: str, length: int, **sampling: Any) -> Request:
    settings = {"temperature": 1.0, "seed": 5, "max_tokens": 2, "ignore_eos": True, **sampling}
    tokens = tuple(3 + (7 * place + length) % 500 for place in range(length))
    return Request(request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(**settings))


def test_nothing_is_compiled_while_requests_wait(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch)
    engine = engine_of(tiny_llama, KVFormat.INT4_SEALED)
    compiled, launches.seen = launches.seen, set()
    requests = [
        request("one", 1, max_tokens=1, temperature=0.0),
        request("copies on write", 33, n=3, logprobs=2, max_tokens=2),
        *(request(f"r{i}", 1 + i % 2, max_tokens=1, top_p=0.9) for i in range(16)),
    ]
    for item in requests:
        engine.submit(item)
        if item.request_id == "one":
            engine.step()
    while engine.has_work:
        assert not [delta.error for delta in engine.step().deltas if delta.error]
    names = {key[0] for key in launches.seen}
    assert {"seal_kernel", "decode_kernel", "prefill_kernel", "choose_kernel"} < names
    assert launches.seen <= compiled, launches.seen - compiled


def test_what_is_specialized_is_seen() -> None:
    """The test above would be worth nothing if all launches looked alike."""

    def kernel(x_ptr: object, size: int, scale: float, block: tl.constexpr) -> None:
        """A stand-in."""

    def key(size: int = 3, scale: float = 1.0, place: int = 0, block: int = 8) -> object:
        x = torch.zeros(20, dtype=torch.int32)[place:]
        return specialization(function, (x, size, scale), {"block": block, "grid": (size,)})

    function = SimpleNamespace(fn=kernel, kwargs={})
    assert key(3, 1.0) == key(5, 2.0)
    different = [key(), key(1), key(16), key(2**31), key(place=1), key(block=16)]
    assert len(set(map(str, different))) == len(different)
    function = SimpleNamespace(fn=kernel, kwargs={"do_not_specialize": ["size"]})
    assert key(1) == key(16) == key(3)
