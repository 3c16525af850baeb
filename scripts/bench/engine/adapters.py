"""Measure what adapters cost: steps with none, one and several, loading, and Zipf traffic.

    scripts/benchmark adapters                       # the packaged default model, one thread
    scripts/benchmark adapters --adapters 100 --slots 8 --requests 400
    scripts/benchmark adapters --shape 1B --adapters 8 --requests 8   # random weights of 4 bits

Decode steps of two engines in one process are compared pair by pair. With one thread they are
measured in processor time, so that other work on the machine counts little:

- `unused_ratio`: slots for adapters that no request uses, over an engine without slots.
- `one_ratio`: batch 1 with an adapter over batch 1 without.
- `several_ratio`: a batch of `--slots` requests with an adapter each over the same without.

Traffic: more adapters are registered than there are slots, requests choose theirs by Zipf's law,
and a fixed number of them is open at any time. The same requests without adapters run in
alternation. `slot_hits` counts requests whose adapter was in a slot when they came.

With `--peer FOLDER`, where the package xllamacpp is installed, llama.cpp answers a request for each
slot with an adapter of its own, from the same factors, in alternation with ours. `peer_ratio` is
our tokens a second, while answers grow, over its.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.bench.figures import spread
from appliance.config import EngineConfig, cache_dir
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.hub import resolve_model
from appliance.quant.formats.scheme import WeightScheme
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.llama_peer import Peer
from bench.lib.model_shapes import LLAMA_1B, TINY_LLAMA
from bench.lib.prompts import random_tokens
from bench.lib.random_adapters import write_adapters, write_gguf_adapters
from bench.lib.synthetic import Schemes
from bench.lib.synthetic_checkpoint import write_checkpoint

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from appliance.engine.engine import LLMEngine
    from appliance.engine.nouns.request import AdapterRef

PROMPT_TOKENS = 32
VOCABULARY = 1000  # tokens that every model has
SHAPES = {"1B": LLAMA_1B, "tiny": TINY_LLAMA}


def request(name: str, seed: int, tokens: int, adapter: AdapterRef | None) -> Request:
    """Return a request whose prompt is unlike any other."""
    return Request(
        request_id=name,
        prompt_token_ids=tuple(random_tokens(PROMPT_TOKENS, random.Random(seed), VOCABULARY)),
        sampling=SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        adapter=adapter,
    )


def model_at(options: Namespace, folder: Path) -> Path:
    """Return the model to serve, which is written into `folder` if only its shape is given."""
    if options.shape is None:
        return Path(resolve_model(options.model, cache_dir=cache_dir()).path)
    path = folder / f"llama-{options.shape.lower()}-shape"
    schemes = Schemes(WeightScheme(4, 32), WeightScheme(8, 32), WeightScheme(8, 32))
    write_checkpoint(path, SHAPES[options.shape], schemes)
    return path


def load(options: Namespace, model: Path, **settings: Any) -> LLMEngine:
    config = EngineConfig(
        model=str(model),
        threads=options.threads,
        max_model_len=512,
        max_num_seqs=max(options.slots, options.open),
        prefix_caching=False,
        speculate="off",
        **settings,
    )
    return load_llm_engine(config, eos_token_ids=(), metadata=None, on_progress=lambda *_: None)


class Answers:
    """Requests of one engine that go on together, a token a step.

    Args:
        adapters: of each request.
    """

    def __init__(
        self, engine: LLMEngine, adapters: Sequence[AdapterRef | None], tokens: int
    ) -> None:
        self._engine, self._count = engine, len(adapters)
        for number, adapter in enumerate(adapters):
            engine.submit(request(f"r{number}", number, tokens, adapter))

    def step(self, clock: Callable[[], float]) -> float | None:
        """Return a step's seconds; None if it holds a prompt or not all requests."""
        begin = clock()
        self._engine.step()
        seconds, stats = clock() - begin, self._engine.stats()
        is_whole = stats.step_decode_tokens == self._count and not stats.step_prefill_tokens
        return seconds if is_whole else None

    @property
    def has_work(self) -> bool:
        return self._engine.has_work


def decode_seconds(engine: LLMEngine, adapters: Sequence[AdapterRef | None], tokens: int) -> float:
    """Return the median time of a step in which each of some requests goes on by a token."""
    answers, taken = Answers(engine, adapters, tokens), []
    while answers.has_work:
        seconds = answers.step(time.perf_counter)
        if seconds is not None:
            taken.append(seconds)
    return statistics.median(taken)


def steps(options: Namespace, bare: LLMEngine, adapted: LLMEngine, refs: list[AdapterRef]) -> Any:
    """Compare pairs of steps, one of each engine; ratios are medians over all pairs."""
    clock = time.process_time if options.threads == 1 else time.perf_counter
    none: list[AdapterRef | None] = [None] * options.slots
    kinds: dict[str, Sequence[AdapterRef | None]] = {
        "unused": none[:1],
        "one": refs[:1],
        "unused_batch": none,
        "several": refs[: options.slots],
        "same": refs[:1] * options.slots,
    }
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for turn in range(options.rounds + 1):
        for kind, adapters in kinds.items():
            both = (
                Answers(bare, [None] * len(adapters), options.tokens),
                Answers(adapted, adapters, options.tokens),
            )
            while both[0].has_work:
                base, seconds = (answers.step(clock) for answers in both)
                if turn and base is not None and seconds is not None:  # the first one warms up
                    found[kind].append((base, seconds))
            assert not both[1].has_work
    return {
        "clock": clock.__name__,
        "pairs": len(found["one"]),
        "ms": {
            kind: [round(1e3 * statistics.median(times), 3) for times in zip(*pairs, strict=True)]
            for kind, pairs in found.items()
        },
        **{
            f"{kind}_ratio": round(statistics.median(one / base for base, one in pairs), 3)
            for kind, pairs in found.items()
        },
    }


