"""Time answers that copy their prompt, beside llama.cpp with each of its n-gram drafts.

    scripts/benchmark copied_text --peer FOLDER  # where the package xllamacpp is installed

The prompt holds a text twice and its beginning a third time, so that the real weights go on by
copying: both programs say the same, which is counted (`agreed`), and nothing is replayed. Tokens a
second are those of decoding alone. llama.cpp's numbers are what its own server takes, without HTTP;
its default settings hold for each kind of drafts, the best of which `ratio` is over.
"""

from __future__ import annotations

import statistics
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

from appliance import LLM
from appliance.bench.figures import spread
from appliance.engine.request import Request
from appliance.engine.sampling_params import SamplingParams
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import ROOT, conditions
from bench.lib.llama_peer import Peer

DRAFTS = ("NONE", "NGRAM_SIMPLE", "NGRAM_MAP_K", "NGRAM_MAP_K4V", "NGRAM_MOD", "NGRAM_CACHE")
TEXT_TOKENS = 320
GIVEN_TOKENS = 24  # of the third time


def prompts(llm: LLM, streams: int) -> list[list[int]]:
    """Return the tokens of prompts, each of which quotes another page of the docs."""
    found = []
    for page in sorted((ROOT / "appliance" / "docs").glob("*.md"))[:streams]:
        text = llm.tokenizer.encode(page.read_text(), add_special_tokens=False)[:TEXT_TOKENS]
        found.append([*text, *text, *text[:GIVEN_TOKENS]])
    return found


def ours(llm: LLM, asked: list[list[int]], most: int, salt: str) -> tuple[float, list[str]]:
    """Return tokens a second of steps without a prompt, and the answers."""
    engine = llm.engine
    for number, prompt in enumerate(asked):
        sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        engine.submit(
            Request(
                request_id=f"{number}",
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                cache_salt=salt,
            )
        )
    found: list[list[int]] = [[] for _ in asked]
    seconds, tokens = 0.0, 0
    while engine.has_work:
        begin = time.perf_counter()
        report = engine.step()
        took = time.perf_counter() - begin
        for delta in report.deltas:
            found[int(delta.request_id)].extend(delta.token_ids)
        if report.deltas and engine.stats().step_prefill_tokens == 0:
            seconds += took
            tokens += sum(len(delta.token_ids) for delta in report.deltas)
    return tokens / seconds, [llm.tokenizer.decode(tokens) for tokens in found]


def theirs(peer: Peer, asked: list[list[int]], most: int) -> tuple[float, list[str]]:
    """Return tokens a second of all streams while they decode, and the answers."""
    common = {
        "n_predict": most,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    answered = peer.ask({"bodies": [{"prompt": prompt, **common} for prompt in asked]})
    took = max(one["timings"]["predicted_ms"] for one in answered) / 1e3
    tokens = sum(one["timings"]["predicted_n"] for one in answered)
    return tokens / took, [one["choices"][0]["text"] for one in answered]


def agreed(one: list[str], other: list[str]) -> float:
    """Return the share of characters before two sets of answers part."""
    same = 0
    for pair in zip(one, other, strict=True):
        same += sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*pair, strict=False)))
    return same / sum(map(len, one))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--peer", type=Path, help="folder with the package xllamacpp")
    parser.add_argument("--model", default="", help="a GGUF file; default: the packaged model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    llm = LLM(
        options.model,
        threads=options.threads,
        max_model_len=1024,
        max_num_seqs=max(options.streams),
    )
    result: dict[str, Any] = {
        "benchmark": "copied_text",
        "conditions": conditions(),
        "model": llm.engine.info.model,
        "threads": options.threads,
    }
    for streams in options.streams:
        result[f"{streams} streams"] = compare(llm, prompts(llm, streams), options)
    write_result(options.out, result)


def compare(llm: LLM, asked: list[list[int]], options: Any) -> dict[str, Any]:
    """Run all in turn; the first turn warms up."""
    peers = {}
    if options.peer is not None:
        peers = {
            drafts: Peer(options.peer, Path(llm.path), options.threads, len(asked), drafts=drafts)
            for drafts in DRAFTS
        }
    scheduler = llm.engine._scheduler
    speculator = scheduler._speculator
    speeds: dict[str, list[float]] = {}
    answers: dict[str, list[str]] = {}
    for turn in range(options.repeats + 1):
        for name, drafting in (("ours", speculator), ("ours, no drafts", None)):
            scheduler._speculator = drafting
            speed, answers[name] = ours(llm, asked, options.max_tokens, f"{turn} {name}")
            speeds.setdefault(name, []).append(speed)
        scheduler._speculator = speculator
        for name, peer in peers.items():
            speed, answers[name] = theirs(peer, asked, options.max_tokens)
            speeds.setdefault(name, []).append(speed)
    for peer in peers.values():
        peer.close()
    medians = {name: statistics.median(taken[1:]) for name, taken in speeds.items()}
    found: dict[str, Any] = {
        "tokens_per_second": {name: spread(taken[1:]) for name, taken in speeds.items()},
        "agreed": {name: round(agreed(answers["ours"], one), 3) for name, one in answers.items()},
        "over_no_drafts": round(medians["ours"] / medians["ours, no drafts"], 3),
    }
    if peers:
        best = max(peers, key=lambda name: medians[name])
        found["best_peer"] = best
        found["ratio"] = round(medians["ours"] / medians[best], 3)
    return found


if __name__ == "__main__":
    main()
