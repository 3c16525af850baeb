from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.config import EngineConfig
from appliance.engine.device.device import HostDevice
from appliance.engine.device.device_runner import fixed_bytes, largest_step
from appliance.engine.device.measure import MIN_GRAPH_BYTES, graph_allowance, measure_workspace
from appliance.engine.engine import LLMEngine
from appliance.engine.loading import load_parts
from appliance.engine.scheduling.scheduler import SchedulerLimits
from appliance.errors import MemoryPlanError
from appliance.kernels.kv_cache import KVFormat, LayerPrecision
from appliance.kernels.sampling import SamplingRows, batched

MIB = 2**20


class Meter(HostDevice):
    """Counts as a GPU would: 1 MiB for the tiny cache, `step` for everything in the step."""

    def __init__(self, in_use: int, step: int) -> None:
        self.in_use, self.step = in_use, step
        self.watching = False

    def begin_peak(self) -> int:
        self.watching = not self.watching
        return self.in_use

    def memory_in_use(self) -> int:
        return self.in_use + MIB

    def peak(self) -> int:
        return self.in_use + MIB + self.step


class Model:
    """Remembers what it was asked."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.blocks = 0
        self.asked: tuple[Any, ...] = ()

    def allocate_cache(
        self, layers: Sequence[LayerPrecision], *, num_blocks: int, block_size: int, num_open: int
    ) -> None:
        self.blocks += num_blocks
        assert num_open == layers[0].format.is_sealed

    def forward(self, *arguments: Any) -> torch.Tensor:
        self.asked = arguments
        return torch.zeros(len(arguments[-1]), 100)


@pytest.mark.parametrize(
    ("kv_format", "rows", "context", "lengths"),
    [
        (KVFormat.BF16, 64, 100, (64,)),
        (KVFormat.BF16, 64, 24, (24, 24, 16)),
        (KVFormat.BF16, 49, 24, (1, 24, 24)),
        (KVFormat.BF16, 48, 24, (24, 24)),
        (KVFormat.INT4_SEALED, 17, 40, (16, 1)),
    ],
)
def test_the_largest_step_is_run_and_its_peak_is_read(
    kv_format: KVFormat, rows: int, context: int, lengths: tuple[int, ...]
) -> None:
    model, sampled = Model(), []

    def sample_tokens(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        sampled.append((logits.shape, rows.top_p.tolist()))
        return batched.choose_where_it_is(logits, rows)

    found = measure_workspace(
        model,  # type: ignore[arg-type]
        sample_tokens,
        Meter(500 * MIB, 77 * MIB),
        SchedulerLimits(5, rows, context),
        kv_layers=[LayerPrecision(kv_format)],
        block_size=16,
    )
    assert found == 77 * MIB
    assert model.blocks == 1
    token_ids, positions, batch, _, wanted = model.asked
    assert len(token_ids) == len(positions) == len(batch.slot_mapping) == rows
    assert batch.host_query_lens == lengths
    assert batch.host_context_lens == ((16, 17) if kv_format.is_sealed else lengths)
    assert (batch.sealed is not None) == kv_format.is_sealed
    assert int(batch.slot_mapping.max()) < 16
    assert int(positions.max()) < context
    assert wanted.tolist() == [0, 1, 2, 3, 4]
    assert [shape for shape, _ in sampled] == [(5, 100)]
    assert all(share < 1.0 for share in sampled[0][1])


def load(folder: Path, device: HostDevice, **options: Any) -> LLMEngine:
    config = EngineConfig(model=str(folder), threads=1, kernels="torch", **options)
    return LLMEngine(*load_parts(config, (2,), None, lambda stage, done, total: None, device))


def test_the_plan_is_made_of_what_was_measured(tiny_llama: Path) -> None:
    engine = load(tiny_llama, Meter(40 * MIB, 30 * MIB), cuda_graphs="off")
    limits = SchedulerLimits(32, 512, 256)
    block = 16 * 2 * 2 * 2 * 32  # bytes: one is spare
    fixed = fixed_bytes(largest_step(limits, 16, is_sealed=False), 512)
    assert engine.info.workspace_bytes == 30 * MIB + fixed + block
    with_graphs = load(tiny_llama, Meter(40 * MIB, 30 * MIB))
    assert with_graphs.info.workspace_bytes == engine.info.workspace_bytes + graph_allowance(
        with_graphs.info.memory_bytes
    )
    cache = with_graphs._runner._cache  # type: ignore[attr-defined]
    assert cache.num_blocks == with_graphs.info.num_blocks + 1


def test_what_does_not_fit_once_it_is_measured_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(MemoryPlanError, match="workspace"):
        load(tiny_llama, Meter(40 * MIB, 2**50))
    with pytest.raises(MemoryPlanError, match="weights"):
        load(tiny_llama, Meter(2**50, MIB))


def test_graphs_get_a_share_and_never_nothing() -> None:
    assert graph_allowance(MIB) == MIN_GRAPH_BYTES
    assert graph_allowance(100 * 2**30) == 2 * 2**30
