"""Models whose matrices are rounded to fewer bits at load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from support.models.fallback_models import FALLBACKS
from support.models.native_models import LIBRARY
from support.models.teacher_forcing import logits_of

from appliance.kernels.backend import CPU
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.weights.weight import dense
from appliance.model import source as source_module
from appliance.model.fallback.description import has_inputs_first
from appliance.model.fallback.loader import load_fallback
from appliance.model.fallback.operations import LibraryOperations, TorchOperations
from appliance.model.loader import load_decoder
from appliance.model.narrowed import narrowed
from appliance.model.native_loader import load_native
from appliance.model.source import open_model
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.source import ModelSource

CPU_DEVICE = torch.device("cpu")
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}


def at_eight(folder: Path) -> ModelSource:
    source = narrowed(open_model(folder), 8, 8)
    assert source is not None
    return source


def give_rounded(model: Any, source: ModelSource) -> int:
    """Put a source's packed matrices into transformers' model; return how many there are."""
    parameters, count = dict(model.named_parameters()), 0
    for slot in source.slots():
        if source.weights.packed_bits(slot.name) is None:
            continue
        matrix = dense(source.weights.load(slot.name), torch.float32)
        stack, _, number = slot.name.rpartition(".")
        if number.isdigit():
            parameters[stack].data[int(number)] = matrix
        elif has_inputs_first(model.get_submodule(stack)):
            parameters[slot.name].data.copy_(matrix.T)
        else:
            parameters[slot.name].data.copy_(matrix)
        count += 1
    return count


@pytest.mark.parametrize("bits", [8, 4])
def test_matrices_are_rounded_by_less_than_a_step_and_the_rest_is_as_it_was(
    bits: int, make_model: Callable[..., Any], save: Callable[[Any], Path]
) -> None:
    source = open_model(save(make_model("llama", **WIDE)))
    found = narrowed(source, bits, 8)
    assert found is not None
    for slot in source.slots():
        before = dense(source.weights.load(slot.name), torch.float32)
        after = found.weights.load(slot.name)
        is_table = slot.role in (Role.EMBEDDING, Role.HEAD)
        if not (slot.is_linear or is_table):
            assert torch.equal(dense(after, torch.float32), before), slot
            continue
        assert found.weights.packed_bits(slot.name) == (8 if is_table else bits)
        steps = 128 if is_table or bits == 8 else 8
        step = before.abs().amax() / steps
        error = (dense(after, torch.float32) - before).abs().max()
        assert 0 < error < 1.3 * step, slot
    assert any("are rounded to" in note for note in found.weights.notes())


def test_nothing_is_left_to_round_of_what_is_rounded(
    make_model: Callable[..., Any], save: Callable[[Any], Path]
) -> None:
    assert narrowed(at_eight(save(make_model("llama", **WIDE))), 8, 8) is None


def test_a_native_model_answers_as_one_of_the_rounded_weights(
    make_model: Callable[..., Any], save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    model = make_model("llama", **WIDE)
    source = at_eight(save(model))
    assert give_rounded(model, source) == 3 * 7 + 2
    with torch.no_grad():
        wanted = model(torch.tensor([token_ids])).logits[0]
    decoder = load_decoder(source, CPU, CPU_DEVICE, torch.float32)
    torch.testing.assert_close(logits_of(decoder, token_ids), wanted, atol=1e-4, rtol=1e-4)
    native = load_native(source, NativeEngine(LIBRARY, 1), torch.float32)
    error = (logits_of(native, token_ids) - wanted).abs().mean() / wanted.std()
    assert 0 < float(error) < 0.05  # activations are rounded to 8 bits there
    assert native.weight_format == "8 bits (a scale per row)"


@pytest.mark.parametrize("case", ["stablelm", "helium", "gpt2", "hunyuan-experts"])
def test_a_model_of_transformers_answers_as_one_of_the_rounded_weights(
    case: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPT-2 stores inputs first, and the experts are in one tensor."""
    monkeypatch.setattr(source_module, "find_family", lambda config: None)
    model_type, settings = FALLBACKS[case]
    model = make_model(model_type, **settings)
    folder = save(model)
    if case == "hunyuan-experts":
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    source = at_eight(folder)
    assert give_rounded(model, source) > 9
    with torch.no_grad():
        wanted = model(torch.tensor([token_ids])).logits[0]
    operations = TorchOperations(CPU, CPU_DEVICE, torch.float32)
    found = logits_of(load_fallback(source, operations, torch.float32), token_ids)
    torch.testing.assert_close(found, wanted, atol=1e-4 * max(1, float(wanted.std())), rtol=0)
    in_library = LibraryOperations(NativeEngine(LIBRARY, 1), torch.float32)
    decoder = load_fallback(source, in_library, torch.float32)
    error = (logits_of(decoder, token_ids) - wanted).abs().mean() / wanted.std()
    assert (
        0 < float(error) < (0.15 if case == "hunyuan-experts" else 0.05)
    )  # rows change their experts
    assert decoder.weight_format == "8 bits (a scale per row)"
