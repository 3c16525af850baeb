"""Compare the speed of scoring prompts with that of reading them, and say where the rest goes.

    scripts/benchmark scoring                           # the packaged default model
    scripts/benchmark scoring --model gemma-3-270m-q4_k_m.gguf
    scripts/benchmark scoring --small-head              # 1.1 B made-up weights, 6 % of them head

Each prompt is read twice, once with the log probability of every token. `ratio` is the speed with
them over that without, by wall clock and by processor seconds, which other work changes less.
`head` and `scores` are the shares of the scored time that logits and what is made of them take.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from appliance.bench.figures import spread
from appliance.config import EngineConfig, cache_dir
from appliance.engine.engine import LLMEngine
from appliance.engine.request import Request
from appliance.engine.sampling_params import SamplingParams
from appliance.hub import resolve_model
from appliance.quant.formats.scheme import WeightScheme
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.model_shapes import LLAMA_1B
from bench.lib.synthetic import Schemes
from bench.lib.synthetic_checkpoint import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

READ = SamplingParams(temperature=0, max_tokens=1)
SCORE = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)


class Shares:
    """Seconds of calls, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call with its seconds added up."""
        self.seconds[name] = 0.0

        def run(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds[name] += time.perf_counter() - begin

        return run


def run(engine: LLMEngine, tokens: list[int], sampling: SamplingParams) -> tuple[float, float]:
    """Return the wall clock's seconds and the processor's."""
    name = f"{random.random()}"
    engine.submit(Request(request_id=name, prompt_token_ids=tuple(tokens), sampling=sampling))
    begin, begin_processor = time.perf_counter(), time.process_time()
    while engine.stats().running or engine.stats().waiting:
        engine.step()
    return time.perf_counter() - begin, time.process_time() - begin_processor


def measure(engine: LLMEngine, length: int, repeats: int) -> dict[str, Any]:
    """Read and score prompts that have nothing in common."""
    dice, shares = random.Random(0), Shares()
    reader = engine._runner._reader  # type: ignore[attr-defined]
    head = shares.timed("head", reader._executor.logits)
    reader._executor = SimpleNamespace(logits=head)  # all that it needs of it
    reader._score_tokens = shares.timed("scores", reader._score_tokens)
    pairs = []
    for repeat in range(repeats + 1):
        read, scored = (
            run(engine, [dice.randrange(3, 30_000) for _ in range(length)], sampling)
            for sampling in (READ, SCORE)
        )
        if repeat:  # the first one warms up
            pairs.append((read, scored))
        else:
            shares.seconds = dict.fromkeys(shares.seconds, 0.0)
    total = sum(scored[0] for _, scored in pairs)
    return {
        "tokens": length,
        "read_tokens_per_second": spread([length / read[0] for read, _ in pairs]),
        "ratio": {
            "wall": round(statistics.median(a[0] / b[0] for a, b in pairs), 3),
            "processor": round(statistics.median(a[1] / b[1] for a, b in pairs), 3),
        },
        "shares": {name: round(one / total, 3) for name, one in shares.seconds.items()},
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--small-head", action="store_true")
    parser.add_argument("--tokens", type=int, default=1023)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.small_head:
            model = Path(folder) / "model"
            write_checkpoint(model, LLAMA_1B, Schemes(WeightScheme(4, 32), WeightScheme(4, 32)))
        else:
            model = resolve_model(options.model, cache_dir=cache_dir()).path
        engine = LLMEngine.load(
            EngineConfig(model=str(model), max_num_seqs=1, max_model_len=2048),
            eos_token_ids=(),
            metadata=None,
            on_progress=lambda *_: None,
        )
        result = {"benchmark": "scoring", "conditions": conditions(), "model": engine.info.model}
        write_result(options.out, result | measure(engine, options.tokens, options.repeats))
