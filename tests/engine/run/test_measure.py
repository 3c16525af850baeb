from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.limits import LOGIT_ROWS, SAMPLE_ROWS
from appliance.engine.run import measure
from appliance.engine.run.cuda_graphs import step_sizes
from appliance.engine.run.geometry import fixed_bytes, largest_step
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.measure import (
    KERNEL_ROWS,
    MIN_GRAPH_BYTES,
    graph_allowance,
    measure_workspace,
)
from appliance.engine.scheduling.scheduler import SchedulerLimits
from appliance.errors import MemoryPlanError
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.fp8_matmul.launch import choose_fp8_tile
from appliance.kernels.packed_matmul.tiles import ARCHITECTURES, choose_tile
from appliance.kernels.penalties import reference
from appliance.kernels.sampling import batched
from appliance.kernels.sampling.rows import SamplingRows
from appliance.kernels.token_mask.reference import mask_tokens
from appliance.kernels.token_scores.reference import score_tokens

MIB = 2**20


class Meter(HostDevice):
    """Counts memory like a GPU: 1 MiB for the tiny cache, and a peak that grows at each query."""

    is_asynchronous = True

    def __init__(self, in_use: int, *peaks: int, overhead: int = 0) -> None:
        self.in_use, self.peaks = in_use, list(peaks)
        self.bytes_beside = overhead

    def begin_peak(self) -> int:
        return self.in_use

    def memory_in_use(self) -> int:
        return self.in_use + MIB

    def overhead(self) -> int:
        return self.bytes_beside

    def peak(self) -> int:
        return self.in_use + MIB + (self.peaks.pop(0) if len(self.peaks) > 1 else self.peaks[0])


