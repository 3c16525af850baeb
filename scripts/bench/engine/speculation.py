"""Measure what speculation saves and costs: one trace with it and without, side by side.

    scripts/benchmark speculation                        # the packaged default model
    scripts/benchmark speculation --streams 8 --max-tokens 200
    scripts/benchmark speculation --shape 0.5B           # random weights of 4 bits, head of 8

The trace is replayed: the model is made to give a recorded answer, since a small model copies
badly. Its logits are computed as ever, but decide nothing. Kinds of answers:

- `rewrite`: a file of this project before a change is the prompt, and the file after it the answer.
- `summary`: an answer that quotes sentences of its prompt.
- `tool_call`: calls of functions as JSON, each like the one before.
- `prose`: text that copies nothing.
- `agent`: the model's own greedy reply in the eighth turn of a conversation as `scripts/benchmark
  agent` holds it, after eight outputs of tools and all that was said before; not with `--shape`.

Each run has a cache salt of its own, so that no run copies the answers of an earlier one. Two
engines answer at the same time, a step of each in turn, so that both run under the same load.

`steps_ratio` and `rows_per_token` are counts, which a busy machine changes little (the controller
learns from times); `speed_ratio` is tokens a second with speculation over tokens a second without,
and `processor_ratio` the same for a second of processor time. The answers of both are compared,
token for token.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from appliance.bench.figures import spread
from appliance.config import EngineConfig, cache_dir
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.hub import resolve_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.tokenizer import Tokenizer
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.model_shapes import DENSE
from bench.lib.synthetic import Schemes
from bench.lib.synthetic_checkpoint import write_checkpoint
from bench.server.agent import SYSTEM, tool_output

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator
    from collections.abc import Sequence as Ordered

    from torch import Tensor

    from appliance.engine.engine import LLMEngine
    from appliance.engine.run.sampler import Sampler

ROOT = Path(__file__).resolve().parents[3]
MAX_PROMPT = 1200  # tokens
CALLS = ("search_documents", "read_calendar", "send_message")
WORDS = [
    "the", "a", "of", "and", "to", "in", "that", "it", "was", "he",
    "for", "on", "are", "with", "as", "his", "they", "at", "be", "this",
    "from", "have", "or", "by", "one", "had",
]  # fmt: skip


class Turn(NamedTuple):
    """A prompt, and the answer that the model is made to give."""

    prompt: list[int]
    answer: list[int]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return a text's tokens, without those that a tokenizer puts around it."""
    return tokenizer.encode(text, add_special_tokens=False)


def rewrites(tokenizer: Tokenizer, count: int) -> Iterator[Turn]:
    """Yield changes of files from this project's history; without one, edits of its files."""
    found = 0
    for path in sorted((ROOT / "appliance" / "engine").rglob("*.py")):
        new = path.read_text()
        old = before_last_change(path) or edited(new)
        prompt = encode(tokenizer, f"Rewrite this file.\n\n{old}\n\nThe file:\n\n")
        if old != new and 200 < len(prompt) < MAX_PROMPT:
            yield Turn(prompt, encode(tokenizer, new))
            found += 1
            if found == count:
                return


def before_last_change(path: Path) -> str:
    """Return a file's text before the last commit that changed it; empty if there is none."""
    log = ["git", "-C", str(ROOT), "log", "-2", "--format=%h", "--", str(path)]
    commits = subprocess.run(log, capture_output=True, text=True, check=False).stdout.split()
    if len(commits) < 2:
        return ""
    show = ["git", "-C", str(ROOT), "show", f"{commits[1]}:{path.relative_to(ROOT)}"]
    return subprocess.run(show, capture_output=True, text=True, check=False).stdout


def edited(text: str) -> str:
    """Leave out a line in ten."""
    noise = random.Random(len(text))
    return "".join(line for line in text.splitlines(keepends=True) if noise.random() > 0.1)


