"""Compare an encoder here with sentence-transformers' `encode` on texts of unlike lengths.

    scripts/benchmark encoders FOLDER             # such as all-MiniLM-L6-v2
    scripts/benchmark encoders FOLDER --profile   # and where sentence-transformers' time goes

It needs sentence-transformers beside our environment: pip install sentence-transformers. That sorts
texts by length and pads them in batches of 32, in float32. Here the same texts are read in float32,
and with --weight-bits 8. All take turns in one process, tokenization included. `ratio` is texts a
second over theirs, by processor seconds, which other work changes least, and by wall clock;
`most_off` is the largest difference of an element of a vector, `least_alike` the lowest cosine.
`linears` are the products of the layers' matrices alone: billions of operations for each processor
second of all the work, beside those of torch's product of a large matrix in float32.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.bench.figures import spread
from appliance.bench.prompts import WORDS
from appliance.config import EngineConfig
from appliance.engine.load_engine import load_engine
from appliance.engine.request import Pooling, Request
from appliance.engine.sampling_params import SamplingParams
from appliance.tokenizer import Tokenizer
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

BATCH = 32  # as sentence-transformers has it
READ = SamplingParams(max_tokens=0, temperature=0.0)
_names = count()


def some_texts(number: int) -> list[str]:
    """Draw texts of 3 to 200 words, half of them below 30."""
    chance = random.Random(0)
    sizes = [min(200, max(3, int(chance.lognormvariate(3.4, 0.9)))) for _ in range(number)]
    return [" ".join(chance.choices(WORDS, k=size)) for size in sizes]


class Ours:
    """The engine of an encoder with its tokenizer."""

    def __init__(self, folder: Path, threads: int, bits: int | None) -> None:
        config = EngineConfig(
            model=str(folder), device="cpu", threads=threads, max_num_seqs=BATCH, weight_bits=bits
        )
        self.tokenizer = Tokenizer.from_path(folder)
        self.engine = load_engine(
            config, eos_token_ids=(), metadata=None, on_progress=lambda *_: None
        )

    def encode(self, texts: list[str]) -> Vectors:
        """Return the texts' means, of length 1."""
        names = [f"bench-{next(_names)}" for _ in texts]
        for name, text in zip(names, texts, strict=True):
            ids = tuple(self.tokenizer.encode(text, add_special_tokens=True))
            self.engine.submit(
                Request(request_id=name, prompt_token_ids=ids, sampling=READ, pooling=Pooling.MEAN)
            )
        found: dict[str, Vectors] = {}
        while self.engine.has_work:
            for delta in self.engine.step().deltas:
                assert delta.pooled is not None, delta.error
                found[delta.request_id] = np.asarray(array("f", delta.pooled), dtype=np.float32)
        vectors = np.stack([found[name] for name in names])
        normed: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return normed


def padding(lengths: list[int]) -> float:
    """Return what sentence-transformers computes over what there is, in tokens."""
    ordered = sorted(lengths, reverse=True)
    batches = [ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH)]
    return sum(max(batch) * len(batch) for batch in batches) / sum(lengths)


def shares(work: Callable[[], Any]) -> dict[str, float]:
    """Return the shares of processor time of torch's operations, the largest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    spent = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    total = sum(spent.values())
    ordered = sorted(spent, key=spent.__getitem__, reverse=True)
    return {key: round(spent[key] / total, 3) for key in ordered[:12]}


def gigaflops(peer: Any, tokens: int) -> float:
    """Count what the layers' matrices cost: two operations for each weight and token."""
    sizes: list[int] = [
        each.numel() for name, each in peer.named_parameters() if is_in_layers(name, each)
    ]
    return 2e-9 * tokens * sum(sizes)


def is_in_layers(name: str, parameter: Any) -> bool:
    return parameter.dim() == 2 and ".layer" in name


def product_rate(width: int) -> float:
    """Return billions of operations a processor second of torch's float32 product."""
    import torch

    rows, matrix = torch.randn(2048, width), torch.randn(width, 4 * width)
    torch.mm(rows, matrix)
    seconds = timed(lambda: [torch.mm(rows, matrix) for _ in range(20)])[0]
    return 20 * 2e-9 * rows.numel() * 4 * width / seconds


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the processor's seconds and the wall clock's."""
    begin, begin_wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - begin, time.perf_counter() - begin_wall


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if find_spec("sentence_transformers") is None:
        raise SystemExit("sentence-transformers is not there: pip install sentence-transformers")
    import torch

    torch.set_num_threads(options.threads)
    texts = some_texts(options.texts)
    library = import_module("sentence_transformers")
    peer = library.SentenceTransformer(str(options.folder), device="cpu")
    peer.max_seq_length = 512
    ours = {
        "float32": Ours(options.folder, options.threads, None),
        "8 bits": Ours(options.folder, options.threads, 8),
    }

    def encode() -> Vectors:
        found: Vectors = peer.encode(texts, batch_size=BATCH, normalize_embeddings=True)
        return found

    wanted = encode()
    vectors = {name: one.encode(texts) for name, one in ours.items()}
    rounds = [
        {
            "peer": timed(encode),
            **{name: timed(partial(one.encode, texts)) for name, one in ours.items()},
        }
        for _ in range(options.repeats)
    ]
    tokenizer = ours["float32"].tokenizer
    lengths = [len(tokenizer.encode(text, add_special_tokens=True)) for text in texts]
    linears = gigaflops(peer, sum(lengths))
    result = {
        "benchmark": "encoders",
        "conditions": conditions(),
        "model": options.folder.name,
        "threads": options.threads,
        "backend": ours["float32"].engine.info.backend,
        "tokens": sum(lengths),
        "padding": round(padding(lengths), 3),
        "linears": {
            "gigaflops": round(linears, 1),
            "per_processor_second": {
                name: round(linears / statistics.median(each[name][0] for each in rounds), 1)
                for name in ours
            },
            "torch_product": round(product_rate(vectors["float32"].shape[1]), 1),
        },
        "texts_per_processor_second": {
            name: spread([len(texts) / each[name][0] for each in rounds]) for name in rounds[0]
        },
        "ratio": {
            name: {
                "processor": round(statistics.median(r["peer"][0] / r[name][0] for r in rounds), 2),
                "wall": round(statistics.median(r["peer"][1] / r[name][1] for r in rounds), 2),
                "most_off": float(np.abs(vectors[name] - wanted).max()),
                "least_alike": float((vectors[name] * wanted).sum(1).min()),
            }
            for name in ours
        },
        "peer_profile": shares(encode) if options.profile else None,
    }
    write_result(options.out, result)
