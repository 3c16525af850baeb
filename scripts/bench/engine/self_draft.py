"""Measure a draft model: the packaged model in BF16 drafts for itself at 4 bits, or another drafts.

    scripts/benchmark self_draft                         # SmolLM2 in BF16, draft=self
    scripts/benchmark self_draft --model gemma3-270m --temperature 0.7
    scripts/benchmark self_draft --shape 0.5B --accepted 0.9

The packaged models are GGUF files of 4 to 8 bits, so the target's weights are those widened to
BF16: what it says is what the file says, and what it costs is what a BF16 model costs. Rounding
SmolLM2's Q4_1 again loses less than rounding weights that never had 4 bits; Gemma's file holds
types of 4, 6 and 8 bits. A shape has random weights, which agree with no rounding of themselves:
`--accepted` is the share of its drafts' tokens that are put right after the draft model has run;
take a real model's `token_acceptance`. Answers are the model's own, with the draft model and
without in alternation, and compared token for token. Figures are of steps that hold no prompt;
`processor_ratio` compares tokens a second of processor time, which other programs change less.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from appliance.bench.figures import spread
from appliance.config import EngineConfig, cache_dir
from appliance.draft_names import resolve_draft
from appliance.engine.engine import LLMEngine
from appliance.engine.loading import load_parts
from appliance.engine.request import Request
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.speculation.acceptance import _ALL
from appliance.engine.speculation.draft_model import SOURCES
from appliance.hub import resolve_model
from appliance.kernels.weight import dense
from appliance.model.source import open_model
from appliance.tokenizer import Tokenizer
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.model_shapes import DENSE
from bench.lib.synthetic import Schemes
from bench.lib.synthetic_checkpoint import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from torch import Tensor

    from appliance.engine.speculation.draft_model import DraftModel, DraftRows
    from appliance.model.source import ModelSource

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a child how a bicycle stays upright, step by step.",
    "Give me a JSON list of five cities, each with name, country and population.",
    "Write a Python function that returns the n-th Fibonacci number, with tests.",
    "What should I look for when I buy a used car?",
    "Summarize the history of the printing press in two paragraphs.",
    "Write a letter to a neighbour who plays loud music at night.",
    "List the planets of the solar system with one fact about each.",
)


class Widened:
    """Presents a model's weights in BF16."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def packed_bits(self, name: str) -> None:
        """Nothing is packed."""

    def float_bits(self, name: str) -> None:
        """Nothing is."""

    def load(self, name: str) -> Tensor:
        return dense(self._weights.load(name), torch.bfloat16)


class Agreeing:
    """Runs a draft model, and puts a share of its tokens right.

    Args:
        answers: tokens by request.
    """

    def __init__(self, model: DraftModel, answers: dict[str, list[int]], share: float) -> None:
        self._model = model
        self._answers = answers
        self._share = share
        self._noise = random.Random(0)

    def copy(self, pairs: Ordered[tuple[int, int]]) -> None:
        self._model.copy(pairs)

    def run(self, rows: Ordered[DraftRows]) -> list[tuple[int, float]]:
        drawing = [one for one in rows if one.draws]
        return [
            (self._token(one), probability)
            for one, (_, probability) in zip(drawing, self._model.run(rows), strict=True)
        ]

    def _token(self, one: DraftRows) -> int:
        answer = self._answers[one.sequence.request.request_id]
        right = answer[min(one.end - one.sequence.num_prompt_tokens, len(answer) - 1)]
        return right if self._noise.random() < self._share else right ^ 1


class Counts(NamedTuple):
    """Sums over the steps without a prompt."""

    seconds: float
    processor_seconds: float
    tokens: int
    steps: int
    answers: dict[str, list[int]]


def run(
    engine: LLMEngine, prompts: list[list[int]], streams: int, options: Any, salt: str
) -> Counts:
    """Answer all prompts, so many at a time; answers of another `salt` are not copied."""
    parts = [
        answer(engine, list(enumerate(prompts))[first : first + streams], options, salt)
        for first in range(0, len(prompts), streams)
    ]
    return Counts(
        seconds=sum(part.seconds for part in parts),
        processor_seconds=sum(part.processor_seconds for part in parts),
        tokens=sum(part.tokens for part in parts),
        steps=sum(part.steps for part in parts),
        answers={name: ids for part in parts for name, ids in part.answers.items()},
    )


def answer(
    engine: LLMEngine, prompts: Ordered[tuple[int, list[int]]], options: Any, salt: str
) -> Counts:
    """Answer numbered prompts at once."""
    for number, prompt in prompts:
        sampling = SamplingParams(
            temperature=options.temperature,
            seed=number,
            max_tokens=options.max_tokens,
            ignore_eos=True,
        )
        engine.submit(
            Request(
                request_id=f"{number}",
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                cache_salt=salt,
            )
        )
    seconds, processor, tokens, steps = 0.0, 0.0, 0, 0
    found: dict[str, list[int]] = {}
    while engine.has_work:
        begin, spent = time.perf_counter(), time.process_time()
        report = engine.step()
        took, used = time.perf_counter() - begin, time.process_time() - spent
        for delta in report.deltas:
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
        if report.deltas and engine.stats().step_prefill_tokens == 0:
            seconds += took
            processor += used
            steps += 1
            tokens += sum(len(delta.token_ids) for delta in report.deltas)
    return Counts(seconds, processor, tokens, steps, found)


