"""Measure decode and prefill speed of the engine, beside transformers' `generate`.

    scripts/benchmark decode         # the packaged default model
    scripts/benchmark decode --peer  # and transformers in bf16, one request at a time;
                                     # reading a GGUF file it needs `scripts/setup test`

Every batch size gets distinct prompts; tokens per second count decode steps only. `host` is the
part of a step spent outside the model and the sampler.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance import LLM
from appliance.bench.figures import spread
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.requests import submit

if TYPE_CHECKING:
    from appliance.engine.engine import LLMEngine


def decode_rate(
    engine: LLMEngine, batch: int, prompt_tokens: int, max_tokens: int, seed: int
) -> tuple[float, float]:
    """Measure tokens per second while every sequence decodes, and host milliseconds a step."""
    submit(engine, batch, prompt_tokens, max_tokens, seed)
    seconds, host, steps = 0.0, [], 0
    while engine.has_work:
        begin = time.perf_counter()
        engine.step()
        elapsed = time.perf_counter() - begin
        stats = engine.stats()
        if stats.step_decode_tokens == batch and stats.step_prefill_tokens == 0:
            seconds += elapsed
            host.append(elapsed - stats.model_seconds)
            steps += 1
    return batch * steps / seconds, 1000 * statistics.median(host)


def prefill_rate(engine: LLMEngine, prompt_tokens: int, seed: int) -> float:
    """Measure prompt tokens per second until the first token."""
    submit(engine, 1, prompt_tokens, 1, seed)
    begin = time.perf_counter()
    while engine.has_work:
        engine.step()
    return prompt_tokens / (time.perf_counter() - begin)


def transformers_rate(path: str, prompt_tokens: int, max_tokens: int, repeats: int) -> list[float]:
    """Measure tokens per second of greedy `generate` in bf16, one request at a time."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    folder, name = str(Path(path).parent), Path(path).name
    source = {"gguf_file": name} if name.endswith(".gguf") else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder if source else path, dtype=torch.bfloat16, **source
    ).eval()
    rates = []
    for repeat in range(repeats + 1):
        ids = torch.randint(
            1000,
            model.config.vocab_size,
            (1, prompt_tokens),
            generator=torch.Generator().manual_seed(repeat),
        )
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert out.shape[1] == prompt_tokens + max_tokens
        rates.append(max_tokens / (time.perf_counter() - begin))
    return rates[1:]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--peer", action="store_true", help="measure transformers too")
    options = parser.parse_args()
    llm = LLM(options.model, threads=options.threads, kv_cache_dtype=options.kv_cache_dtype)
    engine = llm.engine
    result: dict[str, Any] = {
        "benchmark": "decode",
        "conditions": conditions(),
        "model": engine.info.model,
        "weights": engine.info.weight_format,
        "kv": engine.info.kv_format,
        "threads": options.threads,
        "prompt_tokens": options.prompt_tokens,
        "max_tokens": options.max_tokens,
    }
    decode_rate(engine, 1, 16, 8, seed=10**6)  # warm-up
    rows = []
    for batch in options.batch:
        runs = [
            decode_rate(
                engine, batch, options.prompt_tokens, options.max_tokens, seed=1000 * batch + i
            )
            for i in range(options.repeats)
        ]
        rows.append(
            {
                "batch": batch,
                "tokens_per_second": spread([rate for rate, _ in runs]),
                "host_ms_per_step": spread([host for _, host in runs], 3),
            }
        )
    result["decode"] = rows
    prefill = [
        prefill_rate(engine, options.prefill_tokens, 10**7 + i) for i in range(options.repeats)
    ]
    result["prefill_tokens_per_second"] = spread(prefill)
    if options.peer:
        rates = transformers_rate(
            llm.path, options.prompt_tokens, options.max_tokens, options.repeats
        )
        peer = spread(rates)
        result["transformers_generate_bf16_tokens_per_second"] = peer
        result["ratio_of_largest_batch_to_transformers"] = round(
            rows[-1]["tokens_per_second"]["median"] / peer["median"], 2
        )
    write_result(options.out, result)
