"""The files that a GGUF file contributes to the folder of its quantized form, besides weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.quant.run.tokenizer_files import write_tokenizer_files
from appliance.tokenizer import Tokenizer

pytestmark = pytest.mark.model


def test_recommended_sampling_goes_along_so_that_it_is_used_again(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    write_tokenizer_files(smollm2_gguf, tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written["do_sample"] is True, "or transformers would ignore the rest"
    values = {"temperature": 0.2, "top_p": 0.9}
    assert values.items() <= written.items()
    sampling = Tokenizer.from_path(tmp_path).sampling
    assert (sampling.values, sampling.source) == (values, "generation_config.json")
