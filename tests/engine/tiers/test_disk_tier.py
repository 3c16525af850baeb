"""An engine with a disk: it finds what an earlier one stored, and nothing wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.late_device import LateDevice
from support.runs.waiting import LIMIT, wait_until

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.tiers import disk_tier, read_ahead, write_behind
from appliance.engine.tiers.disk_store import DiskStore
from appliance.engine.tiers.write_behind import ON_DISK


def load(folder: Path, disk: Path | str, device: LateDevice | None = None, **options: Any) -> Any:
    settings = {
        "threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_disk": str(disk),
        **options,
    }
    config = EngineConfig(model=str(folder), **settings)
    return load_llm_engine(config, (), None, lambda *_: None, device)


@pytest.fixture(autouse=True)
def short_prompts_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model's context is 256 tokens."""
    monkeypatch.setattr(write_behind, "MIN_TOKENS", 64)


@contextmanager
def running(folder: Path, disk: Path | str, **options: Any) -> Iterator[LLMEngine]:
    """An engine that ends in an orderly way and leaves no thread."""
    before = set(threading.enumerate())
    engine = load(folder, disk, **options)
    try:
        yield engine
    finally:
        engine.close()
        assert set(threading.enumerate()) <= before


def request(name: str, length: int = 150, *, seed: int = 0, **options: Any) -> Request:
    generator = torch.Generator().manual_seed(seed)
    tokens = tuple(torch.randint(3, 512, (length,), generator=generator).tolist())
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=tokens, sampling=sampling, **options)


def run(engine: LLMEngine, *requests: Request) -> dict[str, list[int]]:
    for item in requests:
        engine.submit(item)
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.error is None
            answers.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check_invariants()
    assert engine.stats().blocks_active == 0
    writes = engine.tiers.writes
    if writes is not None:
        writes.flush(10.0)
    return answers


def run_twice(engine: LLMEngine, *requests: Request) -> dict[str, list[int]]:
    """Run requests twice: blocks that recur are written."""
    answers = run(engine, *requests)
    assert run(engine, *requests) == answers
    return answers


def files(disk: Path) -> list[Path]:
    return sorted(disk.rglob("*.kv"))


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8", "int4-rotated", "int4", "k8v4"])
def test_the_next_engine_goes_on_from_the_disk(tiny_llama: Path, tmp_path: Path, kv: str) -> None:
    with running(tiny_llama, tmp_path, kv_cache_dtype=kv) as first:
        expected = run_twice(first, request("a"))
        size = first.info.block_size
        assert first.stats().kv_disk_written_total == len(files(tmp_path)) == 149 // size
        assert any(ON_DISK in note and str(tmp_path) in note for note in first.info.notes)
    with running(tiny_llama, tmp_path, kv_cache_dtype=kv) as second:
        assert run(second, request("a")) == expected
        stats = second.stats()
        assert stats.prefix_hits_disk_total == 149 // size * size
        assert stats.prefix_hits_total == stats.prefix_hits_disk_total
        assert stats.kv_disk_corrupt_total == stats.kv_host_blocks == 0
        assert run(second, request("a")) == expected
        assert second.stats().kv_disk_read_total == stats.kv_disk_read_total, "it was in the cache"


