"""Measure decode speed of many streams under a JSON schema and without, and times of masks.

    scripts/benchmark structured_output               # the packaged default model, 16 streams
    scripts/benchmark structured_output --masks-only  # no model: masks of synthetic 152k tokens too

Both kinds of run alternate. Every answer has the same number of tokens, because the schema's list
is longer than that. Every token takes a step: drafts are off, as their use depends on the text.
Tokens per second count steps without prompts only. `ratio` is with the schema over without, by
wall clock and by processor seconds, which other work on the machine changes less. `wait_us` is how
long a step waits for its masks, by wall clock: most are made while its model runs. `mask_us` is one
mask alone. `jumps` is one answer of short values and long names, with drafts (also of tokens that
must follow) and without, in alternation.
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from appliance import LLM, Grammar, SamplingParams
from appliance.bench.figures import percentile, spread
from appliance.engine.grammars.compiling import GrammarCompiler
from appliance.engine.grammars.library import open_library
from appliance.engine.grammars.matchers import num_words
from appliance.engine.nouns.messages import Vocabulary
from appliance.engine.nouns.request import Request
from appliance.text import vocabulary_of
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from appliance.engine.grammars.matchers import Masks
    from appliance.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "summary": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "hobbies": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "summary", "age", "hobbies", "address"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 50}
READING = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "station_identifier": {"type": "integer", "minimum": 1, "maximum": 999},
            "temperature_celsius": {"type": "integer", "minimum": -60, "maximum": 60},
            "relative_humidity_percent": {"type": "integer", "minimum": 0, "maximum": 100},
            "is_raining": {"type": "boolean"},
            "wind_direction": {"enum": ["north", "east", "south", "west"]},
            "unit_system": {"const": "metric"},
        },
        "required": [
            "station_identifier", "temperature_celsius", "relative_humidity_percent",
            "is_raining", "wind_direction", "unit_system",
        ],
        "additionalProperties": False,
    }
)  # fmt: skip
EXAMPLE = (
    '[{"name": "Alice Johnson", "summary": "A teacher from Paris who likes long walks, good '
    'books and \\"old\\" films.", "age": 42, "hobbies": ["chess", "rowing", "mountains"],'
    ' "address": {"street": "12 Rue de la Paix", "zip": "75002"}}, {"name": "Bob"'
)
QWEN_SIZE = 151_936
LONGEST = 32  # bytes of a token with which texts are spelled


class RunRates(NamedTuple):
    """What one run measured while all streams decoded."""

    wall: float  # tokens per second
    processor: float  # tokens per second of a processor


def run(llm: LLM, streams: int, max_tokens: int, grammar: Grammar | None) -> RunRates:
    """Let all streams answer once."""
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, grammar=grammar
    )
    if grammar is not None:
        llm.engine.set_vocabulary(vocabulary_of(llm.tokenizer))
    engine, tokenizer = llm.engine, llm.tokenizer
    for number in range(streams):
        text = f"List {number + 20} invented people as JSON."
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        engine.submit(
            Request(request_id=str(number), prompt_token_ids=tuple(ids), sampling=sampling)
        )
    wall = processor = 0.0
    tokens = 0
    while engine.has_work:
        begin, begin_processor = time.perf_counter(), time.process_time()
        report = engine.step()
        assert not any(delta.error for delta in report.deltas), report.deltas
        stats = engine.stats()
        if stats.running == streams and stats.step_prefill_tokens == 0:
            wall += time.perf_counter() - begin
            processor += time.process_time() - begin_processor
            tokens += sum(len(delta.token_ids) for delta in report.deltas)
    return RunRates(tokens / wall, tokens / processor)


@contextmanager
def without_drafts(llm: LLM) -> Iterator[None]:
    """Switch drafts off in the block: every token takes a step, none is proposed or forced."""
    scheduler = llm.engine.scheduler
    speculator, scheduler.speculator = scheduler.speculator, None
    try:
        yield
    finally:
        scheduler.speculator = speculator


class TimedMasks(NamedTuple):
    """A step's masks; adds to `waits` the microseconds until they are ready."""

    masks: Future[Masks]
    waits: list[float]

    def result(self) -> Masks:
        begin = time.perf_counter()
        found = self.masks.result()
        self.waits.append(1e6 * (time.perf_counter() - begin))
        return found


@contextmanager
def timed_waits(llm: LLM, waits: list[float]) -> Iterator[None]:
    """Add the waits of steps for their masks to a list, within the block."""
    matchers: Any = llm.engine.grammars.matchers
    begin = matchers.begin

    def timed(*step: Any) -> TimedMasks | None:
        masks = begin(*step)
        return None if masks is None else TimedMasks(masks, waits)

    matchers.begin = timed
    try:
        yield
    finally:
        matchers.begin = begin


