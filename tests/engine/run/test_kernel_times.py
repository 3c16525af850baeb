"""The clock on a card, by stubs of CUDA's events and driver; and what it times in a decoder."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.gguf.ggml_models import write_llama
from support.kernels.packed_weights import random_packed
from support.kernels.stub_cuda import stub_gpu
from support.models.expert_models import save_experts
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import OutOfResources

from appliance.engine.run import kernel_times
from appliance.engine.run.kernel_times import CardClock, time_kernels, use_timed, works_of
from appliance.kernels.attention.timed_spans import SpanPlanner, TimedAttention
from appliance.kernels.attention.work import SPAN_LENGTHS
from appliance.kernels.backend import REFERENCE, triton_backend
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gpu.timed import LaunchChoice, Timeable, TimedChoices
from appliance.kernels.grouped_matmul.timed_experts import TimedExperts
from appliance.kernels.grouped_matmul.variant import TILES
from appliance.kernels.int8_matmul.timed_prompts import TimedPrompts
from appliance.kernels.packed_matmul.launch import TiledLinear, prepare_linear
from appliance.kernels.packed_matmul.timed_linear import TimedLinear
from appliance.model.attention import Attention
from appliance.model.decoder import Decoder
from appliance.model.experts import Experts
from appliance.model.linear import ConcatenatedLinear
from appliance.model.loader import load_decoder
from appliance.model.prompt_layers import PromptLayers
from appliance.model.source import open_model

CPU = torch.device("cpu")


class Noted:
    """What happens on the card, in order."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.took: list[float] = []  # milliseconds between two events, from the first on


class StubEvent:
    """An event of CUDA: notes when it is recorded, and says the next time of the test."""

    noted: ClassVar[Noted]

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.noted.happened.append("event")

    def synchronize(self) -> None:
        self.noted.happened.append("wait")

    def elapsed_time(self, end: StubEvent) -> float:
        assert self.noted.happened[-1] == "wait", "the end is waited for"
        return self.noted.took.pop(0)


class Zeroing(TorchDispatchMode):
    """Notes each time that memory is filled with zeros."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket.__name__ == "zero_":
            StubEvent.noted.happened.append("flush")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    found = StubEvent.noted = Noted()
    monkeypatch.setattr(torch.cuda, "Event", StubEvent)
    monkeypatch.setattr(kernel_times, "FLUSH_BYTES", 64)
    return found


class Work:
    """Work that notes itself."""

    name, has_splits = "work", False

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def entries(self, most_rows: int) -> tuple[int, ...]:
        return (8,)

    def candidates(self, entry: int, best: LaunchChoice | None = None) -> tuple[LaunchChoice, ...]:
        return (LaunchChoice(splits=1), LaunchChoice(splits=2))

    def library_rows(self, most_rows: int) -> tuple[int, ...]:
        return ()

    def use(self, timed: TimedChoices) -> None:
        pass

    def inputs(self, entry: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        return (entry, dtype, device)

    def run(self, *inputs: Any) -> object:
        assert inputs == (8, torch.bfloat16, CPU)
        if self._error is not None:
            raise self._error
        StubEvent.noted.happened.append("work")
        return None


def test_the_clock_warms_up_empties_the_cache_and_takes_the_median(noted: Noted) -> None:
    clock = CardClock(CPU, torch.bfloat16)
    noted.took = [0.4] * 5 + [9.0, 2.0, 2.5, 1.0, 3.0]
    with Zeroing():
        found = clock.seconds([Work(), Work()], 8)
    assert found == pytest.approx(2.5e-3)
    # The time of a flush, once; then works that compile, and those that tell the host's time.
    first = ["flush", *["event", "flush", "event", "wait"] * 5, *["work"] * 4]
    assert noted.happened[: len(first)] == first
    repeats = noted.happened[len(first) :]
    flushes = repeats.index("event")
    assert flushes >= 1
    assert repeats == [*["flush"] * flushes, "event", "work", "work", "event", "wait"] * 5
    noted.happened.clear()
    noted.took = [1.0] * 5
    with Zeroing():
        assert clock.seconds([Work()] * 9, 8) == pytest.approx(1e-3)
    assert noted.happened[:8] == ["work"] * 8, "four of a form, twice, and no flush is timed again"


def test_the_host_is_ahead_of_the_card_when_works_begin(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: launching takes 1 ms and a flush 0.3, so 1 + 4 flushes are enqueued before."""
    ticks = iter([10.0, 10.001])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    noted.took = [0.3] * 5 + [1.0] * 5
    with Zeroing():
        CardClock(CPU, torch.bfloat16).seconds([Work()], 8)
    repeats = noted.happened[noted.happened.index("work") + 2 :]
    assert repeats.index("event") == 5