@pytest.mark.usefixtures("exact_products")
def test_a_runner_that_looks_ahead_reads_and_writes_too(tiny_llama: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kernels": "torch", "dtype": "float32"}
    with running(tiny_llama, tmp_path, device=LateDevice(), **options) as first:
        expected = run_twice(first, request("a"), request("b", seed=1))
    with running(tiny_llama, tmp_path, device=LateDevice(), **options) as second:
        assert run(second, request("a"), request("b", seed=1)) == expected
        assert second.stats().prefix_hits_disk_total > 0


def test_other_formats_and_salts_find_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    with running(tiny_llama, tmp_path) as first:
        run_twice(first, request("a", cache_salt="mine"))
        assert first.stats().kv_disk_written_total > 0
    with running(tiny_llama, tmp_path) as second:
        run(second, request("a", cache_salt="yours"), request("b"))
        assert second.stats().prefix_hits_disk_total == 0
    with running(tiny_llama, tmp_path, kv_cache_dtype="bf16") as third:
        run(third, request("a", cache_salt="mine"))
        assert third.stats().prefix_hits_disk_total == 0


def test_weights_that_were_written_anew_find_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_llama.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    with running(model, tmp_path / "kv") as first:
        run_twice(first, request("a"))
    with running(model, tmp_path / "kv") as same:
        run(same, request("a"))
        assert same.stats().prefix_hits_disk_total > 0
    os.utime(next(model.glob("*.safetensors")), (10**9, 10**9))
    with running(model, tmp_path / "kv") as other:
        run(other, request("a"))
        assert other.stats().prefix_hits_disk_total == 0


def test_a_damaged_file_is_dropped_and_what_follows_computed(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with running(tiny_llama, tmp_path) as first:
        expected = run_twice(first, request("a"))
        table = first.tiers
        assert table.disk is not None
    by_age = sorted(files(tmp_path), key=lambda file: -file.stat().st_mtime_ns)  # head first
    by_age[5].write_bytes(b"x" + by_age[5].read_bytes()[1:])
    with running(tiny_llama, tmp_path) as second:
        assert run(second, request("a")) == expected
        stats = second.stats()
        assert stats.prefix_hits_disk_total == 5 * 16
        assert stats.kv_disk_corrupt_total == 1
        run(second, request("a"))
        assert second.stats().kv_disk_written_total == 1, "the block is written again"


def held_back_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold file reads back from now on, until this event is set."""
    gate, read = threading.Event(), DiskStore.read

    def slow_read(store: DiskStore, content: bytes) -> bytearray | None:
        gate.wait(LIMIT)
        return read(store, content)

    monkeypatch.setattr(DiskStore, "read", slow_read)
    return gate


def test_others_go_ahead_while_one_waits_for_the_disk(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tiny_llama, tmp_path) as first:
        expected = run_twice(first, request("slow"), request("fast", seed=1, length=40))
    gate = held_back_reads(monkeypatch)
    with running(tiny_llama, tmp_path) as second:
        second.submit(request("slow"))
        answers = {"slow": [], "fast": []}  # type: dict[str, list[int]]
        second.step()
        assert (second.stats().waiting, second.stats().running) == (1, 0)
        second.submit(request("fast", seed=1, length=40))
        while len(answers["fast"]) < 20:
            for delta in second.step().deltas:
                answers[delta.request_id] += delta.token_ids
            second.check_invariants()
        assert not answers["slow"]
        gate.set()
        while second.has_work:
            for delta in second.step().deltas:
                answers[delta.request_id] += delta.token_ids
        assert answers == expected
        assert second.stats().prefix_hits_disk_total > 0


def test_a_disk_that_hangs_is_not_waited_for(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not asked again until it has answered."""
    with running(tiny_llama, tmp_path) as first:
        expected = run_twice(first, request("a"), request("b", seed=1))
    gate = held_back_reads(monkeypatch)
    monkeypatch.setattr(read_ahead, "MIN_WAIT", 0.1)
    with running(tiny_llama, tmp_path) as second:
        disk = second.tiers.disk
        assert disk is not None
        assert run(second, request("a")) == {"a": expected["a"]}
        assert caplog.text.count("the disk of KV blocks has not answered") == 1
        assert len(disk.unfinished) == 1
        assert run(second, request("b", seed=1)) == {"b": expected["b"]}
        assert len(disk.unfinished) == 1
        assert second.stats().prefix_hits_disk_total == 0
        gate.set()

        def has_answered() -> bool:
            second.scheduler.plan(time.monotonic())
            return not disk.unfinished

        wait_until(has_answered)
        second.check_invariants()
        assert second.tiers.host.room == second.tiers.host.capacity
    with running(tiny_llama, tmp_path) as third:
        assert run(third, request("a")) == {"a": expected["a"]}
        assert third.stats().prefix_hits_disk_total > 0


def test_whoever_ends_while_it_waits_for_the_disk_leaves_nothing(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tiny_llama, tmp_path) as first:
        run_twice(first, request("a"))
    gate = held_back_reads(monkeypatch)
    with running(tiny_llama, tmp_path) as second:
        second.submit(request("a"))
        second.step()
        assert second.abort("a")
        second.check_invariants()
        gate.set()

        def has_read() -> bool:
            second.step()
            return not second.tiers.disk.unfinished  # type: ignore[union-attr]

        wait_until(has_read)
        second.check_invariants()
        assert second.stats().kv_host_blocks == 0
        assert second.tiers.host.room == second.tiers.host.capacity


def test_a_disk_that_refuses_is_said_once_and_tried_again(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(store: DiskStore, content: bytes, data: bytes, stamp_ns: int) -> None:
        raise OSError(28, "No space left on device")

    with running(tiny_llama, tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, "write", full)
            first = run(engine, request("a"))
            assert run(engine, request("a")) == first
            run_twice(engine, request("b", seed=1))
            assert caplog.text.count("No space left on device") == 1
            assert engine.stats().kv_disk_writing is False
        disk = engine.tiers.disk
        assert disk is not None
        assert not disk.is_writing
        disk.resume_at = 0.0  # the pause is over
        run_twice(engine, request("c", seed=2))
        assert engine.stats().kv_disk_writing is True
        assert engine.stats().kv_disk_written_total > 0


def test_a_thread_that_fails_stops_nobody(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*arguments: object) -> None:
        raise ValueError("a bug")

    with running(tiny_llama, tmp_path) as engine:
        expected = run_twice(engine, request("a"))
    with running(tiny_llama, tmp_path) as engine:
        monkeypatch.setattr(DiskStore, "read", broken)
        monkeypatch.setattr(DiskStore, "write", broken)
        assert run(engine, request("a")) == expected
        run_twice(engine, request("b", seed=1))
        assert engine.stats().kv_disk_writing is False
        assert engine.stats().prefix_hits_disk_total == 0
    assert "reads KV blocks failed" in caplog.text
    assert "writes KV blocks failed" in caplog.text


def test_a_folder_that_cannot_be_used_is_a_note_and_no_failure(
    tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    engine = load(tiny_llama, tmp_path / "file" / "kv")
    assert any("not remembered over a restart" in note for note in engine.info.notes)
    assert run(engine, request("a")) == run(load(tiny_llama, "off"), request("a"))


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_scripts_leave_nothing_on_the_disk_unless_told_to(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv("APPLIANCE_CACHE_DIR", str(tmp_path))
    engine = load(tiny_llama, setting)
    run_twice(engine, request("a"))
    assert not list(tmp_path.iterdir())
    assert engine.stats().kv_disk_capacity_bytes == 0


def test_what_the_thread_takes_is_counted_and_idle_moments_write_the_rest(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the disk's thread takes more than steps can spare, they hand nothing over."""
    with running(tiny_llama, tmp_path) as engine:
        writes, disk = engine.tiers.writes, engine.tiers.disk
        assert writes is not None
        assert disk is not None
        before = disk.cpu_seconds
        run(engine, request("a"))
        for item in (request("a"), request("b", seed=1, length=20)):
            engine.submit(item)
        with monkeypatch.context() as patch:
            taken = iter(range(1, 10**6))
            patch.setattr(disk_tier.DiskTier, "cpu_seconds", property(lambda _: float(next(taken))))
            while engine.scheduler.has_work:
                engine.step()
        assert engine.stats().kv_disk_pending == 149 // 16
        writes.flush(10.0)
        assert engine.stats().kv_disk_pending == 0
        assert engine.stats().kv_disk_dropped_total == 0
        assert before < disk.cpu_seconds


def test_blocks_that_leave_the_cache_before_are_counted(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier.DiskTier, "is_writing", property(lambda self: False))
    block = 16 * 2 * 2 * 2 * 32  # of bfloat16
    with running(tiny_llama, tmp_path, kv_cache_memory=16 * block, kv_cache_dtype="bf16") as engine:
        run_twice(engine, request("a"))
        assert engine.stats().kv_disk_pending > 0
        run(engine, request("b", seed=1))
        assert engine.stats().kv_disk_dropped_total > 0
    assert not files(tmp_path)