def jumps(llm: LLM, repeats: int) -> dict[str, Any]:
    """Compare one stream's steps and time with forced tokens as drafts, and without drafts."""
    found: dict[bool, list[tuple[int, int, float]]] = {True: [], False: []}
    for _ in range(repeats + 1):
        for jump, rows in found.items():
            steps = llm.engine.stats().steps_total
            begin = time.perf_counter()
            with nullcontext() if jump else without_drafts(llm):
                (answer,) = llm.generate(
                    "It is a rainy day. The station says:",
                    SamplingParams(temperature=0, max_tokens=200, grammar=READING),
                )
            seconds = time.perf_counter() - begin
            tokens = len(answer.outputs[0].token_ids)
            rows.append((llm.engine.stats().steps_total - steps, tokens, seconds))
    with_, without = found[True][1:], found[False][1:]  # the first ones warm up
    return {
        "tokens": with_[0][1],
        "steps": with_[0][0],
        "steps_without": without[0][0],
        "speed_ratio": round(
            statistics.median(b[2] / a[2] for a, b in zip(with_, without, strict=True)), 3
        ),
    }


def masks(vocabulary: Vocabulary, size: int, eos: tuple[int, ...], text: str) -> dict[str, Any]:
    """Time the masks of each token of a text on one thread, in microseconds."""
    compiler = GrammarCompiler(size, eos, vocabulary)
    first = compiler.compile(Grammar.json_schema(PEOPLE))
    ids = list(greedy(ids_of(vocabulary), text))
    library, words = open_library(), np.zeros((1, num_words(size)), dtype=np.int32)
    found, read = [], []
    for _ in range(20):
        matcher = first.deep_copy()
        for token_id in ids:
            begin = time.perf_counter()
            library.fill([(matcher, 0)], words)
            found.append(1e6 * (time.perf_counter() - begin))
            begin = time.perf_counter()
            assert matcher.consume_token(token_id)
            read.append(1e6 * (time.perf_counter() - begin))
    return {
        "vocabulary": size,
        "tokens": len(ids),
        "compile_seconds": round(compiler.times.seconds, 3),  # the first one makes the tokenizer
        "mask_us": {f"p{p}": round(percentile(found, p / 100)) for p in (50, 90, 99)},
        "read_us": {f"p{p}": round(percentile(read, p / 100)) for p in (50, 90, 99)},
    }


def ids_of(vocabulary: Vocabulary) -> dict[bytes, int]:
    """Return the tokens that have a text."""
    return {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token}


def greedy(ids: dict[bytes, int], text: str) -> Iterator[int]:
    """Yield the longest tokens that fit, one after another."""
    rest, at = text.encode(), 0
    while at < len(rest):
        size = next(n for n in range(LONGEST, 0, -1) if rest[at : at + n] in ids)
        yield ids[rest[at : at + size]]
        at += size


def grown(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """Extend a real vocabulary to that size by pairs of its tokens, as merges would."""
    rng, tokens = random.Random(0), dict.fromkeys(vocabulary.tokens)
    pieces = [token for token in vocabulary.tokens if token.strip().isalpha()]
    while len(tokens) < size:
        tokens.setdefault(rng.choice(pieces) + rng.choice(pieces).strip())
    return Vocabulary(tuple(tokens), vocabulary.special)


def measure_masks(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    own = vocabulary_of(tokenizer)
    eos = tokenizer.eos_token_ids
    return [
        masks(own, tokenizer.vocab_size, eos, EXAMPLE),
        masks(grown(own, QWEN_SIZE), QWEN_SIZE, eos, EXAMPLE),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--masks-only", action="store_true")
    options = parser.parse_args()
    llm = LLM(options.model, threads=options.threads, max_num_seqs=options.streams)
    result: dict[str, Any] = {
        "benchmark": "structured_output",
        "conditions": conditions(),
        "model": llm.engine.info.model,
        "masks": measure_masks(llm.tokenizer),
    }
    if not options.masks_only:
        kinds = {"free": None, "schema": Grammar.json_schema(PEOPLE)}
        rates: dict[str, list[RunRates]] = {kind: [] for kind in kinds}
        waits: list[float] = []
        for repeat in range(options.repeats + 1):
            for kind, grammar in kinds.items():
                with without_drafts(llm), timed_waits(llm, waits if repeat else []):
                    rate = run(llm, options.streams, options.max_tokens, grammar)
                if repeat:  # the first one warms up
                    rates[kind].append(rate)
        result["streams"] = options.streams
        for kind, found in rates.items():
            result[kind] = {
                "tokens_per_second": spread([one.wall for one in found]),
                "tokens_per_processor_second": spread([one.processor for one in found]),
            }
        result["wait_us"] = {f"p{p}": round(percentile(waits, p / 100)) for p in (50, 90, 99)}
        result["jumps"] = jumps(llm, options.repeats)
        pairs = list(zip(rates["schema"], rates["free"], strict=True))
        result["ratio"] = {
            "wall": round(statistics.median(a.wall / b.wall for a, b in pairs), 3),
            "processor": round(statistics.median(a.processor / b.processor for a, b in pairs), 3),
        }
    write_result(options.out, result)
