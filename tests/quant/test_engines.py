"""Other quantizers are called if installed; otherwise one clear line says so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from appliance.errors import ConfigError, QuantizeError
from appliance.quant import engines
from appliance.quant.engines import AutoAWQ, Optimum, quantize_by_engine
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run.options import Method, QuantizeLibrary, QuantizeOptions, WeightFormat
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import Calibration, CalibrationText

MakeFolder = Callable[..., Path]
ASYMMETRIC = WeightScheme(4, 32, symmetric=False)
AWQ = QuantizeOptions(ASYMMETRIC, engine=QuantizeLibrary.AUTOAWQ)
GPTQ = QuantizeOptions(WeightScheme(4, 32), engine=QuantizeLibrary.OPTIMUM)


class FakeLibrary:
    """Does with our own code what the library would do, or fails."""

    tried = "tried: never"

    def __init__(self, real: type[engines.Library], error: Exception | None = None) -> None:
        self.method, self.format = real.method, real.format
        self.error = error
        self.rows: Tensor | None = None

    def installed(self) -> str:
        return "1.2.3"

    def quantize(self, model_path: Path, out: Path, scheme: WeightScheme, rows: Tensor) -> None:
        self.rows = rows
        options = QuantizeOptions(scheme, format=WeightFormat.AWQ)
        made = out.parent / "made"
        quantize_model(model_path, made, options)
        for name in ("config.json", "model.safetensors"):
            (made / name).rename(out / name)
        if self.error is not None:
            raise self.error


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Calibration rows that need no tokenizer."""
    rows = torch.arange(24).view(2, 12)
    calibration = Calibration(rows, "numbers", "0", 0)
    monkeypatch.setattr(CalibrationText, "rows_of", lambda self, model_path: calibration)
    return rows


@pytest.mark.parametrize(
    ("options", "missing", "complaint"),
    [
        (AWQ, "awq", r"--engine autoawq cannot be imported.*0\.2\.9.*--method awq --format awq"),
        (GPTQ, "gptqmodel", r"--engine optimum cannot.*gptqmodel 7.*--method gptq --format gptq"),
    ],
    ids=["autoawq", "optimum"],
)
def test_a_library_that_is_not_there_is_one_line_that_says_what_to_do(
    options: QuantizeOptions,
    missing: str,
    complaint: str,
    make_llama: MakeFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # importing it fails
    with pytest.raises(QuantizeError, match=complaint) as caught:
        quantize_model(make_llama(), tmp_path / "out", options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_what_the_library_wrote_becomes_the_folder(
    make_llama: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Tensor
) -> None:
    library = FakeLibrary(AutoAWQ)
    monkeypatch.setitem(engines.LIBRARIES, QuantizeLibrary.AUTOAWQ, library)
    report = quantize_by_engine(make_llama(), tmp_path / "out", AWQ)
    assert library.rows is rows
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert report.num_quantized == 14
    assert report.method == "awq"
    assert report.notes == ("quantized by autoawq 1.2.3",)
    assert 4.5 < report.quantized_bits_per_weight < 5


def test_a_library_that_fails_leaves_nothing_and_is_named(
    make_llama: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Tensor
) -> None:
    assert len(rows)
    library = FakeLibrary(AutoAWQ, NameError("QuantizeConfig"))
    monkeypatch.setitem(engines.LIBRARIES, QuantizeLibrary.AUTOAWQ, library)
    with pytest.raises(QuantizeError, match=r"autoawq 1\.2\.3 failed with NameError: QuantizeCon"):
        quantize_by_engine(make_llama(), tmp_path / "out", AWQ)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (replace(AWQ, method=Method.GPTQ), "does --method awq, not gptq"),
        (replace(AWQ, format=WeightFormat.GPTQ), "writes awq folders, not gptq"),
        (replace(AWQ, scheme=WeightScheme(4, 32)), "--bits 4 --no-symmetric"),
        (replace(GPTQ, method=Method.AWQ), "does --method gptq, not awq"),
    ],
)
def test_what_a_library_does_not_do_is_refused_first(
    options: QuantizeOptions, complaint: str, make_llama: MakeFolder, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        quantize_by_engine(make_llama(), tmp_path / "out", options)


def test_a_gguf_file_is_not_for_other_libraries_and_a_missing_one_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(QuantizeError, match="optimum cannot be imported"):
        quantize_by_engine(path, tmp_path / "out", GPTQ)
    monkeypatch.setitem(engines.LIBRARIES, QuantizeLibrary.OPTIMUM, FakeLibrary(Optimum))
    with pytest.raises(ConfigError, match=r"no GGUF files; use --method gptq --format gptq"):
        quantize_by_engine(path, tmp_path / "out", GPTQ)


def test_engines_are_those_of_the_extras() -> None:
    assert set(engines.LIBRARIES) == set(QuantizeLibrary) - {QuantizeLibrary.APPLIANCE}
    with pytest.raises(ConfigError, match="supported: appliance, autoawq, optimum"):
        QuantizeLibrary.parse("llamacpp")
