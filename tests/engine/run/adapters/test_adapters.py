"""Requests with adapters through the engine: mixed, waiting for slots, cached by content."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.engine.adapter_requests import ALL, PROMPT, finish, load, ref, request, run
from support.models.lora import write_adapter
from support.models.teacher_forcing import logits_of

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.adapters.pool import key_of
from appliance.engine.run.cuda_graphs import StepSize
from appliance.errors import AdapterError, ConfigError
from appliance.model.adapters.reader import read_adapter
from appliance.model.adapters.targets import adapter_targets
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.engine.nouns.messages import AdapterAnswer


def greedy(engine: LLMEngine, model: Path, folder: Path, count: int) -> list[int]:
    """Return the greedy answer of a decoder alone, without an engine."""
    runner: Any = engine.runner
    executor = runner.executor
    source = open_model(model)
    slots = executor.adapter_slots(adapter_targets(source.spec, source.family.names), 1, 64)
    slots.put(0, slots.lay_out(read_adapter(folder, source, 64)))
    tokens = list(PROMPT)
    for _ in range(count):
        logits = logits_of(executor, tokens, adapters=slots)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(PROMPT) :]


def test_each_request_gets_its_own_adapter(model: Path, folders: list[Path]) -> None:
    engine = load(model, prefix_caching=False)
    alone = [run(engine, request("x", folder))["x"] for folder in (None, *folders)]
    assert len({tuple(tokens) for tokens in alone}) > 3, "adapters that say something"
    mixed = [request(f"r{i}", folder) for i, folder in enumerate((None, *folders, None))]
    together = run(engine, *mixed)
    for i, tokens in enumerate([*alone, alone[0]]):
        assert together[f"r{i}"] == tokens
    assert greedy(engine, model, folders[0], 3) == alone[1][:3]


@pytest.mark.parametrize("options", [{"kernels": "torch"}, {"kernels": "torch", "late": True}])
def test_torch_executes_them_too(model: Path, folders: list[Path], options: dict[str, Any]) -> None:
    engine = load(model, dtype="float32", **options)
    plain = run(engine, request("x"))["x"]
    found = run(engine, request("a", folders[0]), request("b"), request("c", folders[1]))
    assert found["b"] == plain
    assert plain not in (found["a"], found["c"])
    assert found["a"] != found["c"]


def test_graphs_hold_adapters_and_steps_without_them_have_their_own(
    model: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(model, dtype="float32", kernels="torch", late=True)
    graphs: Any = engine.runner.graphs  # type: ignore[attr-defined]
    replayed, real = list[StepSize](), graphs.run

    def noted(size: StepSize, function: Callable[[], None]) -> None:
        replayed.append(size)
        real(size, function)

    monkeypatch.setattr(graphs, "run", noted)
    eager = load(model, dtype="float32", kernels="torch")
    mixed = [request("a", folders[0]), request("b"), request("c", folders[1])]
    assert run(engine, *mixed) == run(eager, *mixed)
    assert any(size.is_adapted for size in replayed)
    assert set(replayed) <= set(graphs.captured)
    replayed.clear()
    run(engine, request("d"))
    assert not any(size.is_adapted for size in replayed)
    assert replayed


def test_a_name_with_new_content_never_hits_old_blocks(
    model: Path, folders: list[Path], tmp_path: Path
) -> None:
    engine = load(model)
    folder = shutil.copytree(folders[0], tmp_path / "same")
    first = run(engine, request("one", folder))["one"]

    def cached(one: Request) -> int:
        engine.submit(one)
        return max(delta.num_cached_tokens for delta in finish(engine))

    assert cached(request("again", folder)) > 0
    assert cached(request("other", folders[1])) == 0
    assert cached(request("base")) == 0
    assert cached(request("base again")) > 0
    shutil.copytree(folders[2], folder, dirs_exist_ok=True)
    assert cached(request("changed", folder)) == 0
    assert run(engine, request("last", folder))["last"] != first
    twin = shutil.copytree(folders[2], tmp_path / "twin")
    assert cached(request("twin", twin)) > 0, "the same content under another name"


def test_siblings_and_beams_have_their_request_s_adapter(model: Path, folders: list[Path]) -> None:
    engine = load(model)
    (greedy_answer,) = run(engine, request("x", folders[0])).values()
    several = run(
        engine,
        request("n", folders[0], n=3),
        request("beam", folders[1], n=2, best_of=2, use_beam_search=True),
        request("base"),
    )
    assert several["n"] == several["n/1"] == several["n/2"] == greedy_answer
    base_beams = run(engine, request("b", n=2, best_of=2, use_beam_search=True))
    assert several["beam"] != base_beams["b"]


def test_a_preempted_sequence_goes_on_with_its_adapter(model: Path, folders: list[Path]) -> None:
    roomy = load(model)
    short = PROMPT[:17]
    long = [request(f"r{i}", folders[i % 2], short, max_tokens=40) for i in range(4)]
    expected = run(roomy, *long)
    tight = load(model, kv_cache_memory=9 * 8192, max_model_len=64, prefix_caching=False)
    assert tight.adapters is not None
    for folder in folders[:2]:  # else the first sequences would end while the second is read
        tight.adapters.install(ref(folder))
    found = run(tight, *long)
    assert tight.stats().preemptions_total > 0
    assert found == expected


def test_more_adapters_than_slots_take_turns(model: Path, folders: list[Path]) -> None:
    engine = load(model)
    requests = [request(f"r{i}", folders[i % 4], max_tokens=3) for i in range(12)]
    found = run(engine, *requests)
    assert len(found) == 12
    assert all(found[f"r{i}"] == found[f"r{i % 4}"] for i in range(12))


def test_an_adapter_that_cannot_be_used_ends_its_requests_alone(
    model: Path, folders: list[Path], tmp_path: Path
) -> None:
    engine = load(model)
    wide = write_adapter(tmp_path / "wide", ALL, rank=33)
    engine.submit(request("bad", wide))
    engine.submit(request("good", folders[0]))
    ends = {delta.request_id: delta for delta in finish(engine) if delta.finish_reason}
    assert ends["bad"].refused
    assert "--max-lora-rank 33" in (ends["bad"].error or "")
    assert ends["good"].error is None


def test_it_waits_no_longer_than_its_request_allows(model: Path, folders: list[Path]) -> None:
    engine = load(model, max_loras=1)
    clock = [100.0]
    assert engine.adapters is not None
    engine.clock = lambda: clock[0]
    busy = request("busy", folders[0], max_tokens=None)
    engine.submit(busy)
    while not engine.sequences():
        engine.step()
    late = Request(
        request_id="late",
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(),
        adapter=ref(folders[1]),
        timeout=5.0,
    )
    engine.submit(late)
    engine.submit(request("gone", folders[1]))
    assert engine.abort("gone")
    assert engine.stats().waiting == 1
    clock[0] += 6
    (end,) = [delta for delta in engine.step().deltas if delta.request_id == "late"]
    assert end.expired
    assert "timeout of 5 s" in (end.error or "")
    engine.abort("busy")


def test_nobody_overtakes_one_that_waits_long(model: Path, folders: list[Path]) -> None:
    """Otherwise a stream of requests for one adapter would keep another adapter's out for ever."""
    engine = load(model, max_loras=1)
    clock = [100.0]
    assert engine.adapters is not None
    engine.clock = lambda: clock[0]
    engine.submit(request("first", folders[0], max_tokens=4))
    while not engine.sequences():
        engine.step()
    engine.submit(request("other", folders[1], max_tokens=4))
    clock[0] += 2
    engine.submit(request("later", folders[0], max_tokens=4))
    ends = [delta.request_id for delta in finish(engine) if delta.finish_reason]
    assert ends == ["first", "other", "later"]


