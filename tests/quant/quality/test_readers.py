"""transformers loads every form that we write, unless we list the form as not read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.causal_models import random_model, spread_weights
from support.models.native_models import LIBRARY
from support.models.teacher_forcing import logits_of
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from appliance.docs import read
from appliance.kernels.backend import REFERENCE
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.weights.weight import dense
from appliance.model.fallback.loader import load_fallback
from appliance.model.fallback.operations import LibraryOperations
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.quality.readers import Form, forms_of, readers_of
from appliance.quant.run.options import (
    Method,
    QuantizeOptions,
    ResultReader,
    choose_scheme,
    read_asked,
)
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.run.result_reader import Words
from appliance.quant.text.calibration import Calibration, CalibrationText

pytestmark = pytest.mark.filterwarnings("ignore")  # a warning of transformers is no refusal
TOKENS = [5, 6, 7, 8, 90, 33, 2, 1]
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TIED = {"tie_word_embeddings": True}
BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "num_key_value_heads": 4}
ODD = {"hidden_size": 96, "intermediate_size": 160}  # 64 divides neither
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "num_key_value_heads": 4,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", TIED),
    "blocks": ("llama", BLOCKS),
    "odd": ("llama", ODD),
    "gemma3": ("gemma3_text", TIED),
    "phi3": ("phi3", {}),
    "lfm2": ("lfm2", {}),
    "helium": ("helium", {}),  # executed by transformers' modules
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek": ("deepseek_v3", LATENT),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
WORDS: dict[str, Any] = {"method": Method.RTN, "bits": None, "group_size": None, "symmetric": True}
ZEROS = {"symmetric": False}
FP8 = {"method": Method.FP8}
# Model, the command's arguments, bits of the ends, and the expected forms.
CASES: list[tuple[str, dict[str, Any], dict[str, int], set[Form]]] = [
    *(("llama", {"bits": bits}, {}, set()) for bits in (4, 8)),
    *(("llama", {"group_size": size}, {}, set()) for size in ("32", "128", "channel")),
    ("llama", {"bits": 3}, {}, {Form.THREE_BITS}),
    ("llama", {"bits": 3} | ZEROS, {}, {Form.THREE_BITS}),
    *(("llama", {"group_size": size} | ZEROS, {}, set()) for size in ("32", "64", "channel")),
    *(("llama", {"method": Method.INT8, "symmetric": sym}, {}, set()) for sym in (True, False)),
    ("llama", {"group_size": "128"} | ZEROS, {}, {Form.SEVERAL}),
    ("llama", {}, {"head": 8}, {Form.HEAD}),
    ("llama", ZEROS, {"head": 8}, {Form.HEAD, Form.SEVERAL}),
    ("llama", {}, {"embedding": 8}, {Form.EMBEDDING}),
    ("llama", FP8, {}, set()),
    ("llama", FP8 | {"group_size": "block"}, {}, set()),
    ("blocks", FP8 | {"group_size": "block"}, {}, set()),
    ("tied", {}, {}, set()),
    ("tied", ZEROS, {}, set()),
    ("tied", {}, {"head": 8}, {Form.EMBEDDING}),
    ("odd", {}, {}, set()),
    ("odd", ZEROS, {}, {Form.SEVERAL}),
    ("odd", ZEROS | {"group_size": "32"}, {}, set()),
    *((name, {}, {}, set()) for name in ("gemma3", "phi3", "lfm2", "helium")),
    *((name, ZEROS, {}, set()) for name in ("gemma3", "phi3", "lfm2", "helium")),
    *((name, {}, {}, set()) for name in ("qwen3_moe", "mixtral", "deepseek")),
    *((name, FP8, {}, set()) for name in ("qwen3_moe", "mixtral", "deepseek")),
    *((name, ZEROS, {}, {Form.EXPERTS}) for name in ("qwen3_moe", "mixtral")),
    ("deepseek", ZEROS, {}, {Form.EXPERTS}),
    *((name, {}, {}, {Form.STACKED}) for name in ("gpt_oss", "granite")),
]


@dataclass(frozen=True, slots=True)
class GivenRows(CalibrationText):
    """Calibration rows that exist already."""

    given: Calibration | None = None

    def rows_of(
        self, model_path: Path, *, device: str = "cpu", max_ram: int | None = None
    ) -> Calibration:
        assert self.given is not None
        return self.given


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that writes one of `MODELS`, once."""
    folder = tmp_path_factory.mktemp("bases")

    @cache
    def write(name: str) -> Path:
        kind, settings = MODELS[name]
        torch.manual_seed(0)
        model = random_model(kind, **SIZES | settings)
        spread_weights(model)
        model.to(torch.bfloat16).save_pretrained(folder / name)
        return folder / name

    return write


