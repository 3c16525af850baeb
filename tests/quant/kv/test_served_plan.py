"""A folder quantized with a plan for its KV cache, served as it is; and costs of real caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.teacher_forcing import logits_of

from appliance.config import EngineConfig
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.kv_format import KVFormat
from appliance.model.kv import planned_kv
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.kv.calibrate import measure_kv
from appliance.quant.kv.even_keys import with_even_keys
from appliance.quant.quality.kv_caches import KV_FORMATS, NAMES
from appliance.quant.quality.make_card import EvaluationOptions, evaluate
from appliance.quant.run.options import QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText
from appliance.quant.text.held_out import HeldOutText
from appliance.tokenizer import Tokenizer


def answer(folder: Path, prompt: tuple[int, ...]) -> tuple[str, list[int]]:
    """Return the name of its KV cache's format, and 40 tokens."""
    config = EngineConfig(model=str(folder), dtype="float32", threads=1, max_num_seqs=2)
    engine = load_llm_engine(
        config, eos_token_ids=(), metadata=None, on_progress=lambda stage, done, total: None
    )
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    engine.submit(Request(request_id="a", prompt_token_ids=prompt, sampling=sampling))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for delta in engine.step().deltas for token in delta.token_ids]
    return engine.info.kv_format, tokens


def test_a_quantized_folder_is_served_with_its_plan(
    model: Path, alphabet: str, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    generator = torch.Generator().manual_seed(1)
    order = torch.randint(len(alphabet), (4000,), generator=generator).tolist()
    text.write_text("".join(alphabet[i] for i in order))
    options = QuantizeOptions(
        WeightScheme(8, 32), text=CalibrationText(text, 512, 128), kv_bits=7.0
    )
    quantize_model(model, tmp_path / "out", options)
    prompt = tuple(order[:20])
    kv_format, tokens = answer(tmp_path / "out", prompt)
    assert kv_format == "1 layer int8, 1 layer int4-sealed", "the plan was to mix formats"
    source = open_model(tmp_path / "out")
    plan = planned_kv(source)
    assert plan is not None
    reference = load_decoder(source, REFERENCE, torch.device("cpu"), torch.float32)
    precisions = [layer.precision() for layer in plan]
    logits = logits_of(reference, (*prompt, *tokens[:-1]), format=precisions)[len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    best, average = logits.amax(1), logits.mean(1)
    assert float(((best - chosen) / (best - average)).max()) < 0.1, "not what the reference says"
    assert len(set(tokens)) > 3, "nothing to compare"


# Twice what was measured on 4,096 tokens, since 128 tokens are few.
BOUNDS = {
    "int8": 0.002,
    "fp8": 0.0105,
    "k8v4": 0.014,
    "int4-sealed": 0.04,
    "int4-rotated": 0.11,
}


@pytest.mark.model
def test_the_caches_of_a_real_model_cost_what_they_may(smollm2_gguf: Path, tmp_path: Path) -> None:
    source = open_model(smollm2_gguf)
    every = HeldOutText(num_tokens=256, window=128).windows_of(Tokenizer.from_path(smollm2_gguf))
    rows, windows = every.tokens[:1], replace(every, tokens=every.tokens[1:])
    with torch.inference_mode():
        measured = measure_kv(source, rows, tmp_path, torch.device("cpu"))
    caches = {
        NAMES[form]: tuple(layer.chosen(form).precision() for layer in measured)
        for form in KV_FORMATS
    }
    source = with_even_keys(source, [layer.chosen(KVFormat.INT8) for layer in measured])
    found = evaluate(source, windows, EvaluationOptions(kv=caches))
    klds = {name: of.summary().kld_mean.value for name, of in found.kv.items()}
    assert all(klds[name] < bound for name, bound in BOUNDS.items()), klds
    assert klds["bf16"] < klds["int8"] < klds["k8v4"] < klds["int4-sealed"] < klds["int4-rotated"]
