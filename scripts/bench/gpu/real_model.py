"""Compare a real model's likeliest tokens on the GPU with those on the CPU in float32.

The CPU writes texts from a few first tokens; both then read them, and at every position the
likeliest next token is compared. Needs no tokenizer and no text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from appliance.config import EngineConfig
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from bench.gpu.plan import Amount

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.engine import LLMEngine
    from bench.gpu.plan import Wanted
    from bench.gpu.rows import Rows

FIRST_TOKENS = (1, 257, 800, 999)
LENGTH = {Amount.TINY: 20, Amount.FIRST: 128, Amount.FULL: 512}
KV = ("bf16", "int8")

Texts = list[tuple[int, ...]]


def measure(rows: Rows, wanted: Wanted) -> None:
    """Measure one row for each precision of the cache."""
    if wanted.model is None:
        return
    expected: list[Any] = []
    for kv in KV:
        key = {"engine": "ours", "model": wanted.model.name, "kv": kv, "what": "agreement"}

        def compare(kv: str = kv, model: Path = wanted.model) -> dict[str, Any]:
            if not expected:
                expected.extend(_on_the_cpu(model, LENGTH[wanted.amount]))
            return _agreement(model, kv, *expected)

        rows.note(key, compare)


def _on_the_cpu(model: Path, length: int) -> tuple[Texts, Texts]:
    """Return texts, and the likeliest token after each of their prefixes."""
    engine = _load(
        model, length + 1, device="cpu", kernels="torch", dtype="float32", kv_cache_dtype="fp32"
    )
    sampling = SamplingParams(temperature=0.8, seed=1, max_tokens=length, ignore_eos=True)
    starts: Texts = [(token,) for token in FIRST_TOKENS]
    found = _run(engine, starts, [sampling] * len(starts))
    texts = [start + tokens for start, (tokens, _) in zip(starts, found, strict=True)]
    return texts, likeliest(engine, texts)


def _agreement(model: Path, kv: str, texts: Texts, expected: Texts) -> dict[str, Any]:
    engine = _load(
        model, len(texts[0]), device="auto", kv_cache_dtype=kv, dtype="bfloat16", kernels=_kernels()
    )
    found = likeliest(engine, texts)
    same = [a == b for row, other in zip(found, expected, strict=True)
            for a, b in zip(row, other, strict=True)]  # fmt: skip
    return {
        "backend": engine.info.backend,
        "weight_format": engine.info.weight_format,
        "positions": len(same),
        "agreement": round(sum(same) / len(same), 4),
    }


def likeliest(engine: LLMEngine, texts: Texts) -> Texts:
    """Return the model's choice at every position but the first."""
    sampling = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)
    return [tops for _, tops in _run(engine, texts, [sampling] * len(texts))]


def _kernels() -> str:
    return "auto" if torch.cuda.is_available() else "torch"


def _load(model: Path, length: int, **options: Any) -> LLMEngine:
    config = EngineConfig(model=str(model), prefix_caching=False, max_model_len=length, **options)
    nothing: Any = lambda *progress: None  # noqa: E731
    return load_llm_engine(config, eos_token_ids=(), metadata=None, on_progress=nothing)


def _run(
    engine: LLMEngine, prompts: Texts, sampling: list[SamplingParams]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the tokens after each prompt, and the likeliest ones in it where they were wanted."""
    for number, (prompt, settings) in enumerate(zip(prompts, sampling, strict=True)):
        engine.submit(Request(request_id=str(number), prompt_token_ids=prompt, sampling=settings))
    tokens: list[list[int]] = [[] for _ in prompts]
    tops: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for delta in engine.step().deltas:
            if delta.error is not None:
                raise RuntimeError(delta.error)
            tokens[int(delta.request_id)] += delta.token_ids
            for report in delta.prompt_logprobs or ():
                tops[int(delta.request_id)].append(report.top[0].token_id)
    return [(tuple(made), tuple(best)) for made, best in zip(tokens, tops, strict=True)]