def traffic(
    options: Namespace, engine: LLMEngine, choices: Sequence[AdapterRef | None]
) -> dict[str, float]:
    """Serve requests in order, so many at a time; return counts and times."""
    pool, waiting = engine.adapters, list(enumerate(choices))
    assert pool is not None
    left, hits, begin, cpu = 0, 0, time.perf_counter(), time.process_time()
    longest = 0.0
    while waiting or engine.has_work:
        while waiting and left < options.open:
            number, adapter = waiting.pop(0)
            hits += adapter is None or (adapter.path, adapter.stamp) in pool.residents
            engine.submit(request(f"t{number}", 1000 + number, options.tokens, adapter))
            left += 1
        start = time.perf_counter()
        report = engine.step()
        if report.deltas:
            longest = max(longest, time.perf_counter() - start)
        left -= sum(delta.finish_reason is not None for delta in report.deltas)
    tokens = len(choices) * options.tokens
    return {
        "slot_hits": hits,
        "tokens_per_second": tokens / (time.perf_counter() - begin),
        "tokens_per_cpu_second": tokens / (time.process_time() - cpu),
        "longest_step_ms": 1e3 * longest,
    }


def peer_throughput(
    options: Namespace, engine: LLMEngine, refs: Sequence[AdapterRef], model: Path, folder: Path
) -> dict[str, Any]:
    """Compare tokens a second of answers that grow together, each with another adapter."""
    if options.peer is None:
        return {}
    own = refs[: options.slots]
    paths = write_gguf_adapters(folder / "gguf", model, own)
    peer = Peer(options.peer, model, options.threads, len(own), adapters=list(map(str, paths)))
    bodies = [
        {
            "prompt": random_tokens(PROMPT_TOKENS, random.Random(number), VOCABULARY),
            "n_predict": options.tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "lora": [{"id": number, "scale": 1.0}],
        }
        for number in range(len(own))
    ]
    speeds: dict[str, list[float]] = {"ours": [], "llama.cpp": []}
    for turn in range(options.rounds + 1):
        seconds = decode_seconds(engine, own, options.tokens)
        begin = time.perf_counter()
        answered = peer.ask({"bodies": bodies})
        took = time.perf_counter() - begin
        prompts = [one["timings"]["prompt_ms"] / 1e3 for one in answered]
        if turn:  # the first one warms up
            speeds["ours"].append(len(own) / seconds)
            tokens = sum(one["timings"]["predicted_n"] for one in answered)
            speeds["llama.cpp"].append(tokens / (took - sum(prompts)))
    peer.close()
    pairs = zip(speeds["ours"], speeds["llama.cpp"], strict=True)
    return {
        "tokens_per_second": {name: spread(found) for name, found in speeds.items()},
        "peer_ratio": round(statistics.median(one / other for one, other in pairs), 3),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged one")
    parser.add_argument("--shape", choices=SHAPES, help="of a model of random weights instead")
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--open", type=int, default=8, help="requests at a time")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer", type=Path, help="folder with the package xllamacpp")
    options = parser.parse_args()
    if options.shape is not None and options.peer is not None:
        parser.error("--peer needs a GGUF file as --model, not --shape")

    folder = Path(tempfile.mkdtemp(prefix="adapters-"))
    try:
        model, adapters = model_at(options, folder), folder / "adapters"
        bare = load(options, model)
        refs = write_adapters(adapters, model, options.adapters, options.rank)
        adapted = load(
            options,
            model,
            lora_dir=str(adapters),
            max_loras=options.slots,
            max_lora_rank=options.rank,
        )
        pool = adapted.adapters
        assert pool is not None
        loads: list[float] = []
        read = pool._loader.load

        def timed(ref: AdapterRef) -> Any:
            begin = time.thread_time()
            loaded = read(ref)
            loads.append(time.thread_time() - begin)
            return loaded

        pool._loader.load = timed  # type: ignore[method-assign]
        for ref in refs[: options.slots]:
            pool.install(ref)
        compared = steps(options, bare, adapted, refs)
        beside = peer_throughput(options, adapted, refs, model, folder)
        loads.clear()
        shares = [(1 + place) ** -options.zipf for place in range(len(refs))]
        chosen = random.Random(0).choices(refs, shares, k=options.requests)
        plain = traffic(options, adapted, [None] * options.requests)
        mixed = traffic(options, adapted, chosen)
        again = traffic(options, adapted, [None] * options.requests)
    finally:
        shutil.rmtree(folder)
    per_cpu = statistics.mean(one["tokens_per_cpu_second"] for one in (plain, again))
    result = {
        "benchmark": "adapters",
        "conditions": conditions(),
        "model": bare.info.model,
        "rank": options.rank,
        "adapter_mb": round(adapted.info.adapter_bytes / (options.slots + 1) / 1e6, 1),
        "steps": compared,
        **beside,
        "traffic": {
            "adapters": options.adapters,
            "distinct_adapters": len({one.name for one in chosen}),
            "slots": options.slots,
            "open": options.open,
            "requests": options.requests,
            "slot_hits": mixed["slot_hits"],
            "loads": len(loads),
            "load_cpu_ms": round(1e3 * statistics.median(loads), 1) if loads else None,
            "longest_step_ms": round(mixed["longest_step_ms"], 1),
            "longest_step_ms_without": round(plain["longest_step_ms"], 1),
            "cpu_throughput_ratio": round(mixed["tokens_per_cpu_second"] / per_cpu, 3),
        },
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