def summaries(tokenizer: Tokenizer, count: int) -> Iterator[Turn]:
    """Yield answers of which every second sentence stands in the prompt."""
    pages = (ROOT / "appliance" / "docs").glob("*.md")
    for page in sorted(pages)[:count]:
        sentences = page.read_text().replace("\n", " ").split(". ")[:30]
        own = (" ".join(random.Random(at).choices(WORDS, k=12)) for at in range(30))
        answer = ". ".join(part for pair in zip(sentences[::3], own, strict=False) for part in pair)
        prompt = encode(tokenizer, "Summarize:\n\n" + ". ".join(sentences))[:MAX_PROMPT]
        yield Turn(prompt, encode(tokenizer, answer))


def tool_calls(tokenizer: Tokenizer, count: int) -> Iterator[Turn]:
    """Yield JSON with the same names and other values."""
    for seed in range(count):
        noise = random.Random(seed)
        calls = [
            f'{{"name": "{noise.choice(CALLS)}", "arguments": {{"query": '
            f'"{" ".join(noise.choices(WORDS, k=3))}", "limit": {noise.randrange(99)}}}}}'
            for _ in range(30)
        ]
        yield Turn(encode(tokenizer, "Call the tools."), encode(tokenizer, "\n".join(calls)))


def prose(tokenizer: Tokenizer, count: int) -> Iterator[Turn]:
    """Yield words in a random order."""
    for seed in range(count):
        text = " ".join(random.Random(seed).choices(WORDS, k=600))
        yield Turn(encode(tokenizer, "Tell me something."), encode(tokenizer, text))


KINDS = {"rewrite": rewrites, "summary": summaries, "tool_call": tool_calls, "prose": prose}
AGENT_TURNS, AGENT_TOKENS = 8, 100


@contextmanager
def replaying(sampler: Sampler, answers: dict[str, list[int]]) -> Iterator[None]:
    """Make every row draw the token of its answer, at the full cost of sampling."""
    draw, stage = sampler._sample_tokens, sampler.stage
    wanted: list[int] = []

    def staged(entries: Any, arrays: Any) -> Any:
        wanted[:] = [
            answers[entry.sequence.request.request_id][entry.end - entry.sequence.num_prompt_tokens]
            for entry in entries
        ]
        return stage(entries, arrays)

    def drawn(logits: Tensor, rows: Any) -> Tensor:
        tokens = draw(logits, rows)
        tokens.numpy()[:] = wanted
        return tokens

    with patch.object(sampler, "_sample_tokens", drawn), patch.object(sampler, "stage", staged):
        yield


def agent_turns(engine: LLMEngine, tokenizer: Tokenizer, count: int) -> Iterator[Turn]:
    """Yield turns of conversations, with the greedy replies of an engine without drafts."""
    talks = [[{"role": "system", "content": SYSTEM}] for _ in range(count)]
    for number in range(AGENT_TURNS):
        for who, messages in enumerate(talks):
            output = tool_output(60, 1000 * who + number)
            messages.append({"role": "user", "content": f"Output of the tool:\n{output}"})
            prompt = tokenizer.encode_chat(messages)
            turn = Turn(prompt, [0] * (16 + AGENT_TOKENS))
            answers = Answers(engine, [turn], AGENT_TOKENS, f"agent {who} {number}")
            while answers.has_work:
                answers.step()
            (reply,) = answers.said.values()
            messages.append({"role": "assistant", "content": tokenizer.decode(reply)})
            if number == AGENT_TURNS - 1:
                yield Turn(prompt, reply + [0] * 16)


