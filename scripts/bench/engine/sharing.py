"""Count the KV blocks that sequences of one request share in beam search and sampling.

The engine serves prompts of the length of Alpaca's instructions, and all block tables are counted
after every step. Saved is one minus distinct blocks over entries of all tables, which is what as
many sequences would take without sharing. No time is measured.

    scripts/benchmark sharing --out scripts/bench/results/cpu/sharing_smollm2.json

The paper's figures are those of its figure 15 for OPT-13B and Alpaca (Kwon et al. 2023). There an
answer has the length of the data set's; here too, so answers go on past the end of sequence.

All sequences run at once and the prefix cache is off, so that nothing but forks is counted. With
fewer slots some of a request's answers begin when others have ended, and two that never live at
the same time share nothing (`--slots` shows that).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance import LLM, SamplingParams
from appliance.engine.request import Request
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.lengths import lengths
from bench.lib.prompts import ExactPrompts

PAPER = {"beam": {2: 37.56, 4: 53.13, 6: 55.16}, "sampling": {2: 6.09, 4: 8.53, 6: 9.79}}
PROMPT_TOKENS, ANSWER_TOKENS = 19.31, 58.45  # means of Alpaca, as the paper gives them
SPREAD = 0.6


@dataclass(slots=True)
class Tally:
    """Sums of blocks over steps."""

    in_use: int = 0
    in_tables: int = 0
    steps: int = 0

    @property
    def saved_percent(self) -> float:
        """Percentage of the blocks that sharing saves."""
        return round(100 * (1 - self.in_use / self.in_tables), 2)


def sampling_of(kind: str, width: int, max_tokens: int, seed: int) -> SamplingParams:
    if kind == "beam":
        return SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens, ignore_eos=True)
    return SamplingParams(n=width, max_tokens=max_tokens, ignore_eos=True, seed=seed)


def run(llm: LLM, prompts: list[tuple[int, ...]], sampling: list[SamplingParams]) -> Tally:
    """Serve all requests and count blocks after every step."""
    engine, tally = llm.engine, Tally()
    for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        engine.submit(Request(request_id=str(number), prompt_token_ids=prompt, sampling=params))
    while engine.has_work:
        engine.step()
        in_use = engine.stats().blocks_active
        if in_use:
            tally.in_use += in_use
            tally.in_tables += sum(view.blocks for view in engine.sequences())
            tally.steps += 1
    return tally


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged one")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--text", type=Path, default=None, help="prose that prompts are cut from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=None, help="sequences at once [all]")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()

    given = {} if options.threads is None else {"threads": options.threads}
    count, seed = options.requests, options.seed
    slots = options.slots or count * max(options.widths)
    llm = LLM(options.model, max_num_seqs=slots, prefix_caching=False, **given)
    prompt_lengths = lengths(count, PROMPT_TOKENS, SPREAD, least=4, most=200, seed=seed)
    answer_lengths = lengths(count, ANSWER_TOKENS, SPREAD, least=4, most=400, seed=seed + 1)
    source = ExactPrompts(llm.tokenizer, seed)
    if options.text is None:
        texts = [source.next(length) for length in prompt_lengths]
        prompts = [tuple(llm.tokenizer.encode(text, add_special_tokens=True)) for text in texts]
    else:
        tokens = llm.tokenizer.encode(options.text.read_text(), add_special_tokens=False)
        starts = range(0, len(tokens), len(tokens) // count)
        prompts = [
            tuple(tokens[start : start + length])
            for start, length in zip(starts, prompt_lengths, strict=False)
        ]
    rows: list[dict[str, Any]] = []
    for kind, paper in PAPER.items():
        for width in options.widths:
            sampling = [
                sampling_of(kind, width, length, seed + number)
                for number, length in enumerate(answer_lengths)
            ]
            tally = run(llm, prompts, sampling)
            row = {
                "kind": kind,
                "width": width,
                "saved_percent": tally.saved_percent,
                "paper_saved_percent": paper.get(width),
                "steps": tally.steps,
            }
            print(row)
            rows.append(row)
    result = {
        "benchmark": "sharing",
        "conditions": conditions(),
        "load": {
            "model": Path(llm.path).name,
            "prompts": "words" if options.text is None else "prose",
            "requests": count,
            "seed": seed,
            "max_num_seqs": slots,
            "block_size": llm.engine.info.block_size,
            "kv_format": llm.engine.info.kv_format,
            "prompt_tokens_mean": round(sum(map(len, prompts)) / count, 1),
            "answer_tokens_mean": round(sum(answer_lengths) / count, 1),
        },
        "rows": rows,
    }
    write_result(options.out, result, quiet=True)
