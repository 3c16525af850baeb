"""Models without a family of ours: transformers' modules over our cache give its own logits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.fallback_models import FALLBACKS
from support.models.native_models import LIBRARY
from support.models.teacher_forcing import BLOCK_SIZE, logits_of

from appliance.kernels.backend import CPU, REFERENCE
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.model.fallback import operations
from appliance.model.fallback.decoder import FallbackDecoder
from appliance.model.fallback.loader import load_fallback
from appliance.model.fallback.operations import LibraryOperations, TorchOperations
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


CPU_DEVICE = torch.device("cpu")
# Single tokens at the beginning, and from the last token of a block on, after windows of 7.
CUT = [1, 1, 14, 15, 1, 1, 1, 11]


def in_library(folder: Path) -> FallbackDecoder:
    library = LibraryOperations(NativeEngine(LIBRARY, 1), torch.float32)
    found = load_fallback(open_model(folder), library, torch.float32)
    assert isinstance(found, FallbackDecoder)
    return found


def in_torch(folder: Path, backend: Any = CPU) -> FallbackDecoder:
    kernels = TorchOperations(backend, CPU_DEVICE, torch.float32)
    found = load_fallback(open_model(folder), kernels, torch.float32)
    assert isinstance(found, FallbackDecoder)
    return found


def expected(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    assert float(logits.std()) > 0.2  # the logits vary
    return logits


@pytest.mark.parametrize("case", FALLBACKS)
def test_logits_equal_transformers_however_a_prompt_is_cut(
    case: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    model_type, settings = FALLBACKS[case]
    model = make_model(model_type, **settings)
    folder, theirs = save(model), expected(model, token_ids)
    model.set_experts_implementation("eager")  # the other implementation has no float64
    exact = expected(model.double(), token_ids)
    # transformers' float32 is up to 1.6e-4 away, depending on how the processor multiplies.
    tolerance = 1e-4 * max(1.0, float(exact.std())) + float((theirs - exact).abs().max())
    for decoder in (in_library(folder), in_torch(folder)):
        for chunks in (None, CUT):
            found = logits_of(decoder, token_ids, chunks=chunks, block_table=(5, 2, 7))
            torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "named"),
    [("phimoe", "PhiMoEForCausalLM"), ("sarvam_moe", "SarvamMoEForCausalLM")],
)
def test_a_class_is_found_by_its_makers_name_for_it(
    model_type: str,
    named: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = make_model(model_type, **FALLBACKS["olmo2"][1] | sizes)
    folder, wanted = save(model), expected(model, token_ids)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [named]}))
    found = logits_of(in_torch(folder), token_ids)
    torch.testing.assert_close(found, wanted, atol=1e-4 * max(1.0, float(wanted.std())), rtol=0)


@pytest.mark.parametrize("format", [KVFormat.INT8, KVFormat.INT4_SEALED])
def test_a_quantized_cache_gives_the_same_bits_however_a_prompt_is_cut(
    format: KVFormat,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    model_type, settings = FALLBACKS["gemma2-caps"]
    model = make_model(model_type, **settings)
    decoder, wanted = in_library(save(model)), expected(model, token_ids)
    whole = logits_of(decoder, token_ids, format=format)
    cut = logits_of(decoder, token_ids, chunks=[7, 1, 9, 20, 1, 1, 6], format=format)
    torch.testing.assert_close(cut, whole, atol=1e-5, rtol=0)
    error = float((whole - wanted).abs().mean() / wanted.std())
    assert 0 < error < (0.05 if format is KVFormat.INT8 else 0.2)


def test_sequences_of_unlike_lengths_stand_side_by_side_without_padding(
    make_model: Callable[..., Any], save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    """A step of a decode row and two prompts: each sees only its own sequence."""
    model_type, settings = FALLBACKS["cohere2-window"]
    model = make_model(model_type, **settings)
    folder = save(model)
    texts = [token_ids[:20], token_ids[5:12], token_ids[20:45]]
    wanted = torch.stack([expected(model, text)[-1] for text in texts])
    for decoder in (in_library(folder), in_torch(folder), in_torch(folder, REFERENCE)):
        cache = decoder.allocate_cache(KVFormat.FP32, num_blocks=4, block_size=BLOCK_SIZE)
        _last_logits(decoder, cache, texts[:1], [0], [19])
        found = _last_logits(decoder, cache, texts, [19, 0, 0], [20, 7, 25])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def _last_logits(
    decoder: FallbackDecoder, cache: Any, texts: list[list[int]], starts: list[int], ends: list[int]
) -> torch.Tensor:
    """Run tokens of several texts in one step; each text has the block of its number."""
    spans = list(zip(texts, starts, ends, strict=False))
    rows = [end - start for _, start, end in spans]
    batch = RaggedBatch.of(
        rows,
        [end for *_, end in spans],
        [(number,) for number, _ in enumerate(spans)],
        block_size=BLOCK_SIZE,
        device=decoder.device,
    )
    tokens = [token for text, start, end in spans for token in text[start:end]]
    positions = [position for _, start, end in spans for position in range(start, end)]
    last = torch.tensor(rows).cumsum(0) - 1
    return decoder.forward(torch.tensor(tokens), torch.tensor(positions), batch, cache, last)


def test_small_steps_leave_torch_one_thread_and_give_the_others_back(
    make_model: Callable[..., Any], save: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, settings = FALLBACKS["gemma2-caps"]
    decoder = in_library(save(make_model(model_type, **settings)))
    seen = []
    module = next(iter(decoder.places))
    module.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    monkeypatch.setattr(operations, "FEW_ROWS", 8)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        logits_of(decoder, list(range(17)), chunks=[9, 8])
        assert torch.get_num_threads() == 3
        with pytest.raises(KeyError):
            logits_of(replace(decoder, places={}), [1, 2])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [3, 1, 1]