def test_an_unloaded_adapter_waits_for_its_users(model: Path, folders: list[Path]) -> None:
    engine = load(model, prefix_caching=False)
    expected = run(engine, request("x", folders[0], max_tokens=8))["x"]
    engine.submit(request("user", folders[0], max_tokens=8))
    engine.step()
    engine.unload_adapter(ref(folders[0]))
    pool = engine.adapters
    assert pool is not None
    assert key_of(ref(folders[0])) in pool.residents
    assert run(engine)["user"][-7:] == expected[-7:]
    engine.unload_adapter(ref(folders[0]))
    assert key_of(ref(folders[0])) not in pool.residents
    assert run(engine, request("again", folders[0], max_tokens=8))["again"] == expected


def test_administrators_get_an_answer(model: Path, folders: list[Path], tmp_path: Path) -> None:
    engine = load(model, max_loras=1)
    broken = write_adapter(
        tmp_path / "nan",
        ALL,
        change=lambda _, tensors: next(iter(tensors.values())).fill_(torch.nan),
    )
    for folder in (folders[0], folders[0], broken):
        engine.load_adapter(ref(folder))
    answers: list[AdapterAnswer] = []
    while engine.has_work:
        answers += engine.step().adapters
    assert [answer.error for answer in answers[:2]] == ["", ""]
    assert "NaN" in answers[2].error


def test_settings_load_adapters_at_the_start(model: Path, folders: list[Path]) -> None:
    given = ",".join(f"{folder.name}={folder}" for folder in folders[:3])
    config = EngineConfig(model=str(model), threads=1, lora=given, max_loras=2)

    def start(config: EngineConfig) -> LLMEngine:
        none = {"eos_token_ids": (), "metadata": None}
        return load_llm_engine(config, on_progress=lambda *_: None, **none)  # type: ignore[arg-type]

    engine = start(config)
    assert engine.adapters is not None
    resident = [key_of(ref(folder)) in engine.adapters.residents for folder in folders[:3]]
    assert resident == [True, True, False], "the third one is read, and waits outside"
    assert engine.info.num_adapters == 2
    assert engine.info.adapter_bytes > 0
    with pytest.raises(AdapterError, match="is not at"):
        start(EngineConfig(model=str(model), threads=1, lora="a=/nowhere"))
    with pytest.raises(AdapterError, match="--max-lora-rank 6"):
        start(EngineConfig(model=str(model), threads=1, lora=given, max_lora_rank=5))
    with pytest.raises(ConfigError, match="NAME=PATH"):
        EngineConfig(lora="/only/a/path")
