"""Measure the engine end to end, without HTTP, on random weights in the shape of Llama-3-8B.

For each KV cache, with and without CUDA graphs: decoding at several numbers of streams, prompts,
how long the GPU waits between two steps, and the memory in use beside the plan.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from appliance.bench.figures import spread
from bench.gpu.device_model import load_engine
from bench.gpu.plan import Amount
from bench.gpu.requests import Sizes, decode_rate, idle_share, prefill_rate, throughput

if TYPE_CHECKING:
    from appliance.engine.engine import LLMEngine
    from bench.gpu.plan import Wanted
    from bench.gpu.rows import Rows

CARD_BYTES = int(0.9 * 24 * 2**30)  # what a server may take on a 24 GiB card


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of an engine."""

    weights: str = "int4"
    kv: str = "int8"
    graphs: str = "auto"

    @property
    def key(self) -> dict[str, Any]:
        """Return the key of a row."""
        return {
            "engine": "ours",
            "weights": self.weights,
            "kv": self.kv,
            "graphs": self.graphs,
        }


FIRST = (Setup(), Setup(graphs="off"), Setup(kv="bf16"), Setup(kv="int4-sealed"))
SETUPS = {
    Amount.TINY: FIRST[:2],
    Amount.FIRST: FIRST,
    Amount.FULL: (*FIRST, Setup(kv="fp8"), Setup(kv="int4-rotated"), Setup("bf16", "bf16")),
}
STREAMS = {
    Amount.TINY: (1, 3),
    Amount.FIRST: (1, 64, 16),
    Amount.FULL: (1, 64, 16, 4, 32),
}
PROMPTS = {Amount.TINY: (40,), Amount.FIRST: (2048, 8192), Amount.FULL: (512, 2048, 8192)}
SIZES = {
    Amount.TINY: Sizes(20, 6, 1),
    Amount.FIRST: Sizes(256, 128, 2),
    Amount.FULL: Sizes(256, 128, 3),
}


@dataclass
class Loaded:
    """Holds at most one engine, loaded when it is first needed."""

    amount: Amount
    setup: Setup | None = None
    engine: LLMEngine | None = None
    bytes_before: int = 0
    warm: set[int] = field(default_factory=set)  # numbers of streams that have their graphs

    def get(self, setup: Setup) -> LLMEngine:
        """Return the engine of a setup."""
        if self.engine is None or self.setup != setup:
            self.drop()
            self.bytes_before = device_bytes()
            self.engine = load_engine(
                self.amount, setup.kv, weights=setup.weights, graphs=setup.graphs
            )
            self.setup, self.warm = setup, set()
        return self.engine

    def drop(self) -> None:
        """Free the engine with its graphs and cache."""
        self.engine = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def device_bytes() -> int:
    """Return bytes of the GPU in use by any process; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def measure(rows: Rows, wanted: Wanted) -> None:
    """Measure each setup, the default one first."""
    loaded, amount = Loaded(wanted.amount), wanted.amount
    for number, setup in enumerate(SETUPS[amount]):
        for streams in STREAMS[amount]:
            key = {**setup.key, "what": "decode", "streams": streams}
            rows.note(key, partial(_decode, loaded, setup, streams))
        if amount is Amount.FULL or number == 0:
            for tokens in PROMPTS[amount]:
                key = {**setup.key, "what": "prefill", "tokens": tokens}
                rows.note(key, partial(_prefill, loaded, setup, tokens))
        if rows.bench.is_gpu and setup.graphs != "off":
            for streams in (1, 16):
                key = {**setup.key, "what": "idle share", "streams": streams}
                rows.note(key, partial(_idle, loaded, setup, streams))
        rows.note({**setup.key, "what": "memory"}, partial(_memory, loaded, setup))
    if amount is Amount.FULL:
        for setup in SETUPS[amount]:
            key = {**setup.key, "what": "64 requests on a card of 24 GiB"}
            rows.note(key, partial(_within_a_card, loaded, setup))


def _decode(loaded: Loaded, setup: Setup, streams: int) -> dict[str, Any]:
    engine, sizes = loaded.get(setup), SIZES[loaded.amount]
    if streams not in loaded.warm:
        decode_rate(engine, streams, sizes)
        loaded.warm.add(streams)
    rates = [decode_rate(engine, streams, sizes) for _ in range(sizes.repeats)]
    return {"tokens_per_second": spread(rates)}


def _prefill(loaded: Loaded, setup: Setup, tokens: int) -> dict[str, Any]:
    engine, repeats = loaded.get(setup), SIZES[loaded.amount].repeats
    prefill_rate(engine, tokens)
    return {"tokens_per_second": spread([prefill_rate(engine, tokens) for _ in range(repeats)])}


def _idle(loaded: Loaded, setup: Setup, streams: int) -> dict[str, Any]:
    return {"idle_share": idle_share(loaded.get(setup), streams, SIZES[loaded.amount])}


def _memory(loaded: Loaded, setup: Setup) -> dict[str, Any]:
    """Compare the most memory in use so far with the plan."""
    info = loaded.get(setup).info
    found: dict[str, Any] = {
        "backend": info.backend,
        "weight_format": info.weight_format,
        "weight_bytes": info.weight_bytes,
        "workspace_bytes": info.workspace_bytes,
        "kv_bytes": info.kv_bytes,
        "load_seconds": round(info.load_seconds, 2),
    }
    if torch.cuda.is_available():
        planned = info.weight_bytes + info.workspace_bytes + info.kv_bytes
        # What torch had at most since the last graph was captured, prompts included, and what
        # others have beside it.
        at_most = torch.cuda.max_memory_reserved()
        used = at_most + device_bytes() - torch.cuda.memory_reserved() - loaded.bytes_before
        found |= {
            "planned_bytes": planned,
            "used_bytes": used,
            "used_of_planned": round(used / planned, 4),
            "torch_reserved_at_most": at_most,
        }
    return found


def _within_a_card(loaded: Loaded, setup: Setup) -> dict[str, Any]:
    """Measure throughput of many requests with the cache that fits a smaller card."""
    budget = CARD_BYTES - loaded.get(setup).info.weight_bytes
    loaded.drop()
    engine = load_engine(
        loaded.amount, setup.kv, weights=setup.weights, graphs=setup.graphs, kv_bytes=budget
    )
    throughput(engine, 64, SIZES[loaded.amount])
    rate = throughput(engine, 64, SIZES[loaded.amount])
    return {"kv_bytes": engine.info.kv_bytes, "tokens_per_second": round(rate, 1)}
