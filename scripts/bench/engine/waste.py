"""Measure the share of allocated KV slots that hold tokens, over a whole run.

The engine serves requests of log-normal lengths, as in ShareGPT; slots are counted after every step
until the last request has ended. No time is measured.

    scripts/benchmark waste --out scripts/bench/results/cpu/waste_smollm2.json
"""

from __future__ import annotations

from pathlib import Path

from appliance import LLM, SamplingParams
from appliance.engine.request import Request
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.lengths import lengths
from bench.lib.prompts import ExactPrompts


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged one")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=float, default=161.0, help="mean, ShareGPT's")
    parser.add_argument("--answer-tokens", type=float, default=220.0, help="mean")
    parser.add_argument("--spread", type=float, default=0.8, help="deviation of the logarithm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()

    given = {} if options.threads is None else {"threads": options.threads}
    llm = LLM(options.model, max_num_seqs=16, max_model_len=2048, block_size=16, **given)
    engine, count, seed = llm.engine, options.requests, options.seed
    limits = {"least": 4, "most": 1000}
    prompts = lengths(count, options.prompt_tokens, options.spread, **limits, seed=seed)
    answers = lengths(count, options.answer_tokens, options.spread, **limits, seed=seed + 1)
    source = ExactPrompts(llm.tokenizer, seed)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens = llm.tokenizer.encode(source.next(prompt), add_special_tokens=True)
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, seed=number)
        engine.submit(
            Request(request_id=str(number), prompt_token_ids=tuple(tokens), sampling=sampling)
        )
    utilizations: list[float] = []
    held = slots = sequences = 0
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        if stats.blocks_active:
            utilizations.append(stats.kv_utilization)
            held += stats.kv_tokens
            slots += stats.blocks_active * stats.block_size
            sequences += stats.running
    result = {
        "benchmark": "waste",
        "conditions": conditions(),
        "load": {
            "model": Path(llm.path).name,
            "requests": count,
            "seed": seed,
            "block_size": engine.info.block_size,
            "prompt_tokens_mean": round(sum(prompts) / count, 1),
            "answer_tokens_mean": round(sum(answers) / count, 1),
            "request_tokens_mean": round((sum(prompts) + sum(answers)) / count, 1),
        },
        "steps": len(utilizations),
        "tokens_in_cache_per_sequence_mean": round(held / sequences, 1),
        "slots_with_tokens_percent": round(100 * held / slots, 2),
        "mean_over_steps_percent": round(100 * sum(utilizations) / len(utilizations), 2),
        "least_of_a_step_percent": round(100 * min(utilizations), 2),
    }
    write_result(options.out, result)