def ours(path: Path) -> torch.Tensor:
    source = open_model(path)
    if source.fallback is not None:
        library = LibraryOperations(NativeEngine(LIBRARY, 1), torch.float32)
        return logits_of(load_fallback(source, library, torch.float32), TOKENS)
    decoder = load_decoder(source, REFERENCE, torch.device("cpu"), torch.float32)
    return logits_of(decoder, TOKENS)


def theirs(path: Path, settings: Any = None) -> torch.Tensor:
    """transformers' logits of a folder, loaded with default settings or with given ones."""
    given = {} if settings is None else {"quantization_config": settings}
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **given)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def distance(path: Path, settings: Any = None) -> float:
    """Return the distance of transformers' logits from ours; infinite if it cannot load them."""
    try:
        found = theirs(path, settings)
    except Exception:  # it raises any kind of error
        return torch.inf
    return float((found - ours(path)).norm() / found.norm())


@pytest.mark.parametrize(("name", "words", "ends", "forms"), CASES)
def test_transformers_reads_what_is_said_to_be_read(
    name: str,
    words: dict[str, Any],
    ends: dict[str, int],
    forms: set[Form],
    base: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    asked = read_asked(**WORDS | words)
    options = QuantizeOptions(asked.scheme, asked.method, **ends)  # type: ignore[arg-type]
    report = quantize_model(base(name), tmp_path / "out", options)
    assert {note for note in report.notes if "not read" in note} == {form.note for form in forms}
    is_read = all(form.in_transformers for form in forms)
    listed = " ".join(readers_of(open_model(report.out)))
    assert ("transformers" in listed) == is_read
    assert ("vLLM" in listed) == all(form.in_vllm for form in forms)
    if not is_read:
        assert distance(report.out) > 0.3, "it is read now: say so in Form"
        return
    if asked.method is Method.FP8:  # by default transformers rounds activations as well
        assert distance(report.out) < 0.5
        assert distance(report.out, CompressedTensorsConfig(dequantize=True)) < 0.02
    else:  # transformers dequantizes to 16-bit weights
        assert distance(report.out) < 0.02


@pytest.mark.parametrize("method", [Method.MXFP4, Method.NVFP4])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_transformers_reads_4_bit_floats_in_the_type_of_the_folder(
    name: str, method: Method, base: Callable[[str], Path], tmp_path: Path
) -> None:
    random = torch.Generator().manual_seed(1)
    rows = Calibration(torch.randint(0, 96, (4, 32), generator=random), "random", "1", 0)
    scheme = choose_scheme(method, None, None, symmetric=True)
    options = QuantizeOptions(scheme, method, GivenRows(given=rows))
    out = quantize_model(base(name), tmp_path / "out", options).out
    read: Any = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    read(torch.tensor([TOKENS]))  # decompresses
    weights, found = open_model(out).weights, dict(read.named_parameters())
    coded = [slot.name for slot in open_model(out).slots() if slot.is_linear]
    assert len(coded) == 14
    for part in coded:
        expected = dense(weights.load(part), torch.float32)
        torch.testing.assert_close(found[part].float(), expected, rtol=2**-7, atol=0)
    listed = readers_of(open_model(out))
    assert {"vLLM", "transformers with compressed-tensors"} <= set(listed)


@pytest.mark.parametrize("reader", [ResultReader.TRANSFORMERS, ResultReader.VLLM])
def test_what_is_made_for_a_reader_is_read_there(
    reader: ResultReader, base: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in ("llama", "qwen3_moe"):
        asked, form = Words(reader=reader, fast=True).read()
        options = QuantizeOptions(
            asked.scheme, asked.method, open=asked.open, format=form, reader=reader
        )
        report = quantize_model(base(name), tmp_path / name, options)
        listed = " ".join(readers_of(open_model(report.out))).lower()
        assert reader.value in listed
        if reader is ResultReader.TRANSFORMERS:
            assert distance(report.out) < 0.02


def test_linears_that_vllm_computes_as_one_are_told_apart(base: Callable[[str], Path]) -> None:
    source = open_model(base("llama"))
    scheme = read_asked(**WORDS).scheme
    schemes = {slot.name: scheme for slot in source.slots() if slot.is_linear}
    assert forms_of(source, source.slots(), schemes) == [Form.ALIKE]
    other = schemes | {"model.layers.1.self_attn.k_proj.weight": WeightScheme(8)}
    assert forms_of(source, source.slots(), other) == [Form.ALIKE, Form.UNLIKE]


def test_the_page_has_the_same_table() -> None:
    text = read("quantize").text
    for form in Form:
        cells = ["yes" if able else "no" for able in (form.in_transformers, form.in_vllm)]
        assert f"| {form.words} | {' | '.join(cells)} |" in text, form
