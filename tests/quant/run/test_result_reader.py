"""The program that reads the result, or haste, chooses method and form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.expert_models import save_experts

from appliance.errors import ConfigError, QuantizeError
from appliance.model.source import open_model
from appliance.quant.formats.ggml_forms import BlockScheme
from appliance.quant.formats.scheme import TrellisScheme, WeightScheme
from appliance.quant.run.opening import choose_open
from appliance.quant.run.options import Method, QuantizeOptions, ResultReader, WeightFormat
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.run.result_reader import Words, usual_out
from appliance.quant.run.run_time import measured_rate, run_time
from appliance.quant.text.calibration import CalibrationText

MakeFolder = Callable[..., Path]


def options(**words: Any) -> QuantizeOptions:
    """The options of a command with these words."""
    if "reader" in words:
        words["reader"] = ResultReader.parse(words["reader"])
    asked, form = Words(**words).read()
    return QuantizeOptions(
        asked.scheme, asked.method, open=asked.open, file_type=asked.file_type, format=form,
        reader=words.get("reader"),
    )  # fmt: skip


@pytest.fixture
def wide(make_llama: MakeFolder, model: Path) -> Path:
    """A model whose widths 64 divides."""
    folder = make_llama("wide", hidden_size=128, num_attention_heads=4)
    (folder / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    return folder


@pytest.mark.parametrize(
    ("words", "form", "method", "scheme"),
    [
        ({"reader": "appliance"}, WeightFormat.TRELLIS, Method.TRELLIS, TrellisScheme(4)),
        (
            {"reader": "appliance", "bits": 3},
            WeightFormat.TRELLIS,
            Method.TRELLIS,
            TrellisScheme(3),
        ),
        ({"reader": "llama.cpp"}, WeightFormat.GGUF, Method.GPTQ, BlockScheme("Q4_K")),
        ({"reader": "llama.cpp", "fast": True}, WeightFormat.GGUF, Method.RTN, BlockScheme("Q4_K")),
        *(
            (
                {"reader": reader},
                WeightFormat.COMPRESSED_TENSORS,
                Method.AWQ_GPTQ,
                WeightScheme(4, 64, symmetric=False),
            )
            for reader in ("transformers", "vllm")
        ),
        (
            {"fast": True},
            WeightFormat.COMPRESSED_TENSORS,
            Method.RTN,
            WeightScheme(4, 64, symmetric=False),
        ),
        (
            {"reader": "appliance", "fast": True},
            WeightFormat.COMPRESSED_TENSORS,
            Method.RTN,
            WeightScheme(4, 64, symmetric=False),
        ),
    ],
)
def test_a_reader_gets_the_form_of_least_loss_that_it_reads(
    wide: Path, words: dict[str, Any], form: WeightFormat, method: Method, scheme: object
) -> None:
    found, notes = choose_open(open_model(wide), options(**words))
    assert (found.format, found.method, found.scheme) == (form, method, scheme)
    assert notes == ()


def test_widths_that_no_trellis_has_get_another_format(model: Path) -> None:
    found, (note,) = choose_open(open_model(model), options(reader="appliance"))
    assert found.format is WeightFormat.COMPRESSED_TENSORS
    assert found.method is Method.AWQ_GPTQ
    assert "which blocks of 64 do not divide" in note
    with pytest.raises(QuantizeError, match="the trellis format is not possible"):
        choose_open(open_model(model), options(reader="appliance", bits=2))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"fast": True, "method": Method.GPTQ}, "--method gptq"),
        ({"fast": True, "text": ("--calibration",)}, "--calibration"),
        ({"fast": True, "text": ("--mixed",)}, "--mixed"),
        ({"fast": True, "format": WeightFormat.TRELLIS}, "--format trellis"),
        (
            {"reader": "llama.cpp", "format": WeightFormat.AWQ},
            "llama.cpp does not read --format awq",
        ),
        ({"reader": "vllm", "file_type": "Q4_K_M"}, "vllm does not read --type Q4_K_M"),
        ({"reader": "vllm", "method": Method.TRELLIS}, "vllm does not read --method trellis"),
        ({"reader": "transformers", "format": WeightFormat.GPTQ}, "--format gptq"),
        (
            {"reader": "appliance", "format": WeightFormat.TRELLIS, "group_size": "64"},
            "--group-size",
        ),
        ({"reader": "ollama"}, "reader 'ollama' is not known; supported: appliance, llama.cpp"),
    ],
)
def test_words_that_contradict_each_other_are_refused_by_name(
    words: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        options(**words)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"reader": "vllm", "bits": 3}, "vLLM does not read 3 bits"),
        ({"reader": "transformers", "group_size": "64", "symmetric": False}, "several bits or"),
    ],
)
def test_a_form_that_the_reader_does_not_read_is_refused(
    model: Path, tmp_path: Path, words: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        quantize_model(model, tmp_path / "out", options(**words))
    assert said in str(refused.value)
    assert "--for" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_experts_are_made_for_a_reader_as_it_reads_them(tmp_path: Path) -> None:
    save_experts("mixtral", tmp_path / "model")
    found, _ = choose_open(open_model(tmp_path / "model"), options(reader="vllm"))
    assert isinstance(found.scheme, WeightScheme)
    assert found.scheme.symmetric


def test_a_result_is_named_after_its_model_and_bits() -> None:
    assert usual_out("Qwen/Qwen3-8B", Path("x"), options()) == Path("x/Qwen3-8B-4bit")
    file = options(reader="llama.cpp")
    assert usual_out("SmolLM2.Q4_1", Path(), file) == Path("SmolLM2-Q4_K_M")
    assert usual_out("phi-3.5-mini", Path(), options(bits=8)) == Path("phi-3.5-mini-8bit")


def test_the_time_of_a_run_grows_with_its_work(wide: Path) -> None:
    source = open_model(wide)
    rate = measured_rate(torch.device("cpu"))
    assert rate > 1e8
    found = {
        method: run_time(source, QuantizeOptions(WeightScheme(), method, card_tokens=64), rate)
        for method in Method
        if method is not Method.OPEN
    }
    assert all(time.card > 0 for time in found.values())
    without_text = [method for method in found if not method.needs_text]
    assert all(found[method].writing == 0 for method in without_text)
    assert found[Method.RTN].weights < found[Method.GPTQ].weights < found[Method.AWQ_GPTQ].weights
    assert found[Method.TRELLIS].weights > found[Method.GPTQ].weights
    few = CalibrationText(num_tokens=512)
    less = run_time(source, QuantizeOptions(WeightScheme(), Method.GPTQ, few), rate)
    assert less.weights < found[Method.GPTQ].weights
    assert less.writing < found[Method.GPTQ].writing
    assert run_time(source, QuantizeOptions(WeightScheme(), Method.GPTQ), 2 * rate).seconds < (
        run_time(source, QuantizeOptions(WeightScheme(), Method.GPTQ), rate).seconds
    )