class Model:
    """A model that records what it ran."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.blocks = 0
        self.asked: list[tuple[Any, ...]] = []
        self.read: list[tuple[int, int]] = []  # rows of hidden states, and scored ones
        self.spec = SimpleNamespace(
            vocab_size=100, state_bytes=0, has_experts=False, sees_pictures=False
        )

    def allocate_cache(
        self,
        layers: Sequence[LayerPrecision],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int,
        num_states: int,
    ) -> None:
        self.blocks += num_blocks
        assert num_open == layers[0].format.is_sealed
        assert num_states == 0

    def forward(self, *arguments: Any) -> torch.Tensor:
        self.asked.append(arguments)
        return torch.zeros(len(arguments[-1]), 100)

    def hidden(self, *arguments: Any) -> torch.Tensor:
        return torch.zeros(len(arguments[-1]), 8)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.read.append((len(hidden.untyped_storage()) // 32, len(hidden)))
        return torch.zeros(len(hidden), 100)


@pytest.mark.parametrize(
    ("kv_format", "rows", "context", "lengths", "contexts"),
    [
        (KVFormat.BF16, 64, 100, (1,) * 5 + (59,), (100, 1, 1, 1, 1, 59)),
        (KVFormat.BF16, 64, 24, (1,) * 5 + (24, 24, 11), (24, 1, 1, 1, 1, 24, 24, 11)),
        (KVFormat.BF16, 54, 24, (1,) * 6 + (24, 24), (24, 1, 1, 1, 1, 1, 24, 24)),
        (KVFormat.BF16, 53, 24, (1,) * 5 + (24, 24), (24, 1, 1, 1, 1, 24, 24)),
        (KVFormat.BF16, 5, 24, (1,) * 5, (24, 1, 1, 1, 1)),
        (KVFormat.INT4_SEALED, 27, 40, (1,) * 10 + (16, 1), (40, *[1] * 9, 16, 17)),
    ],
)
def test_the_largest_step_is_run_and_peaks_are_read(
    kv_format: KVFormat,
    rows: int,
    context: int,
    lengths: tuple[int, ...],
    contexts: tuple[int, ...],
) -> None:
    model, sampled = Model(), []

    def sample_tokens(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        sampled.append((logits.shape, rows.top_p.tolist()))
        return batched.choose(logits, rows)

    found = measure_workspace(
        model,  # type: ignore[arg-type]
        sample_tokens,
        reference.penalize,
        mask_tokens,
        score_tokens,
        Meter(500 * MIB, 70 * MIB, 77 * MIB),
        SchedulerLimits(5, rows, context),
        kv_layers=[LayerPrecision(kv_format)],
        block_size=16,
    )
    assert (found.captured, found.largest) == (70 * MIB, 77 * MIB)
    assert model.blocks == 1
    # A padded step may have more rows.
    step = next(
        asked for asked in model.asked if len(asked[0]) == rows and asked[2].decode_rows == 1
    )
    token_ids, positions, batch, _, wanted = step
    assert len(token_ids) == len(positions) == len(batch.slot_mapping) == rows
    assert batch.host_query_lens == lengths
    assert batch.host_context_lens == contexts
    assert (batch.sealed is not None) == kv_format.is_sealed
    assert int(batch.slot_mapping.max()) < 16
    assert positions[0] == context - 1
    assert int(positions.max()) < context
    assert batch.block_tables.shape[1] == -(-context // 16)
    most = min(rows, SAMPLE_ROWS)  # with drafts
    assert wanted.tolist() == list(range(most))
    assert sampled[-1][0] == (most, 100)
    assert all(share < 1.0 for share in sampled[-1][1])
    assert model.read == [(rows, min(rows, LOGIT_ROWS))]


def measured(limits: SchedulerLimits) -> Model:
    """Measure a model within limits; return it with what it was asked."""
    model = Model()
    measure_workspace(
        model,  # type: ignore[arg-type]
        batched.choose,
        reference.penalize,
        mask_tokens,
        score_tokens,
        Meter(0, MIB),
        limits,
        kv_layers=[LayerPrecision(KVFormat.BF16)],
        block_size=16,
    )
    return model


def test_steps_of_all_sizes_that_have_kernels_of_their_own_are_run_before_requests_come() -> None:
    model = measured(SchedulerLimits(48, 1000, 2000))
    steps = [(len(arguments[0]), len(arguments[-1])) for arguments in model.asked]
    sizes = [48, 8, 16, 32, 48, 64, 128, 256, 512, 47 + 512, 1000]  # first without room for drafts
    assert steps == [(rows, min(rows, 48)) for rows in sizes]


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        (SchedulerLimits(5, 512, 100), [8] * 5),
        (SchedulerLimits(16, 512, 100), [8, 8, 8, 4, *[1] * 12]),
        (SchedulerLimits(64, 512, 100), [1] * 64),
        (SchedulerLimits(8, 20, 100), [8, 6, *[1] * 6]),
        (SchedulerLimits(1, 512, 100), [8]),
        (SchedulerLimits(5, 512, 100, verifies=False), []),
    ],
)
def test_a_step_that_verifies_drafts_is_measured(
    limits: SchedulerLimits, lengths: list[int]
) -> None:
    """Each row has partial results over a whole context, as many rows as a graph has room for."""
    model = measured(limits)
    drafted = [asked[2] for asked in model.asked if asked[2].decode_rows == 8]
    assert [list(batch.host_query_lens) for batch in drafted] == ([lengths] if lengths else [])
    for batch in drafted:
        assert batch.num_decodes == len(lengths)
        assert batch.host_context_lens[0] == limits.context_length
        sizes = [size for size in step_sizes(limits) if size.draft_rows]
        assert sum(lengths) >= max((size.num_rows for size in sizes), default=0)


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("group_size", [0, 32, 128])
@pytest.mark.parametrize("most", [16, 33, 200, 512, 2048])
def test_no_kernel_waits_for_a_size_that_was_not_run(
    capability: int, group_size: int, most: int
) -> None:
    def kernels(rows: int) -> tuple[object, ...]:
        tiles = (choose_tile(rows, capability, group_size, may_fold=fold) for fold in (False, True))
        compiled = (replace(tile, max_rows=0) for tile in tiles)  # rows are no constant of theirs
        return *compiled, choose_fp8_tile(rows, capability)

    run = {kernels(rows) for rows in (*(rows for rows in KERNEL_ROWS if rows < most), most)}
    assert {kernels(rows) for rows in range(1, most + 1)} == run


def load(folder: Path, device: HostDevice, **options: Any) -> LLMEngine:
    config = EngineConfig(model=str(folder), threads=1, kernels="torch", **options)
    return load_llm_engine(config, (2,), None, lambda stage, done, total: None, device)


def test_the_plan_is_made_of_what_was_measured(tiny_llama: Path) -> None:
    engine = load(tiny_llama, Meter(40 * MIB, 20 * MIB, 30 * MIB, overhead=3), cuda_graphs="off")
    limits = SchedulerLimits(32, 512, 256)
    spare = 16 * 2 * 2 * 2 * 32  # bytes of a block
    fixed = fixed_bytes(largest_step(limits, 16, is_sealed=False), 512)
    assert engine.info.workspace_bytes == 30 * MIB + fixed + 3
    with_graphs = load(tiny_llama, Meter(40 * MIB, 20 * MIB, 30 * MIB, overhead=3))
    allowed = graph_allowance(with_graphs.info.memory_bytes, 20 * MIB)
    assert with_graphs.info.workspace_bytes == engine.info.workspace_bytes + spare + allowed
    cache = with_graphs.runner.cache  # type: ignore[attr-defined]
    assert cache.num_blocks == with_graphs.info.num_blocks + 1


def test_what_does_not_fit_once_it_is_measured_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(MemoryPlanError, match="workspace"):
        load(tiny_llama, Meter(40 * MIB, 2**50))
    with pytest.raises(MemoryPlanError, match="weights"):
        load(tiny_llama, Meter(2**50, MIB))


def test_graphs_get_a_share_and_never_nothing() -> None:
    assert graph_allowance(MIB, 0) == MIN_GRAPH_BYTES
    assert graph_allowance(100 * 2**30, 7) == 2 * 2**30 + 7


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (torch.OutOfMemoryError("tried to allocate"), MemoryPlanError, "--max-num-batched-tokens"),
        (RuntimeError("an illegal memory access"), RuntimeError, "illegal"),
    ],
)
def test_what_a_first_step_runs_into_is_said(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[Exception],
    says: str,
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(measure, "measure_workspace", fail)
    with pytest.raises(kind, match=says):
        load(tiny_llama, Meter(0, MIB))
