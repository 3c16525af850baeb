"""The calls to a GPU, their order and their streams; a stand-in replaces the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from appliance.engine.run.cuda_device import CudaDevice
from appliance.engine.run.device import CaptureError

POOL = (0, 7)


class Gpu:
    """Replaces `torch.cuda`; `log` has the calls and their streams."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams = 0
        self.stream = "main"
        self.pools_ended: list[object] = []
        self.in_use = 0  # torch's memory
        self.free = 1000
        self.end: Exception | None = None  # error of a capture
        self.broken: Exception | None = None  # error of every call that waits for the device

    def new_stream(self) -> SimpleNamespace:
        self.streams += 1
        return self.named(f"side {self.streams}")

    def named(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.log.append(f"{name} waits for {event.name}"),
        )

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        """Like `torch.cuda.graph`: after an exception the stream stays the current one."""
        before, self.stream = self.stream, stream.name
        yield
        self.stream = before

    @contextmanager
    def on_stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def graph(self, graph: object, *, pool: object, stream: Any, **_: str) -> Iterator[None]:
        assert pool == POOL
        with self.on(stream):
            self.log.append(f"capture on {self.stream}")
            try:
                yield
            finally:
                if self.end is not None:
                    raise self.end

    def event(self, **_: bool) -> SimpleNamespace:
        event = SimpleNamespace(name="", query=lambda: True, synchronize=lambda: None)

        def record() -> None:
            event.name = f"event {len(self.log)} on {self.stream}"
            self.log.append(event.name)

        event.record = record
        event.elapsed_time = lambda end: 2000.0
        return event

    def synchronize(self, *_: object) -> None:
        if self.broken is not None:
            raise self.broken


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    stand_ins: dict[str, Callable[..., object]] = {
        "Stream": gpu.new_stream,
        "stream": gpu.on_stream,
        "current_stream": lambda: gpu.named(gpu.stream),
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: POOL,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: gpu.log.append("replay")),
        "graph": gpu.graph,
        "Event": gpu.event,
        "synchronize": gpu.synchronize,
        "empty_cache": lambda: None,
        "memory_reserved": lambda device: gpu.in_use,
        "max_memory_reserved": lambda device: gpu.in_use + 5,
        "reset_peak_memory_stats": lambda device: None,
        "mem_get_info": lambda device: (gpu.free, 1000),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    def end_pool(device: int, pool: object) -> None:
        if gpu.end is None:
            raise RuntimeError("not recording to it")
        gpu.pools_ended.append(pool)

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_pool, raising=False)
    return gpu


@pytest.fixture
def device(gpu: Gpu) -> CudaDevice:
    return CudaDevice(torch.device("cpu"))


def test_what_is_captured_has_run_before_on_the_same_stream_each_time(
    gpu: Gpu, device: CudaDevice
) -> None:
    for _ in range(2):
        device.capture(lambda: gpu.log.append(f"step on {gpu.stream}"))
    once = [
        "side 1 waits for main",
        "step on side 1",
        "main waits for side 1",
        "capture on side 1",
        "step on side 1",
    ]
    assert gpu.log == once * 2
    assert gpu.streams == 1
    assert gpu.stream == "main"


def test_calls_of_the_host_run_at_once_first_and_then_between_the_parts_of_a_graph(
    gpu: Gpu, device: CudaDevice
) -> None:
    def step() -> None:
        gpu.log.append("before")
        device.cut(lambda: gpu.log.append("host"))
        gpu.log.append("after")

    graph = device.capture(step)
    begun = [
        "side 1 waits for main",
        "before", "host", "after",
        "main waits for side 1",
        "capture on side 1", "before", "capture on side 1", "after",
    ]  # fmt: skip
    assert gpu.log == begun
    assert gpu.stream == "main"
    gpu.log.clear()
    graph.replay()
    assert gpu.log == ["replay", "host", "replay"]
    device.cut(lambda: gpu.log.append("at once"))
    assert gpu.log[-1] == "at once"


def failing(gpu: Gpu, error: Exception, *, captured: bool) -> Callable[[], None]:
    def step() -> None:
        if (gpu.log[-1] == "capture on side 1") is captured:
            raise error

    return step


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("end", [None, RuntimeError("a previous error during capture")])
def test_a_capture_without_memory_is_told_from_others(
    gpu: Gpu, device: CudaDevice, captured: bool, end: Exception | None
) -> None:
    gpu.end = end
    step = failing(gpu, torch.OutOfMemoryError("tried to allocate"), captured=captured)
    with pytest.raises(MemoryError):
        device.capture(step)
    assert gpu.stream == "main"
    assert gpu.pools_ended == ([POOL] if captured and end else [])


def test_a_graph_that_the_driver_has_no_memory_for_is_one_of_those(
    gpu: Gpu, device: CudaDevice
) -> None:
    gpu.end = RuntimeError("CUDA error: out of memory")
    with pytest.raises(MemoryError):
        device.capture(lambda: None)


def test_after_a_capture_that_is_refused_the_device_works_on(gpu: Gpu, device: CudaDevice) -> None:
    step = failing(gpu, RuntimeError("not permitted: it waits for the device"), captured=True)
    gpu.end = RuntimeError("a previous error during capture")
    with pytest.raises(CaptureError, match="waits for the device"):
        device.capture(step)
    assert gpu.stream == "main"
    assert gpu.pools_ended == [POOL], "the allocator knows that it is over"
    gpu.end = None
    device.capture(lambda: None)


def test_an_error_of_the_device_itself_is_not_one_of_the_capture(
    gpu: Gpu, device: CudaDevice
) -> None:
    gpu.end, gpu.broken = RuntimeError("an error during capture"), RuntimeError("illegal access")
    with pytest.raises(RuntimeError, match="illegal access"):
        device.capture(lambda: None)


def test_copies_aside_wait_for_the_queue_and_the_queue_for_what_it_needs(
    gpu: Gpu, device: CudaDevice
) -> None:
    rows, tensor = [torch.ones(3), torch.full((3,), 2.0)], torch.zeros(2, 3)
    sent = device.send_aside(rows, tensor)
    assert tensor.tolist() == [[1.0] * 3, [2.0] * 3]
    sending = [
        "side 1 waits for main",
        "event 1 on side 1",
        "event 2 on side 1",
        "main waits for event 2 on side 1",
    ]
    assert gpu.log == sending
    assert sent.wait() == 2.0
    tensor.mul_(5)
    fetched = device.fetch_aside(tensor, rows)
    assert [row.tolist() for row in rows] == [[5.0] * 3, [10.0] * 3]
    fetching = ["side 1 waits for main", "event 5 on side 1", "event 6 on side 1"]
    assert gpu.log[len(sending) :] == fetching, "the queue does not wait for it"
    device.follow(fetched)
    assert gpu.log[-1] == "main waits for event 6 on side 1"


def test_memory_that_cannot_be_pinned_is_had_all_the_same(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refuse(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    with torch.inference_mode():
        memory = device.pinned(24)
    assert (memory.shape, memory.dtype) == ((24,), torch.uint8)
    memory.zero_()  # works outside of inference mode as well
    assert "host memory" in caplog.text


def test_what_others_took_since_the_device_was_opened_is_overhead(gpu: Gpu) -> None:
    gpu.free, gpu.in_use = 900, 10  # its context takes 90
    device = CudaDevice(torch.device("cpu"))
    gpu.free, gpu.in_use = 500, 390
    assert device.overhead() == 20
    assert device.begin_peak() == device.memory_in_use() == 380
    assert device.peak() == 385
    gpu.free = 600
    assert device.overhead() == 0