@pytest.mark.parametrize(
    ("error", "warns"),
    [
        (OutOfResources(200 << 10, 100 << 10, "shared memory"), False),
        (torch.OutOfMemoryError("no"), False),
        (RuntimeError("the library refuses"), True),
    ],
)
def test_what_the_card_cannot_run_is_not_timed(
    noted: Noted, error: Exception, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    noted.took = [0.4] * 5
    assert CardClock(CPU, torch.bfloat16).seconds([Work(error)], 8) is None
    assert ("work at 8 is not timed" in caplog.text) == warns


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    save_experts("qwen3_moe", tmp_path / "model")
    with stub_gpu(86):
        return load_decoder(open_model(tmp_path / "model"), triton_backend(), CPU, torch.bfloat16)


def test_a_decoder_is_timed_and_works_by_the_choices(decoder: Decoder, noted: Noted) -> None:
    """The clock says that the second candidate is twice as fast; a second start times nothing."""
    layer = next(layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Experts))
    planner = decoder.backend.plan_attention
    assert isinstance(planner, SpanPlanner)
    with stub_gpu(86):
        found = list(works_of(decoder, KVFormat.INT8))
        experts, other = (one for one in found if isinstance(one, TimedExperts))
        (attention,) = (one for one in found if isinstance(one, TimedAttention))
        assert experts.name == other.name
        wanted: list[tuple[int, Timeable]] = [
            *((entry, experts) for entry in experts.entries(64)),
            *((entry, attention) for entry in attention.entries(64)),
        ]
        assert [entry for entry, _ in wanted] == [8, 16, 32, 1024]
        noted.took = [0.4] * 5
        for entry, work in wanted:
            each = [1.0] * len(work.candidates(entry))
            each[1] = 0.5
            noted.took += [took for took in each * 2 for _ in range(5)]
        times = time_kernels(decoder, 64, 1e9, {}, KVFormat.INT8)
        assert not noted.took, "each candidate was measured five times in two rounds"
        assert set(times.wanted) == {(entry, work.name) for entry, work in wanted}
        best = times.choices[experts.name].entries[8].tile
        assert best is not None
        assert (best.block_m, best.max_rows) == (TILES[1].block_m, 8)
        hidden = torch.zeros(2, 64, dtype=torch.bfloat16)
        choice, _ = decoder.backend.choose(
            hidden, layer.router_weights, layer.router, layer.held, timed=experts.experts.timed
        )
        assert choice.pairs is not None
        assert choice.pairs.tile is best
        layer(hidden)  # its own call, with the same tile
        assert planner.lengths == (256, *SPAN_LENGTHS[1:])
        again = time_kernels(decoder, 64, 1e9, times.choices, KVFormat.INT8)
        use_timed(decoder, {}, KVFormat.INT8)
    assert again == times
    assert experts.experts.timed == TimedChoices()
    assert planner.lengths == SPAN_LENGTHS


def test_a_linear_of_a_decoder_is_found_wherever_it_is() -> None:
    with stub_gpu(86):
        linear = prepare_linear(random_packed(256, 1024, 128, symmetric=True), None, torch.bfloat16)
    assert isinstance(linear, TiledLinear)

    class Model:
        layers, head, prompts = ((linear, [linear]),), linear, None
        backend = REFERENCE

    found = list(works_of(Model(), KVFormat.BF16))  # type: ignore[arg-type]
    assert [isinstance(work, TimedLinear) for work in found] == [True] * 3


def test_prompts_are_timed_in_all_layers_but_the_last_one(tmp_path: Path) -> None:
    source = open_model(write_llama(tmp_path / "model.gguf", ("Q4_0",), layers=2))
    with stub_gpu(86):
        decoder = load_decoder(source, triton_backend(), CPU, torch.bfloat16)
        rounding = replace(decoder, prompts=PromptLayers(decoder.layers, decoder.backend))
        before, after = (list(works_of(one, KVFormat.BF16)) for one in (decoder, rounding))
    assert after[: len(before)] == before
    assert [isinstance(work, TimedPrompts) for work in after[len(before) :]] == [True] * 4


def test_linears_of_unlike_types_that_share_an_input_are_all_timed(tmp_path: Path) -> None:
    """As in most files of Q4_K_M, whose values have another type than queries and keys."""
    source = open_model(write_llama(tmp_path / "model.gguf", ("Q4_0", "Q8_0"), layers=2))
    with stub_gpu(86):
        decoder = load_decoder(source, triton_backend(), CPU, torch.bfloat16)
        names = [work.name for work in works_of(decoder, KVFormat.BF16)]
    shared = [layer.mixer.qkv for layer in decoder.layers if isinstance(layer.mixer, Attention)]
    parts = [one for each in shared if isinstance(each, ConcatenatedLinear) for one in each.parts]
    assert len(parts) > len(shared), "q, k and v have one type"
    for part in parts:
        assert isinstance(part, TiledLinear)
        assert TimedLinear(part).name in names
