"""Launches past Triton's own checks: what they launch is compared with what Triton launches.

The CUDA driver below them is a stub, which keeps the arguments of the last launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support.kernels.stub_cuda import Launch, stub_gpu
from triton.runtime.jit import JITFunction

from appliance.kernels.gpu.compile_ahead import compiled_ahead
from appliance.kernels.gpu.direct_launch import Launcher

pytestmark = pytest.mark.compiled
COUNT = 2  # the place of the argument whose value is not compiled for


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def add_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    count,
    stride,
    offset,
    factor,
    BLOCK: tl.constexpr,  # noqa: N803, Triton's custom
    TWICE: tl.constexpr,  # noqa: N803
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = factor + offset
    if x_ptr is not None:
        value += tl.load(x_ptr + places.to(tl.int64) * stride, mask=inside).to(tl.float32)
    tl.store(out_ptr + places, value * (2 if TWICE else 1), mask=inside)


@pytest.fixture
def launched() -> Iterator[Launch]:
    with stub_gpu(86) as last:
        last.count = 0
        yield last


def arguments() -> Iterator[tuple[Any, ...]]:
    x = torch.zeros(64, dtype=torch.bfloat16)
    pointers = x, x[1:], x[8:], x.half(), x.float(), None
    counts, strides = (1, 5, 16, 1 << 33), (1, 2, 16, 48, 1 << 32, -16)
    for pointer, count, stride in itertools.product(pointers, counts, strides):
        yield torch.zeros(64), pointer, count, stride, stride // 2, 0.5


OPTIONS: tuple[dict[str, Any], ...] = (
    {"BLOCK": 32, "TWICE": True, "num_warps": 1},
    {"BLOCK": 32, "TWICE": True, "num_warps": 2},
    {"BLOCK": 64, "TWICE": False, "num_warps": 1},
)


def sizes(values: tuple[Any, ...]) -> Iterator[int]:
    """Bytes of what the kernel gets: None and a 1 that it is compiled for are left out."""
    for number, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            yield 8
        elif value is not None and not (value == 1 and number != COUNT):
            yield 8 if isinstance(value, int) and not -(1 << 31) <= value < 1 << 31 else 4


def what_was(last: Launch) -> tuple[Any, ...]:
    how = last.function, tuple(last.grid), last.threads, last.shared, last.attributes
    return *how, tuple(last.arguments)


def by_triton(last: Launch, grid: tuple[int, ...], values: Any, options: Any) -> tuple[Any, ...]:
    kept = tuple(sizes(values))
    last.sizes[: len(kept) + 1] = (*kept, 0)
    add_kernel[grid](*values, **options)
    return what_was(last)


def fail(*_: object, **__: object) -> None:
    raise AssertionError("Triton is asked once for each specialization")


def test_a_launch_is_that_of_triton_for_all_kinds_of_arguments(
    launched: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Launcher(add_kernel)
    for number, (values, options) in enumerate(itertools.product(arguments(), OPTIONS)):
        grid = ((3,), (2, 5), (1, 2, 4))[number % 3]
        expected = by_triton(launched, grid, values, options)
        launcher(grid, values, options)
        assert what_was(launched) == expected, (values, options)
        with monkeypatch.context() as patched:
            patched.setattr(JITFunction, "run", fail)
            before = launched.count
            launcher(grid, values, options)
        assert what_was(launched) == expected, (values, options)
        assert launched.count == before + 1


def test_each_device_has_a_function_of_its_own(launched: Launch) -> None:
    launcher, values = Launcher(add_kernel), next(arguments())
    driver: Any = triton.runtime.driver.active
    functions = []
    for device in (0, 1, 0, 1):
        driver.current = device
        launcher((1,), values, OPTIONS[0])
        found = what_was(launched)
        assert found == by_triton(launched, (1,), values, OPTIONS[0])
        functions.append(launched.function)
    assert functions[0] == functions[2] != functions[1] == functions[3]


def test_who_watches_launches_is_told_of_each(launched: Launch) -> None:
    launcher, values, told = Launcher(add_kernel), next(arguments()), list[str]()

    def note(metadata: Any) -> None:
        told.append(metadata.get()["name"])

    launcher((1,), values, OPTIONS[0])
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(note)
    try:
        launcher((1,), values, OPTIONS[0])
    finally:
        hooks.remove(note)
    launcher((1,), values, OPTIONS[0])
    assert told == ["add_kernel"]
    assert launched.count == 3


def test_what_is_only_recorded_is_launched_later(launched: Launch) -> None:
    launcher, values = Launcher(add_kernel), next(arguments())
    with compiled_ahead(lambda done, total: None):
        launcher((1,), values, OPTIONS[1])
    assert launched.count == 0
    for _ in range(2):
        launcher((1,), values, OPTIONS[1])
    assert launched.count == 2
