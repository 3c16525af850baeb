"""GGUF files whose types are kept without conversion: logits, memory, the plan and its text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from support.gguf.ggml_models import write_llama
from support.models.native_models import native
from support.models.teacher_forcing import logits_of

from appliance.gguf import read_header
from appliance.gguf.types import UNPACKED_TYPES, held_bytes
from appliance.kernels.backend import CPU, REFERENCE
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.ggml_types import GGML_TYPES
from appliance.model.loader import load_decoder
from appliance.model.reader import ModelReader
from appliance.model.size import estimate_native_bytes, estimate_weight_bytes
from appliance.model.source import open_model

if TYPE_CHECKING:
    from pathlib import Path

CPU_DEVICE = torch.device("cpu")
ALL = (*GGML_TYPES, "TQ1_0", "TQ2_0", "MXFP4", "Q8_0")


@pytest.fixture(scope="module")
def every_type(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("held") / "every.gguf", ALL)


def divergence(path: Path, token_ids: list[int]) -> float:
    """Mean KL divergence of the library's predictions from those of exact weights in float32."""
    exact = load_decoder(open_model(path), REFERENCE, CPU_DEVICE, torch.float32)
    expected = logits_of(exact, token_ids).log_softmax(-1)
    assert expected.std() > 0.5  # the logits vary
    found = logits_of(native(path), token_ids).log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def test_logits_are_as_close_to_exact_weights_as_those_of_q4_0(
    every_type: Path, token_ids: list[int], tmp_path: Path
) -> None:
    q4_0 = divergence(write_llama(tmp_path / "q4_0.gguf", ["Q4_0"]), token_ids)
    assert divergence(every_type, token_ids) < 1.5 * q4_0 < 0.01


def size_of(path: Path) -> float:
    """Bytes of a file's tensors in the forms in which their types are held."""
    tensors = read_header(path).tensors.values()
    return sum(held_bytes(info.type) * math.prod(info.shape) for info in tensors)


@pytest.mark.parametrize("name", UNPACKED_TYPES)
def test_unpacked_types_are_exact_too(tmp_path: Path, token_ids: list[int], name: str) -> None:
    path = write_llama(tmp_path / "model.gguf", [name])
    plain = write_llama(tmp_path / "plain.gguf", [name], plain=True)
    expected, found = (
        logits_of(load_decoder(open_model(one), REFERENCE, CPU_DEVICE, torch.float32), token_ids)
        for one in (plain, path)
    )
    assert torch.equal(found, expected)
    assert divergence(path, token_ids) < 0.01


def test_memory_is_that_of_the_held_types_and_of_the_plan(every_type: Path) -> None:
    stored = size_of(every_type)
    held = native(every_type).weight_bytes
    assert held == pytest.approx(stored, rel=0.03)
    assert held <= estimate_native_bytes(open_model(every_type), torch.float32) < 1.03 * stored


def test_formats_have_the_types_names(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf", ["Q4_K", "Q4_K", "Q6_K"])
    assert native(path).weight_format == "Q4_K + Q6_K, head Q4_K"
    decoder = load_decoder(open_model(path), CPU, CPU_DEVICE, torch.bfloat16)
    assert decoder.weight_format == "Q4_K (held as bf16) + Q6_K (held as bf16), head Q4_K"
    path = write_llama(tmp_path / "unpacked.gguf", ["IQ2_XS", "IQ3_S", "TQ2_0", "IQ1_M"])
    assert native(path).weight_format.startswith("IQ2_XS in 3 bits + ")
    assert "IQ3_S in 4 bits" in native(path).weight_format


def test_a_gpu_holds_the_types_of_the_file_and_the_format_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_model(write_llama(tmp_path / "model.gguf", ["Q4_K", "Q4_K", "Q6_K"]))
    cuda, real = torch.device("cuda"), torch.Tensor.to
    stay = lambda tensor, to, *more: tensor if to == cuda else real(tensor, to, *more)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "to", stay)
    reader = ModelReader(source, cuda, torch.bfloat16)
    reader.layer(0)
    head, _ = reader.embedding_and_head()
    assert isinstance(head, GgmlWeight)
    assert reader.weight_format() == "Q4_K + Q6_K, head Q4_K"


@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_of_a_gpu_has_the_bytes_of_the_file(tmp_path: Path, tied: bool) -> None:
    path = write_llama(tmp_path / "model.gguf", tuple(GGML_TYPES), tied=tied)
    stored = size_of(path)
    source, gpu = open_model(path), torch.device("cuda")
    planned = estimate_weight_bytes(source, gpu, torch.bfloat16)
    assert stored <= planned < 1.03 * stored
    dense = 4 * sum(math.prod(slot.shape) for slot in source.slots())
    assert estimate_weight_bytes(source, gpu, torch.float32) >= dense
