"""Sequences with caches of transformers' own classes have its logits, however they are cut.

APPLIANCE_TEST_CLASSES=all, or names of some, tries all classes by hand.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, repeat
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.causal_models import random_model
from support.models.native_models import LIBRARY
from support.models.own_cache_models import ONE_BY_ONE, OWN_CACHES, sizes_of
from support.models.teacher_forcing import logits_of

from appliance.errors import UnsupportedModelError
from appliance.kernels.backend import CPU
from appliance.kernels.cpu.engine import NativeEngine
from appliance.model.fallback.loader import load_fallback
from appliance.model.fallback.measure import measured
from appliance.model.fallback.operations import LibraryOperations, TorchOperations
from appliance.model.fallback.own_cache import Begun, goes_on_with_several, tensors_in
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.fallback.own_cache import Held, OwnCacheDecoder

ASKED = os.environ.get(
    "APPLIANCE_TEST_CLASSES", "bloom,deepseek_v4,falcon_h1,gpt_neo,recurrent_gemma"
)
NAMES = sorted(OWN_CACHES) if ASKED == "all" else ASKED.split(",")
CUT = [20, 1, 1, 3, 14, 1, 5]


def made(model_type: str) -> Any:
    torch.manual_seed(4)
    return spread(random_model(model_type, **sizes_of(model_type)).float())


def spread(model: Any) -> Any:
    """Draw weights so large that every part shows in the logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            elif not any(part in name for part in ("norm", "A_log", "dt_", "sinks")):
                parameter.normal_(std=0.3)
    return model


def in_library(folder: Path) -> OwnCacheDecoder:
    operations = LibraryOperations(NativeEngine(LIBRARY, 1), torch.float32)
    found: Any = load_fallback(open_model(folder), operations, torch.float32)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers_however_a_prompt_is_cut(
    name: str, save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    model = made(name)
    decoder = in_library(save(model))
    # Otherwise RWKV's class halves weights and states as it runs, while norms add the same to less.
    model.config.rescale_every = 0
    with torch.no_grad():
        wanted = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    assert decoder.spec.own_cache is not None
    assert decoder.several == (name not in ONE_BY_ONE)
    tolerance = 1e-4 * max(1.0, float(wanted.std()))
    cuts = (None, CUT, [len(token_ids) - 3, 1, 1, 1])
    # Zamba 2's class bounds its time steps differently with a cache and without.
    for chunks in cuts[: 1 if name == "zamba2" else None]:
        found = logits_of(decoder, token_ids, chunks=chunks)
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_never_takes_more_than_was_measured_without_weights(
    name: str, dtype: torch.dtype, save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    operations = TorchOperations(CPU, torch.device("cpu"), dtype)
    decoder: Any = load_fallback(open_model(save(made(name))), operations, dtype)
    own, held = decoder.spec.own_cache.sizes(dtype.itemsize), None
    most = 0.0
    with torch.inference_mode():
        for token in (token_ids * 3)[: min(60, decoder.spec.context_length)]:
            _, held = decoder.begun.read(torch.tensor([token]), held)
            assert held is not None
            size, planned = bytes_of(held), own.fixed_bytes + own.token_bytes * held.length
            assert size <= planned
            most = max(most, size / planned)
    assert most > 0.6, "much more is planned than is ever taken"


def bytes_of(held: Held) -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, _, tensor in tensors_in([held.cache, list(held.inside)])
    }
    return sum(storages.values())


def test_torch_executes_it_as_well(save: Callable[[Any], Path], token_ids: list[int]) -> None:
    model = made("bloom")
    operations = TorchOperations(CPU, torch.device("cpu"), torch.float32)
    decoder: Any = load_fallback(open_model(save(model)), operations, torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor([token_ids])).logits[0]
    found = logits_of(decoder, token_ids, chunks=CUT)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


class SeesAhead(torch.nn.Module):
    """A module in transformers' form whose rows also see the rows after them."""

    def __init__(self, *, ahead: float) -> None:
        super().__init__()
        self.table = torch.randn(97, 8, generator=torch.Generator().manual_seed(1))
        self.ahead = ahead

    def forward(self, input_ids: Any, cache: Any = None, use_cache: bool = True) -> Any:
        rows = self.table[input_ids]
        before = torch.zeros(1, 8) if cache is None else cache["sum"]
        hidden = before + rows.cumsum(1) + self.ahead * rows.sum(1, keepdim=True)
        return SimpleNamespace(last_hidden_state=hidden, cache={"sum": before + rows.sum(1)})


@pytest.mark.parametrize("ahead", [0.0, 0.05, 1.0])
def test_a_class_whose_rows_see_ahead_is_refused_by_what_it_answers(ahead: float) -> None:
    begun = Begun(SeesAhead(ahead=ahead), "cache", None, ())
    if not ahead:
        assert goes_on_with_several(begun, 97, torch.device("cpu"))
        return
    with pytest.raises(UnsupportedModelError, match="by what follows it"):
        goes_on_with_several(begun, 97, torch.device("cpu"))


def test_a_busy_machine_does_not_change_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("recurrent_gemma", **sizes_of("recurrent_gemma")).to("meta")
    found = []
    for slower in (0.0, 0.9):
        clock = accumulate(chain([0.0, 3.0], repeat(3.0 + slower)))  # seconds of a pass
        for name in ("perf_counter", "thread_time"):
            monkeypatch.setattr(time, name, partial(next, clock))
        found.append(measured(model, model.model, 512, "", has_limit=True).spec)
    busy, idle = found
    assert busy.pass_bytes == pytest.approx(idle.pass_bytes, abs=1e-9)
    assert replace(busy, pass_bytes=idle.pass_bytes) == idle
