from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kernels.compiled_kernels.table import load

from appliance.kernels.gpu.residency import LARGEST, Footprint, Footprints, multiprocessors_of

GOLDEN = Path(__file__).parent / f"resources_triton_{version('triton')}.json"


# Computed by hand: 65,536 registers, 64 or 48 warps, 164, 100 or 228 KiB of shared memory.
@pytest.mark.parametrize(
    ("capability", "registers", "shared", "num_warps", "programs"),
    [
        (86, 255, 0, 8, 1),  # limited by registers: 8 warps in all
        (86, 168, 0, 1, 12),  # three warps of 168 on each of four parts
        (86, 32, 0, 4, 12),  # limited by threads: 48 warps
        (90, 32, 0, 4, 16),  # 64 warps
        (86, 32, 16648, 1, 5),  # limited by shared memory, of which the driver takes 1 KiB
        (90, 32, 16648, 1, 13),
        (86, 0, 99 << 10, 8, 1),
        (86, 255, 101 << 10, 16, 1),  # at least one
    ],
)
def test_programs_of_a_multiprocessor(
    capability: int, registers: int, shared: int, num_warps: int, programs: int
) -> None:
    assert LARGEST[capability].resident(Footprint(registers, shared, num_warps)) == programs


def decode_programs(kv_format: str, capability: int, num_warps: int) -> int:
    """Resident programs of the compiled kernel for heads of 128."""
    if not GOLDEN.exists():
        pytest.skip(f"there is no {GOLDEN.name}")
    found = load(GOLDEN)[f"attention decode llama_8b bf16 kv {kv_format}", capability]
    return LARGEST[capability].resident(Footprint(found["registers"], found["shared"], num_warps))


def test_decode_fills_a_multiprocessor_and_no_more() -> None:
    # With 8 bits, shared memory of consumer cards holds five; their registers would hold eight.
    assert {cc: decode_programs("int8", cc, 1) for cc in (86, 89, 120)} == {86: 5, 89: 5, 120: 5}
    assert {cc: decode_programs("fp8", cc, 1) for cc in (86, 89, 120)} == {86: 5, 89: 5, 120: 5}
    assert decode_programs("int4", 86, 1) == 8
    assert decode_programs("bf16", 86, 2) == 2
    assert decode_programs("bf16", 90, 2) == 4


@pytest.mark.parametrize(
    ("kv_format", "num_warps", "programs"),
    [("bf16", 8, 2), ("fp8", 4, 3), ("int8", 4, 3), ("int4", 4, 2), ("int4-sealed", 4, 3)],
)
def test_prefill_leaves_room_for_another_program_beside_it(
    kv_format: str, num_warps: int, programs: int
) -> None:
    """On Hopper one multiplies while another computes its softmax or widens codes."""
    if not GOLDEN.exists():
        pytest.skip(f"there is no {GOLDEN.name}")
    found = load(GOLDEN)[f"attention prefill llama_8b bf16 kv {kv_format}", 90]
    program = Footprint(found["registers"], found["shared"], num_warps)
    assert LARGEST[90].resident(program) == programs


def test_a_card_tells_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rtx_4060 = SimpleNamespace(
        multi_processor_count=24,
        shared_memory_per_multiprocessor=100 << 10,
        max_threads_per_multi_processor=1536,
        L2_cache_size=24 << 20,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: rtx_4060)
    device = torch.device("cuda", 7)
    assert multiprocessors_of(device, 89) == replace(LARGEST[89], num_sms=24, l2_bytes=24 << 20)
    assert multiprocessors_of(torch.device("cpu"), 103) is LARGEST[90]


class Kernel:
    """A kernel that compiles at its second warm-up; the first one only registers it."""

    def __init__(self) -> None:
        self.warm_ups = 0

    def warmup(self, *arguments: Any, grid: tuple[int], **options: Any) -> Any:
        self.warm_ups += 1
        if self.warm_ups == 1:
            return None
        metadata = SimpleNamespace(shared=2048, num_warps=options["num_warps"])
        return SimpleNamespace(n_regs=40, metadata=metadata, _init_handles=lambda: None)


def test_a_variant_is_read_once_when_it_is_compiled() -> None:
    kernel = Kernel()
    footprints = Footprints(kernel)
    x, cpu = torch.zeros(3), torch.device("cpu")
    assert footprints.of(cpu, (x, 1), {"num_warps": 2}) is None
    found = Footprint(40, 2048, 2)
    assert footprints.of(cpu, (x, 1), {"num_warps": 2}) == found
    assert footprints.of(cpu, (torch.ones(5), 9), {"num_warps": 2}) == found
    assert kernel.warm_ups == 2
    assert footprints.of(cpu, (x.half(), 1), {"num_warps": 2}) == found
    assert footprints.of(cpu, (None, 1), {"num_warps": 4}) == replace(found, num_warps=4)
    assert kernel.warm_ups == 4
