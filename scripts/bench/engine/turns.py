"""Count what an agent's conversation recomputes at each turn on a hybrid model, and time it.

    scripts/benchmark turns                      # a small random model of Qwen 3.6's kind
    scripts/benchmark turns --shape qwen3.6-35b-a3b --layers 8
    scripts/benchmark turns --shape qwen3-30b-a3b  # without states, beside it

Each turn sends the whole conversation again and appends new tokens, as an agent does with the
output of a tool. What the turn before has sent and received could come from the cache. Tokens
recomputed are those of the prompt that did not; they are the same on any machine. Seconds to the
first token of the last turn over those of the second say what is left of the length.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.request import Request
from appliance.engine.sampling_params import SamplingParams
from bench.cpu.experts import SHAPES
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.synthetic import Schemes
from bench.lib.synthetic_checkpoint import write_checkpoint

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, slots=True)
class TurnCost:
    """One turn: tokens of its prompt, of these from the cache and not, and seconds."""

    prompt_tokens: int
    from_the_cache: int
    recomputed: int
    first_token_ms: float


def ask(engine: LLMEngine, prompt: list[int], tokens: int) -> tuple[list[int], TurnCost]:
    """Send one turn; return the answer and its cost."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    before, begin, first = engine.stats().prefix_hits_total, time.perf_counter(), 0.0
    engine.submit(Request(request_id="turn", prompt_token_ids=tuple(prompt), sampling=sampling))
    answer: list[int] = []
    while engine.has_work:
        for delta in engine.step().deltas:
            answer += delta.token_ids
        if answer and not first:
            first = time.perf_counter() - begin
    cached = engine.stats().prefix_hits_total - before
    return answer, TurnCost(len(prompt), cached, len(prompt) - cached, round(1000 * first, 1))


def converse(engine: LLMEngine, options: argparse.Namespace, vocabulary: int) -> list[TurnCost]:
    """Hold the conversation."""
    generator = torch.Generator().manual_seed(options.seed)
    history: list[int] = []
    turns = []
    for _ in range(options.turns):
        new = torch.randint(3, vocabulary, (options.new_tokens,), generator=generator)
        history += new.tolist()
        answer, turn = ask(engine, history, options.answer_tokens)
        history += answer
        turns.append(turn)
    return turns


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny-qwen3.6-35b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=200, help="of each turn")
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shape = SHAPES[options.shape] | {"num_hidden_layers": options.layers}
    length = options.turns * (options.new_tokens + options.answer_tokens)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_checkpoint(model, shape, Schemes())
        config = EngineConfig(
            model=str(model), threads=options.threads, max_num_seqs=1, max_model_len=length + 16
        )
        engine = LLMEngine.load(
            config, eos_token_ids=(), metadata=None, on_progress=lambda stage, done, total: None
        )
        turns = converse(engine, options, shape["vocab_size"])
        block_size = engine.info.block_size
        engine.close()
    second, last = turns[1], turns[-1]
    result: dict[str, Any] = {
        "benchmark": "turns",
        "conditions": conditions(),
        "shape": shape,
        "block_size": block_size,
        "new_tokens": options.new_tokens,
        "answer_tokens": options.answer_tokens,
        "recomputed_at_the_last_turn": last.recomputed,
        "recomputed_at_the_second": second.recomputed,
        "first_token_ratio": round(last.first_token_ms / second.first_token_ms, 3),
        "turns": [asdict(turn) for turn in turns],
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
