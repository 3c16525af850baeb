"""A head drafts, a checkpoint's or an EAGLE-3 head: answers stay the same."""

from __future__ import annotations

import json
import re
from math import prod
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from support.engine.draft_answers import SIZES, load, requests_of, run
from support.engine.drafting import draft_always
from support.models.causal_models import random_model
from support.models.draft_heads import FAMILIES, LATENT, PlainHead, write_with_head
from support.models.eagle_heads import TARGETS, write_with_eagle

from appliance.config import EngineConfig
from appliance.engine.load.memory_request import request_memory
from appliance.engine.memory.plan import MemoryPlan, MemoryRequest, plan_memory
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.draft_executor import HeadExecutor
from appliance.engine.run.hidden_rows import kept_bytes
from appliance.errors import CheckpointError, ConfigError, MemoryPlanError, RequestError
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.model.draft_head import open_eagle, open_head
from appliance.model.native_loader import load_native
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.engine.engine import LLMEngine
    from appliance.engine.speculation.draft_model import DraftRows


EAGLE = "eagle-"  # prefix of the name of a model with such a head beside it
KV_FORMATS = ("int8", "bf16", "fp8", "int4", "int4-sealed", "k8v4")


class Folders(dict[str, tuple["Path", Any]]):
    """A folder for each name, with the model written there; written on first use."""

    def __init__(self, make: Callable[[str], Path]) -> None:
        self._make = make

    def __missing__(self, name: str) -> tuple[Path, Any]:
        folder, target = self._make(name), name.removeprefix(EAGLE)
        write = write_with_head if target == name else write_with_eagle
        self[name] = folder, write(target, folder)
        return self[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    return Folders(tmp_path_factory.mktemp)


def speculating(folder: Path) -> str:
    """The setting that selects the folder's head."""
    eagle = folder / "eagle"
    return f"eagle={eagle}" if eagle.is_dir() else "mtp"


def drafting(folder: Path, **options: Any) -> LLMEngine:
    engine = load(folder, speculate=speculating(folder), **options)
    draft_always(engine)
    return engine


def without_beams() -> list[Request]:
    return [one for one in requests_of(512) if one.request_id != "beams"]


@pytest.mark.parametrize("family", FAMILIES)
def test_its_numbers_are_those_of_the_definition(
    family: str, folders: dict[str, tuple[Path, Any]]
) -> None:
    folder, model = folders[family]
    source = open_model(folder)
    engine = NativeEngine(load_library(), 1)
    target = load_native(source, engine, torch.float32)
    head = open_head(source)
    decoder = load_native(
        head.source, engine, torch.float32, target=target, shared=head.shared, join=head.join
    )
    size, count = 16, 21
    cache = decoder.allocate_cache(KVFormat.FP32, num_blocks=4, block_size=size)
    plain = PlainHead(family, model, folder)
    torch.manual_seed(0)
    token_ids = torch.randint(512, (count + 1,))
    given = torch.randn(count, 64)

    def step(start: int, end: int, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = RaggedBatch.of(
            [end - start], [end], [[2, 0]], block_size=size, device=decoder.device
        )
        rows = torch.arange(end - start)
        ids, places = token_ids[start:end], torch.arange(start, end)
        return decoder.draft(ids, places, batch, cache, given, rows)

    stream, hidden = step(0, count, given)
    expected = plain(token_ids[:count], given)
    for found, wanted in zip((stream, hidden, target.logits(hidden)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    own = (hidden if head.chains_normed else stream)[-1:]
    stream, hidden = step(count, count + 1, own)
    expected = plain(token_ids, torch.cat((given, own)))
    for found, wanted in zip((stream, hidden, target.logits(hidden)), expected, strict=True):
        wanted = wanted[-1:]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("family", "kv"),
    [
        ("glm4_moe", "int8"),
        ("qwen3_5", "int4-sealed"),
        ("nemotron_h", "bf16"),
        *((family, "bf16") for family in LATENT),  # latents have 16 bits
        *((f"{EAGLE}llama", kv) for kv in KV_FORMATS),
        *((f"{EAGLE}{target}", "bf16") for target in TARGETS if target != "llama"),
    ],
)
def test_answers_are_the_same(family: str, kv: str, folders: dict[str, tuple[Path, Any]]) -> None:
    """Runs all requests with one head of each kind, and a third of them with the others."""
    folder, _ = folders[family]
    each = 1 if (family, kv) in (("glm4_moe", "int8"), (f"{EAGLE}llama", "bf16")) else 3
    requests = without_beams()[::each]
    expected, pieces = run(load(folder, kv_cache_dtype=kv), requests)
    engine = drafting(folder, kv_cache_dtype=kv)
    found, fewer = run(engine, requests)
    assert found == expected
    stats = engine.stats()
    assert stats.draft_tokens_total > stats.accepted_tokens_total > 50 // each
    assert fewer < pieces


@pytest.mark.parametrize("host", [0, 2**20])
@pytest.mark.parametrize(
    ("family", "memory"), [("glm4_moe", 90000), ("qwen3_5", 40000), (f"{EAGLE}llama", 90000)]
)
def test_answers_are_the_same_where_they_have_to_make_room(
    family: str, memory: int, host: int, folders: dict[str, tuple[Path, Any]]
) -> None:
    folder, _ = folders[family]
    options: dict[str, Any] = {"kv_host_memory": host}
    expected, _ = run(load(folder), without_beams())
    engine = drafting(folder, kv_cache_memory=memory, **options)
    found, _ = run(engine, without_beams())
    assert found == expected
    stats = engine.stats()
    assert stats.preemptions_total > 0
    assert stats.accepted_tokens_total > 10


def answer(engine: LLMEngine, prompt: tuple[int, ...], **sampling: Any) -> None:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **sampling})
    engine.submit(Request(request_id="a", prompt_token_ids=prompt, sampling=params))
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize(
    ("family", "sampling", "least"),
    [
        ("glm4_moe", {"temperature": 0.0}, 0.7),
        (f"{EAGLE}llama", {"temperature": 0.0}, 0.4),  # it lacks some tokens, and continues
        ("glm4_moe", {"temperature": 1.0, "seed": 7}, 0.2),
        (f"{EAGLE}llama", {"temperature": 1.0, "seed": 7}, 0.2),
    ],
)
def test_its_tokens_come_true(
    family: str, sampling: dict[str, Any], least: float, folders: dict[str, tuple[Path, Any]]
) -> None:
    """The stream is nearly the last token's embedding, in the model and in its head."""
    engine = drafting(folders[family][0])
    answer(engine, (5, 9, 31, 7), **sampling)
    stats = engine.stats()
    assert stats.draft_tokens_total > 30
    assert stats.accepted_tokens_total > least * stats.draft_tokens_total


@pytest.mark.parametrize("family", ["glm4_moe", f"{EAGLE}llama"])
def test_rows_in_the_cache_are_not_run_again(
    family: str, folders: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's blocks hold the head's keys too; an unknown block is not part of its context."""
    seen: list[DraftRows] = []
    run_head = HeadExecutor.run

    def watched(model: Any, rows: Any) -> Any:
        seen.extend(rows)
        return run_head(model, rows)

    monkeypatch.setattr(HeadExecutor, "run", watched)
    engine, prompt = drafting(folders[family][0]), tuple(range(100, 190))
    speculator: Any = engine.scheduler.speculator
    speculator.proposers = ()  # else the same answer would be looked up
    answer(engine, prompt, temperature=0.0)
    first = sum(len(one.token_ids) for one in seen)
    assert seen[0].start == 0
    seen.clear()
    answer(engine, prompt, temperature=0.0)
    assert sum(len(one.token_ids) for one in seen) < first - 64
    assert seen[0].start >= 64
    assert seen[0].skipped <= 16  # the served model resumes inside a block, too
    # The head forgets which blocks it filled, while the served model reads them from its cache.
    speculator.drafting.proposer.blocks.held.clear()
    seen.clear()
    answer(engine, prompt, temperature=0.0)
    assert seen[0].skipped >= 64
    for one in seen:
        assert len(one.blocks) == -(-(one.start + len(one.token_ids) - one.skipped) // 16)


def changed(folder: Path, to: Path, drop: str = "", **config: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not drop or drop not in name}
    for name in [one for one in kept if one.endswith("eh_proj.weight") and "narrow" in config]:
        kept[name] = kept[name][:, :-2].clone()
    config.pop("narrow", None)
    save_file(kept, to / "model.safetensors", metadata={"format": "pt"})
    known = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(known | config))
    return to


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"drop": "layers.3.", "num_nextn_predict_layers": 0},
            "brings no head that drafts; use --spec",
        ),
        (
            {"drop": "layers.3."},
            "names a head in num_nextn_predict_layers, but has no tensors of it",
        ),
        ({"narrow": True}, "a head of another hidden size: model.layers.3.eh_proj.weight"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    change: dict[str, Any], says: str, folders: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    folder = changed(folders["glm4_moe"][0], tmp_path, **change)
    with pytest.raises(ConfigError, match=says):
        load(folder, speculate="mtp")
    assert load(folder).scheduler.speculator is None


def test_a_head_without_a_tensor_is_refused(
    folders: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    folder = changed(folders["glm4_moe"][0], tmp_path, drop="3.shared_head.norm")
    with pytest.raises(CheckpointError, match=r"shared_head\.norm\.weight is missing"):
        load(folder, speculate="mtp")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel": 2}, "--pipeline-parallel and --gpu-split divide among several"),
        ({"kernels": "torch"}, "needs the CPU library, whose answers"),
    ],
)
@pytest.mark.parametrize("family", ["glm4_moe", f"{EAGLE}llama"])
def test_what_cannot_run_a_head_is_refused(
    family: str, options: dict[str, Any], says: str, folders: dict[str, tuple[Path, Any]]
) -> None:
    folder = folders[family][0]
    with pytest.raises(ConfigError, match=says):
        load(folder, speculate=speculating(folder), **options)


@pytest.mark.parametrize("family", ["glm4_moe", f"{EAGLE}llama"])
def test_beams_are_refused(family: str, folders: dict[str, tuple[Path, Any]]) -> None:
    (beams,) = [one for one in requests_of(512) if one.request_id == "beams"]
    with pytest.raises(RequestError, match="leave use_beam_search out"):
        drafting(folders[family][0]).submit(beams)


def test_a_head_of_another_vocabulary_is_refused(
    folders: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    _, eagle = folders[f"{EAGLE}llama"]
    sizes: dict[str, Any] = {**SIZES, "vocab_size": 2048}
    random_model("llama", **sizes).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"eagle=eagle: the head knows 512 tokens, .* and the model 2,048"
    ):
        load(tmp_path, speculate=f"eagle={eagle}")


@pytest.mark.parametrize("family", ["glm4_moe", f"{EAGLE}llama"])
def test_the_plan_counts_it(family: str, folders: dict[str, tuple[Path, Any]]) -> None:
    folder, eagle = folders[family]
    config = load_config(folder)
    source = open_model(folder)
    _, without = request_memory(config, source)
    _, with_head = request_memory(replace(config, speculate=speculating(folder)), source)
    assert with_head.kv_bytes_per_token > without.kv_bytes_per_token
    head = open_head(source) if family == "glm4_moe" else open_eagle(eagle, source)
    own = sum(prod(slot.shape) for slot in head.slots())
    assert with_head.draft_bytes >= kept_bytes(head.reads) + 2 * own


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("glm4_moe", r"the checkpoint's head for multi-token prediction: 1 layer, [\d.]+ MiB"),
        (
            f"{EAGLE}llama",
            r"the EAGLE-3 head eagle: 1 layer, [\d.]+ MiB, reads .* layers 2, 1, 0 \(from 0\)",
        ),
    ],
)
def test_the_server_says_what_drafts(
    family: str, says: str, folders: dict[str, tuple[Path, Any]]
) -> None:
    engine = drafting(folders[family][0])
    assert re.fullmatch(says, engine.info.drafts)
    assert engine.info.draft_bytes > 0
    assert not load(folders[family][0]).info.drafts


def load_config(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), speculate="off", threads=1, max_model_len=160)


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe"])
def test_auto_takes_the_head_that_is_there(
    family: str, folders: dict[str, tuple[Path, Any]]
) -> None:
    folder, _ = folders[family]
    requests = requests_of(512)
    expected, pieces = run(load(folder, speculate="off"), requests)
    engine = load(folder, speculate="auto")
    assert "multi-token prediction" in engine.info.drafts
    draft_always(engine)
    answers, fewer = run(engine, requests)
    assert answers == expected, "beams among them, which nobody drafts for"
    assert fewer < pieces


def test_auto_serves_without_the_head_if_memory_is_short(
    folders: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = folders["qwen3_5"]

    def refused(request: MemoryRequest) -> MemoryPlan:
        if request.draft_bytes:
            raise MemoryPlanError("no room for so much beside the model")
        return plan_memory(request)

    monkeypatch.setattr("appliance.engine.load.memory_request.plan_memory", refused)
    with pytest.raises(MemoryPlanError):
        load(folder, speculate="mtp")
    engine = load(folder, speculate="auto")
    assert engine.info.drafts == ""
    assert any("there is no memory for it" in note for note in engine.info.notes)
    engine.close()