class Answers:
    """Answers of one engine to turns, all at once; counts and times steps that hold no prompt.

    Answers of another `salt` are not copied.
    """

    def __init__(self, engine: LLMEngine, turns: list[Turn], max_tokens: int, salt: str) -> None:
        self.said: dict[str, list[int]] = {f"{number}": [] for number in range(len(turns))}
        self.answers = {f"{number}": turn.answer for number, turn in enumerate(turns)}
        self.seconds = self.processor_seconds = 0.0
        self.tokens = self.steps = self.rows = 0
        self._engine = engine
        for number, turn in enumerate(turns):
            most = min(max_tokens, len(turn.answer) - 16)
            sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
            engine.submit(
                Request(
                    request_id=f"{number}",
                    prompt_token_ids=tuple(turn.prompt),
                    sampling=sampling,
                    cache_salt=salt,
                )
            )
        self._before = engine.stats()

    def step(self) -> None:
        """Run a step, if there is one left."""
        if not self._engine.has_work:
            return
        begin, spent = time.perf_counter(), time.process_time()
        report = self._engine.step()
        took, used = time.perf_counter() - begin, time.process_time() - spent
        stats = self._engine.stats()
        for delta in report.deltas:
            self.said[delta.request_id].extend(delta.token_ids)
        if stats.step_prefill_tokens == 0 and report.deltas:
            self.seconds += took
            self.processor_seconds += used
            self.steps += 1
            self.tokens += sum(len(delta.token_ids) for delta in report.deltas)
            self.rows += stats.step_decode_tokens

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def drafted(self) -> int:
        return self._engine.stats().draft_tokens_total - self._before.draft_tokens_total

    @property
    def accepted(self) -> int:
        return self._engine.stats().accepted_tokens_total - self._before.accepted_tokens_total


def compare(
    engines: Ordered[LLMEngine], turns: list[Turn], max_tokens: int, repeats: int
) -> dict[str, Any]:
    """Run turns on an engine that speculates and on one that does not, a step of each in turn."""
    runs: list[tuple[Answers, Answers]] = []
    for repeat in range(repeats + 1):
        on, off = (Answers(engine, turns, max_tokens, f"{repeat}") for engine in engines)
        samplers = [engine.runner._sampler for engine in engines]  # type: ignore[attr-defined]
        with replaying(samplers[0], on.answers), replaying(samplers[1], off.answers):
            while on.has_work or off.has_work:
                on.step()
                off.step()
        assert on.said == off.said, "speculation changed an answer"
        runs.append((on, off))
    on, off = runs[-1]
    del runs[0]  # it warms up
    speeds, used = (
        [[one.tokens / getattr(one, spent) for one in pair] for pair in runs]
        for spent in ("seconds", "processor_seconds")
    )
    return {
        "tokens": on.tokens,
        "steps_ratio": round(off.steps / on.steps, 3),
        "rows_per_token": round(on.rows / on.tokens, 3),
        "drafted": on.drafted,
        "accepted": on.accepted,
        "tokens_per_second": spread([pair[0] for pair in speeds]),
        "tokens_per_second_off": spread([pair[1] for pair in speeds]),
        "speed_ratio": round(statistics.median(with_ / without for with_, without in speeds), 3),
        "processor_ratio": round(statistics.median(with_ / without for with_, without in used), 3),
    }


def load(model: Path, options: Namespace, speculate: str) -> LLMEngine:
    config = EngineConfig(
        model=str(model),
        threads=options.threads,
        max_model_len=4096,
        max_num_seqs=options.streams,
        speculate=speculate,
        kv_cache_memory=2**29,
    )
    return load_llm_engine(config, eos_token_ids=(), metadata=None, on_progress=lambda *_: None)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "agent"], default=list(KINDS))
    parser.add_argument("--shape", choices=DENSE, default="", help="random weights instead")
    options = parser.parse_args()
    path = resolve_model(options.model, cache_dir=cache_dir(), progress=lambda *_: None).path
    with tempfile.TemporaryDirectory() as folder:
        model = path
        if options.shape:
            model = Path(folder) / options.shape
            ends = WeightScheme(8, 32)
            write_checkpoint(model, DENSE[options.shape], Schemes(WeightScheme(4, 64), ends, ends))
        engines = [load(model, options, speculate) for speculate in ("auto", "off")]
    tokenizer = Tokenizer.from_path(path)
    result: dict[str, Any] = {
        "benchmark": "speculation",
        "conditions": conditions(),
        "model": options.shape or engines[0].info.model,
        "weights": engines[0].info.weight_format,
        "streams": options.streams,
    }
    for kind in options.kinds:
        if kind == "agent":
            turns = list(agent_turns(engines[1], tokenizer, options.streams))
        else:
            turns = list(KINDS[kind](tokenizer, options.streams))
        result[kind] = compare(engines, turns, options.max_tokens, options.repeats)
    write_result(options.out, result)


if __name__ == "__main__":
    main()
