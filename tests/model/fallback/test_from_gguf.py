"""GGUF files of classes that transformers' modules run, as llama.cpp's converter makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from support.gguf.gguf_fallbacks import MODELS, write_file
from support.models.causal_models import random_model
from support.models.native_models import LIBRARY
from support.models.teacher_forcing import logits_of

from appliance.errors import ModelError
from appliance.gguf import GGUFFile
from appliance.kernels.backend import CPU
from appliance.kernels.cpu.engine import NativeEngine
from appliance.model.fallback.loader import load_fallback
from appliance.model.fallback.operations import LibraryOperations, TorchOperations
from appliance.model.source import open_model
from appliance.quant.run.refusals import refuse_unsaid

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.model.fallback.operations import Operations

CUT = [20, 1, 1, 3, 14, 1, 5]
SIZES = {"vocab_size": 97, "num_hidden_layers": 3, "max_position_embeddings": 128}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def made(label: str) -> Any:
    model_type, settings = MODELS[label]
    torch.manual_seed(4)
    model = random_model(model_type, "eager", **SIZES | ENDS | settings).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif not any(part in name for part in ("A_log", "dt_")):
                parameter.normal_(std=0.3)
    return model


def expected(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    assert float(logits.std()) > 0.2
    return logits


def in_library() -> Operations:
    return LibraryOperations(NativeEngine(LIBRARY, 1), torch.float32)


def in_torch() -> Operations:
    return TorchOperations(CPU, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("label", MODELS)
def test_a_file_answers_as_the_checkpoint_it_was_made_from(
    label: str, token_ids: list[int], tmp_path: Path
) -> None:
    model = made(label)
    source = open_model(write_file(tmp_path / "model.gguf", label, model))
    wanted = expected(model, token_ids)
    tolerance = 1e-4 * max(1.0, float(wanted.std()))
    for operations in (in_library(), in_torch()):
        decoder = load_fallback(source, operations, torch.float32)
        for chunks in (None, CUT):
            found = logits_of(decoder, token_ids, chunks=chunks)
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)


def pack_rows(name: str, data: Any) -> Any:
    """Store what a quantizer of llama.cpp packs in 8 bits."""
    kept = ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "altup", "token_embd")
    fits = data.ndim > 1 and data.shape[-1] % 32 == 0
    return gguf.GGMLQuantizationType.Q8_0 if fits and not any(k in name for k in kept) else None


@pytest.mark.parametrize("label", MODELS)
def test_packed_matrices_keep_their_codes(label: str, token_ids: list[int], tmp_path: Path) -> None:
    """The logits equal those of a model with gguf's own dequantized numbers."""
    model = made(label)
    path = write_file(tmp_path / "packed.gguf", label, model, pack_rows)
    source = open_model(path)
    file, rounded = (
        GGUFFile(path),
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors},
    )
    packed = {s.name for s in source.slots() if source.weights.packed_bits(s.name) == 8}
    assert len(packed) == sum(file.type_name(name) == "Q8_0" for name in file.tensor_names())
    for name in packed:
        tensor = rounded[source.weights.usual_name(name)]  # type: ignore[attr-defined]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        ours: Any = source.weights.load(name)
        torch.testing.assert_close(ours.dequantize(), values, atol=0, rtol=0)
    found = logits_of(load_fallback(source, in_torch(), torch.float32), token_ids)
    wanted = expected(model, token_ids)
    assert 0 < float((found - wanted).abs().mean()) < 0.1 * float(wanted.std())


REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "missing-numbers": ("apertus", {".xielu.beta": None}, "xielu.beta is None, .* 3 numbers"),
    "too-few-numbers": ("apertus", {".xielu.eps": [0.0] * 2}, "xielu.eps .* must be 3 numbers"),
    "no-numbers": ("apertus", {".xielu.eps": ["a", "b", "c"]}, "xielu.eps .* must be 3 numbers"),
    "sparsity": ("gemma3n", {"activation_sparsity_scale": [0.0]}, "activation_sparsity_scale"),
    "streams": ("gemma3n", {"altup.num_inputs": 3}, r"blk\.0\.altup_\w+\.weight has shape"),
    "layers": ("gemma3n", {"block_count": 8}, "feed_forward_length .* list of 8"),
    "state": ("falcon-h1", {"ssm.state_size": 48}, r"ssm_\w+\.weight has shape"),
    "unknown": ("falcon-h1", {"attention.sinks": 3}, "attention.sinks = 3 is not supported"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_file_that_does_not_fit_is_refused_by_its_own_names(case: str, tmp_path: Path) -> None:
    label, changes, said = REFUSALS[case]
    path = write_file(tmp_path / "model.gguf", label, made(label), None, **changes)
    with pytest.raises(ModelError, match=said):
        open_model(path)


@pytest.mark.parametrize("name", ["blk.1.ffn_gate.weight", "blk.3.ffn_up.weight", "other.weight"])
def test_a_tensor_without_a_place_is_refused_by_name(name: str, tmp_path: Path) -> None:
    extra = {name: torch.zeros(96, 64)}
    path = write_file(tmp_path / "model.gguf", "apertus", made("apertus"), extra=extra)
    with pytest.raises(ModelError, match=f"tensor {name} has no place"):
        open_model(path)


@pytest.mark.parametrize("label", MODELS)
def test_a_folder_of_a_file_is_the_same_model_to_transformers(
    label: str, token_ids: list[int], tmp_path: Path
) -> None:
    """`quantize` writes so: the file's settings, and the tensors under their own names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = made(label)
    source = open_model(write_file(tmp_path / "model.gguf", label, model))
    refuse_unsaid(source)
    folder = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.config)).eval().float()
    tensors: Any = {slot.name: source.weights.load(slot.name) for slot in source.slots()}
    left, unknown = folder.load_state_dict(tensors, strict=False)
    assert not unknown
    assert set(left) <= {"lm_head.weight"}
    wanted = expected(model, token_ids)
    torch.testing.assert_close(expected(folder, token_ids), wanted, atol=1e-4, rtol=1e-4)
