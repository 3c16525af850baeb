"""Quantizing a model that transformers' modules execute: methods without text, others refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.echo.byte_tokenizer import save_byte_tokenizer
from support.models.fallback_models import FALLBACKS
from support.models.native_models import LIBRARY
from support.models.sure_models import write_sure_model
from support.models.teacher_forcing import logits_of

from appliance.errors import QuantizeError
from appliance.kernels.cpu.engine import NativeEngine
from appliance.model import source
from appliance.model.fallback.loader import load_fallback
from appliance.model.fallback.operations import LibraryOperations
from appliance.model.source import open_model
from appliance.quant.quality.make_card import make_card
from appliance.quant.run.options import Method, QuantizeOptions, choose_scheme
from appliance.quant.run.pipeline import quantize_model

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def _no_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide our families: Hunyuan with experts has one by now."""
    monkeypatch.setattr(source, "find_family", lambda config: None)


@pytest.fixture(scope="module", params=["stablelm", "hunyuan-experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, settings = FALLBACKS[request.param]
    made: Path = tmp_path_factory.mktemp(request.param)
    write_sure_model(model_type, made, **SIZES | settings)
    save_byte_tokenizer(made)
    return made


def options(method: Method, **others: Any) -> QuantizeOptions:
    scheme = choose_scheme(method, None, None, symmetric=True)
    return QuantizeOptions(scheme=scheme, method=method, card_tokens=0, **others)


def logits(folder: Path) -> tuple[torch.Tensor, str]:
    operations = LibraryOperations(NativeEngine(LIBRARY, 1), torch.float32)
    decoder = load_fallback(open_model(folder), operations, torch.float32)
    ids = torch.randint(3, 97, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    return logits_of(decoder, ids), decoder.weight_format


def test_eight_bits_are_packed_and_answer_nearly_as_before(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "int8"
    quantize_model(folder, out, options(Method.INT8))
    before, _ = logits(folder)
    after, format = logits(out)
    assert format.startswith("8 bits")
    # On average: a row whose experts change with the rounding gives other logits.
    assert 0 < float((after - before).abs().mean()) < 0.05 * float(before.std())
    packed = [slot.name for slot in open_model(out).slots() if slot.is_linear]
    weights = open_model(out).weights
    assert packed
    assert all(weights.packed_bits(name) == 8 for name in packed)


@pytest.mark.parametrize("method", [Method.GPTQ, Method.AWQ])
def test_what_reads_text_is_refused_by_name(folder: Path, method: Method, tmp_path: Path) -> None:
    wanted = f"no --method {method.value} of it: use --method rtn, int8 or fp8"
    with pytest.raises(QuantizeError, match=wanted):
        quantize_model(folder, tmp_path / "out", options(method))
    assert not (tmp_path / "out").exists()


def test_there_is_no_card_of_it(folder: Path) -> None:
    with pytest.raises(QuantizeError, match="so there is no quality card of it"):
        make_card(folder)
