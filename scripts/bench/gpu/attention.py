"""Check and time steps of paged attention over every KV format."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from appliance.kernels.attention import reference
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.rows.ragged import RaggedBatch
from bench.gpu.backend import our_backend
from bench.gpu.rows import Contender, Rows, Work, relative_error

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cache.kv_cache import LayerCache
    from appliance.kernels.operations import Backend
    from bench.gpu.attention_peers import Peer
    from bench.gpu.plan import Wanted
    from bench.gpu.timing import Bench, Call

BLOCK = 32
FORMATS = (KVFormat.BF16, KVFormat.FP8, KVFormat.INT8, KVFormat.INT4)
ROWS_AT_ONCE = 1 << 16  # of keys that are written
CHECKED = 2  # sequences, in float64
# The probabilities are rounded to the type of the values before the second product.
ERROR_BOUND = 1e-2


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of one layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA = Heads("llama_8b", 32, 8, 128)
TINY = Heads("tiny", 4, 2, 64)


@dataclass(frozen=True, slots=True)
class Problem:
    """One step: the last `rows` of each of `batch` sequences attend."""

    heads: Heads
    format: KVFormat
    batch: int
    rows: int
    context: int
    device: torch.device
    dtype: torch.dtype

    @property
    def blocks(self) -> int:
        """Blocks of one sequence."""
        return -(-self.context // BLOCK)

    @property
    def size(self) -> dict[str, int]:
        """Sizes that name the problem beside its heads and format."""
        return {"batch": self.batch, "rows": self.rows, "context": self.context}

    def kv_bytes(self) -> int:
        """Bytes of all keys and values with their scales."""
        heads = self.heads
        per_token = KVPages.bytes_per_token(self.format, heads.num_kv_heads, heads.head_dim)
        return self.batch * self.context * per_token

    def ragged(self, copy: int) -> RaggedBatch:
        """Return the step over one copy's blocks of the cache, in a shuffled order."""
        count = self.batch * self.blocks
        order = torch.randperm(count, generator=torch.Generator().manual_seed(copy))
        tables = (order + copy * count).view(self.batch, -1).tolist()
        return RaggedBatch.of(
            [self.rows] * self.batch,
            [self.context] * self.batch,
            tables,
            block_size=BLOCK,
            device=self.device,
        )

    def query(self) -> Tensor:
        """Return random queries (num_tokens, num_heads, head_dim)."""
        shape = (self.batch * self.rows, self.heads.num_heads, self.heads.head_dim)
        return torch.randn(shape, device=self.device).to(self.dtype)

    def work(self, kernel: str, nbytes: int) -> Work:
        """Return bytes and operations of one call."""
        seen = self.rows * self.context - self.rows * (self.rows - 1) // 2
        flops = 4 * self.batch * self.heads.num_heads * self.heads.head_dim * seen
        query = 4 * self.batch * self.rows * self.heads.num_heads * self.heads.head_dim
        return Work(kernel, self.heads.name, self.size, nbytes + query, flops)


def filled_cache(backend: Backend, bench: Bench, problem: Problem, copies: int) -> LayerCache:
    """Return a cache whose blocks hold random keys and values, written by the backend."""
    heads = problem.heads
    num_blocks = copies * problem.batch * problem.blocks
    cache = backend.allocate_cache(
        problem.format,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        device=bench.device,
    )
    generator = torch.Generator(bench.device).manual_seed(0)
    for start in range(0, num_blocks * BLOCK, ROWS_AT_ONCE):
        slots = torch.arange(
            start, min(start + ROWS_AT_ONCE, num_blocks * BLOCK), device=bench.device
        )
        shape = (2, len(slots), heads.num_kv_heads, heads.head_dim)
        key, value = torch.randn(shape, device=bench.device, generator=generator).to(bench.dtype)
        backend.write_kv(key, value, cache, slots)
    return cache


def ours(bench: Bench, problem: Problem) -> Contender:
    backend = our_backend(bench)
    copies = bench.copies(problem.kv_bytes()) if bench.is_gpu else 1
    cache, query = filled_cache(backend, bench, problem, copies), problem.query()
    scale = problem.heads.head_dim**-0.5

    def call(batch: RaggedBatch) -> Call:
        work = backend.plan_attention(batch, BLOCK)
        return partial(backend.paged_attention, query, cache, work, scale=scale)

    def calls() -> list[Call]:
        return [call(problem.ragged(copy)) for copy in range(copies)]

    def error(first: Call) -> tuple[float, float]:
        count = min(CHECKED, problem.batch)
        batch = problem.ragged(0)
        few = RaggedBatch.of(
            batch.host_query_lens[:count],
            batch.host_context_lens[:count],
            batch.block_tables[:count].tolist(),
            block_size=BLOCK,
            device=bench.device,
        )
        rows = count * problem.rows
        last = max(1, min(rows, 256))  # the last rows of a long chunk see the most
        if problem.rows > 256:
            few = RaggedBatch.of(
                [last], [problem.context], batch.block_tables[:1].tolist(),
                block_size=BLOCK, device=bench.device,
            )  # fmt: skip
            rows = problem.rows
        chosen = slice(rows - last, rows)
        expected = reference.paged_attention(query[chosen].double(), cache, few, scale=scale)
        out = first()
        assert isinstance(out, torch.Tensor)
        return relative_error(out[chosen], expected), ERROR_BOUND

    return Contender("ours", calls, error)


def contest(
    rows: Rows,
    wanted: Wanted,
    phase: str,
    problem: Problem,
    peers: list[Peer],
    *,
    with_ours: bool = True,
) -> None:
    """Measure ours, then peers over keys and values of the same size in bf16.

    Args:
        rows: takes the measurements.
        wanted: what is to be measured.
        phase: "decode" and so on; with the KV format it names the kernel.
        problem: the step.
        peers: others, where the cache is in bf16.
        with_ours: whether ours is measured, or was before.
    """
    kernel = f"{phase} {problem.format.value}"
    if wanted.only and not wanted.only & {kernel, phase}:
        return

    def measure() -> None:
        work = problem.work(kernel, problem.kv_bytes())
        if with_ours:
            rows.measure(work, ours(rows.bench, problem))
        for peer in peers if wanted.peers and problem.format is KVFormat.BF16 else ():
            calls = partial(peer.calls, rows.bench, problem)
            rows.measure(work, Contender(peer.name, calls, captured=peer.captured))

    who = "ours" if with_ours else ", ".join(peer.name for peer in peers)
    rows.prepare(kernel, problem.heads.name, problem.size, measure, who)