def compare(
    engine: LLMEngine, prompts: list[list[int]], streams: int, options: Any
) -> dict[str, Any]:
    """Run prompts with the draft model and without, in alternation."""
    speculator: Any = engine._scheduler._speculator
    runs: dict[bool, list[Counts]] = {True: [], False: []}
    if options.shape:
        engine._scheduler._speculator = None
        answers = run(engine, prompts, streams, options, "first").answers
        proposer = speculator._drafting._proposer
        proposer._model = Agreeing(own_model(proposer), answers, options.accepted)
    before = engine.stats()
    for repeat in range(options.repeats + 1):
        for on, found in runs.items():
            engine._scheduler._speculator = speculator if on else None
            found.append(run(engine, prompts, streams, options, f"{streams} {on} {repeat}"))
        assert runs[True][-1].answers == runs[False][-1].answers, "it changed an answer"
    engine._scheduler._speculator = speculator
    after = engine.stats()
    drafted = after.draft_tokens_total - before.draft_tokens_total
    accepted = after.accepted_tokens_total - before.accepted_tokens_total
    learned = speculator.controller.acceptance._share(SOURCES[options.temperature > 0], _ALL)
    pairs = list(zip(runs[True][1:], runs[False][1:], strict=True))  # the first ones warm up
    return {
        "accepted_share": round(accepted / max(1, drafted), 3),
        "token_acceptance": round(learned.hits / learned.tokens, 3),
        "tokens_per_step": round(pairs[-1][0].tokens / pairs[-1][0].steps / streams, 3),
        "tokens_per_second": spread([on.tokens / on.seconds for on, _ in pairs]),
        "tokens_per_second_off": spread([off.tokens / off.seconds for _, off in pairs]),
        "speed_ratio": round(
            statistics.median(
                on.tokens / on.seconds * off.seconds / off.tokens for on, off in pairs
            ),
            3,
        ),
        "processor_ratio": round(
            statistics.median(
                on.tokens / on.processor_seconds * off.processor_seconds / off.tokens
                for on, off in pairs
            ),
            3,
        ),
    }


def own_model(proposer: Any) -> DraftModel:
    """Return a proposer's draft model, without an earlier `Agreeing`."""
    model = proposer._model
    return model._model if isinstance(model, Agreeing) else model


def load(path: Path, options: Any) -> LLMEngine:
    """Load the widened model with its draft model."""
    config = EngineConfig(
        model=str(path),
        speculate=f"draft={options.draft}",
        threads=options.threads,
        max_model_len=2048,
        max_num_seqs=max(options.streams),
    )
    config = resolve_draft(config, path, progress=lambda *_: None)
    source: ModelSource = open_model(path)
    widened = replace(source, weights=Widened(source.weights))
    parts = load_parts(config, (), None, lambda *_: None, source=widened)
    return LLMEngine(*parts)


def measure(path: Path, prompts: list[list[int]], options: Any) -> dict[str, Any]:
    """Compare with each number of streams."""
    engine = load(path, options)
    result: dict[str, Any] = {
        "benchmark": "self_draft",
        "conditions": conditions(),
        "model": options.shape or engine.info.model,
        "weights": engine.info.weight_format,
        "draft": options.draft,
        "temperature": options.temperature,
    }
    if options.shape:
        result["accepted"] = options.accepted
    for streams in options.streams:
        result[f"{streams} streams"] = compare(engine, prompts, streams, options)
    return result


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ask in the model's own form; a base model goes on from the text."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(text, add_special_tokens=True)
    return tokenizer.encode_chat([{"role": "user", "content": text}])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--draft", default="self", help="default: the model itself at 4 bits")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--shape", choices=DENSE, default="", help="random weights instead")
    parser.add_argument("--accepted", type=float, default=0.9, help="right tokens; with --shape")
    options = parser.parse_args()
    if options.shape:
        noise = random.Random(0)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / options.shape
            write_checkpoint(path, DENSE[options.shape], Schemes())
            vocab_size = DENSE[options.shape]["vocab_size"]
            prompts = [[noise.randrange(vocab_size) for _ in range(40)] for _ in PROMPTS]
            result = measure(path, prompts, options)
    else:
        path = resolve_model(options.model, cache_dir=cache_dir(), progress=lambda *_: None).path
        tokenizer = Tokenizer.from_path(path)
        result = measure(path, [encoded(tokenizer, text) for text in PROMPTS], options)
    write_result(options.out, result)


if __name__ == "__main__":
    main()
