"""The choices that a command leaves open follow from the model, the memory and the readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.causal_models import random_model
from support.models.expert_models import save_experts

from appliance.errors import MemoryPlanError
from appliance.model.source import open_model
from appliance.progress.quantize_events import QuantizeEvent, UnitFinished
from appliance.quant.formats.ggml_forms import BlockScheme
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run import opening
from appliance.quant.run.opening import choose_open
from appliance.quant.run.options import Method, QuantizeOptions, WeightFormat, read_asked
from appliance.quant.run.pipeline import dry_run, quantize_model
from appliance.quant.text.calibration import CalibrationText

MakeFolder = Callable[..., Path]
BEST = Method.AWQ_GPTQ


def left_open(
    *, bits: int | None = None, size: str | None = None, **changes: Any
) -> QuantizeOptions:
    """The options that a command without --method gives."""
    form = changes.get("format", WeightFormat.COMPRESSED_TENSORS)
    named = {name: changes.pop(name, None) for name in ("symmetric", "file_type")}
    asked = read_asked(None, bits, size, format=form, **named)
    return QuantizeOptions(
        asked.scheme, asked.method, open=asked.open, file_type=asked.file_type, **changes
    )


@pytest.mark.parametrize(
    ("settings", "asked", "scheme"),
    [
        ({"hidden_size": 128, "num_attention_heads": 4}, {}, WeightScheme(4, 64, symmetric=False)),
        ({}, {}, WeightScheme(4, 32, symmetric=False)),  # 64 does not divide 96
        ({}, {"size": "64"}, WeightScheme(4, 64)),  # groups of several sizes, hence no zero points
        ({}, {"bits": 3}, WeightScheme(3, 32, symmetric=False)),
        ({}, {"symmetric": True}, WeightScheme(4, 32)),
        ({}, {"size": "64", "symmetric": False}, WeightScheme(4, 64, symmetric=False)),
        ({}, {"mixed": 4.5}, WeightScheme(4, 32)),
        ({}, {"head": 8}, WeightScheme(4, 32)),
        ({"tie_word_embeddings": True}, {"head": 8}, WeightScheme(4, 32, symmetric=False)),
        ({}, {"format": WeightFormat.GPTQ}, WeightScheme(4, 32)),
        ({}, {"format": WeightFormat.AWQ}, WeightScheme(4, 32, symmetric=False)),
        ({}, {"format": WeightFormat.GGUF}, BlockScheme("Q4_K")),
        ({}, {"format": WeightFormat.GGUF, "bits": 3}, BlockScheme("Q3_K")),
        ({}, {"format": WeightFormat.GGUF, "file_type": "iq4_xs"}, BlockScheme("IQ4_XS")),
    ],
)
def test_zero_points_and_groups_are_those_of_least_loss_that_others_read(
    make_llama: MakeFolder,
    model: Path,
    settings: dict[str, Any],
    asked: dict[str, Any],
    scheme: object,
) -> None:
    folder = make_llama("chosen", **settings)
    (folder / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    found, notes = choose_open(open_model(folder), left_open(**asked))
    best = Method.GPTQ if found.format is WeightFormat.GGUF else BEST
    assert (found.method, found.scheme, found.open) == (best, scheme, frozenset())
    assert notes == ()


def test_eight_bits_need_no_text() -> None:
    assert read_asked(None, 8, None, symmetric=None).method is Method.INT8


def test_experts_have_no_zero_points(tmp_path: Path) -> None:
    save_experts("mixtral", tmp_path)
    found, _ = choose_open(open_model(tmp_path), left_open())
    assert isinstance(found.scheme, WeightScheme)
    assert found.scheme.symmetric


def test_a_model_that_cannot_be_calibrated_is_rounded_and_told(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 60,
        "head_dim": 16,
    }
    model = random_model("helium", num_attention_heads=4, num_key_value_heads=2, **sizes)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    asked = left_open(card_tokens=64)
    report = quantize_model(tmp_path / "model", tmp_path / "out", asked)
    assert (report.method, report.card_tokens) == ("rtn", 0)
    assert any("--method rtn, because transformers' modules" in note for note in report.notes)
    assert any(note.startswith("no quality card: ") for note in report.notes)


def test_a_model_without_a_tokenizer_is_rounded(make_llama: MakeFolder) -> None:
    found, (note,) = choose_open(open_model(make_llama()), left_open())
    assert found.method is Method.RTN
    assert "text cannot be read for the model" in note


def test_the_method_is_the_best_that_fits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_model(model)
    for too_much, expected in ((1, Method.GPTQ), (2, Method.AWQ), (3, Method.RTN)):
        refused = opening.BY_LOSS[:too_much]

        def plan(*given: Any, refused: tuple[Method, ...] = refused) -> None:
            if given[2].method in refused:
                raise MemoryPlanError("7 MiB are needed")

        monkeypatch.setattr(opening, "plan_memory", plan)
        found, (note,) = choose_open(source, left_open())
        assert found.method is expected
        assert "7 MiB are needed" in note


def test_a_ceiling_of_memory_decides_as_well(model: Path, tmp_path: Path, text: Path) -> None:
    asked = left_open(text=CalibrationText(text, num_tokens=480, row_tokens=48))
    with pytest.raises(MemoryPlanError, match="may be used"):  # not even rounding fits
        dry_run(model, tmp_path / "out", replace(asked, max_ram=1 << 20))


def test_an_unfinished_run_goes_on_with_less_memory(
    model: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = left_open(text=CalibrationText(text, num_tokens=480, row_tokens=48))

    def stop(event: QuantizeEvent) -> None:
        if isinstance(event, UnitFinished) and event.name == "layer 0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(model, tmp_path / "out", asked, stop)

    def refuse(*_: Any) -> None:
        raise MemoryPlanError("7 MiB are needed")

    monkeypatch.setattr(opening, "plan_memory", refuse)
    assert quantize_model(model, tmp_path / "out", asked).method == BEST.value
