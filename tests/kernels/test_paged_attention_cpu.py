from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from appliance.kernels.attention import cpu, reference
from appliance.kernels.cache.kv_cache import KVBlocks
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.kv_write.reference import write_kv
from appliance.kernels.rows.ragged import RaggedBatch

pytestmark = pytest.mark.usefixtures("unlike_products")

BLOCK_SIZE = 16
Span = tuple[int, int]  # positions of a sequence: first row, last row + 1


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int
    heads_per_kv: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_kv_heads}x{self.heads_per_kv}x{self.head_dim}"


@dataclass(frozen=True)
class Precision:
    kv: KVFormat
    activations: torch.dtype
    bound: float  # relative error of the result

    def __str__(self) -> str:
        return f"{self.kv.value}-{str(self.activations)[6:]}"


SMOLLM = Shape(3, 3, 64)
SHAPES = [SMOLLM, Shape(3, 1, 64), Shape(2, 4, 128), Shape(1, 8, 80), Shape(1, 4, 256)]
# In any order of sums, rounding the result costs at most 2^-8 of its norm in bfloat16, 2^-11 in
# float16; rounding the probabilities to 16 bits costs about half of that. 2e-6 is the rounding of
# as many float32 sums as there are keys, at random.
BF16 = Precision(KVFormat.BF16, torch.bfloat16, 6e-3)
FP32 = Precision(KVFormat.FP32, torch.float32, 2e-6)
INT8 = Precision(KVFormat.INT8, torch.bfloat16, 4e-3)
PRECISIONS = [BF16, FP32, INT8, Precision(KVFormat.FP16, torch.float16, 1e-3)]


class World:
    """Sequences of given lengths, whose keys are in a cache that is NaN everywhere else."""

    def __init__(self, lengths: list[int], shape: Shape, precision: Precision) -> None:
        self.lengths, self.shape, self.precision = lengths, shape, precision
        used = [-(-length // BLOCK_SIZE) for length in lengths]
        num_blocks = sum(used) + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        free = order.tolist()
        self.tables = [tuple(free.pop() for _ in range(n)) for n in used]
        self.cache = KVBlocks.allocate(
            precision.kv,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            device=torch.device("cpu"),
        )
        poisoned = (self.cache.key_scales, self.cache.value_scales)
        for tensor in (self.cache.keys, self.cache.values) if poisoned[0] is None else poisoned:
            assert tensor is not None
            tensor.fill_(torch.nan)
        random = torch.Generator().manual_seed(1)
        self.queries = []
        for length, table in zip(lengths, self.tables, strict=True):
            kv = (2, length, shape.num_kv_heads, shape.head_dim)
            key, value = torch.randn(kv, generator=random).to(precision.activations)
            write_kv(key, value, self.cache, self._slots(table, 0, length))
            heads = shape.num_kv_heads * shape.heads_per_kv
            query = torch.randn((length, heads, shape.head_dim), generator=random)
            self.queries.append(query.to(precision.activations))

    def batch(self, spans: dict[int, Span], num_decodes: int) -> RaggedBatch:
        """Rows `spans[i]` of sequence i, in the order given."""
        rows = [stop - start for start, stop in spans.values()]
        contexts = [stop for _, stop in spans.values()]
        tables = [self.tables[i][: -(-stop // BLOCK_SIZE)] for i, (_, stop) in spans.items()]
        width = max(map(len, tables))
        slots = [self._slots(self.tables[i], *span) for i, span in spans.items()]
        return RaggedBatch(
            query_start=torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=torch.tensor(
                [table + (0,) * (width - len(table)) for table in tables], dtype=torch.int32
            ),
            slot_mapping=torch.cat(slots),
            num_decodes=num_decodes,
            host_query_lens=tuple(rows),
            host_context_lens=tuple(contexts),
        )

    def query(self, spans: dict[int, Span]) -> Tensor:
        return torch.cat([self.queries[i][start:stop] for i, (start, stop) in spans.items()])

    def attend(
        self,
        spans: dict[int, Span],
        num_decodes: int = 0,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sees: Tensor | None = None,
    ) -> Tensor:
        work = cpu.plan_attention(self.batch(spans, num_decodes), BLOCK_SIZE)
        scale = self.shape.head_dim**-0.5
        return cpu.paged_attention(
            self.query(spans),
            self.cache,
            work,
            scale=scale,
            window=window,
            softcap=softcap,
            sees=sees,
        )

    def expected(
        self,
        spans: dict[int, Span],
        *,
        window: int | None = None,
        softcap: float | None = None,
        sees: Tensor | None = None,
    ) -> Tensor:
        """The reference's result in float64; decode rows make no difference to it."""
        work = reference.plan_attention(self.batch(spans, 0), BLOCK_SIZE)
        query, scale = self.query(spans).double(), self.shape.head_dim**-0.5
        return reference.paged_attention(
            query, self.cache, work, scale=scale, window=window, softcap=softcap, sees=sees
        )

    @staticmethod
    def _slots(table: tuple[int, ...], start: int, stop: int) -> Tensor:
        position = torch.arange(start, stop)
        return torch.tensor(table)[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


# Decode at one token, around a block, a step of keys and a flash key block; then chunks that begin
# and end inside blocks, one of them a single row.
LENGTHS = [1, 15, 16, 17, 127, 128, 129, 511, 513, 1100, 16, 17, 33, 300, 200, 1200]
DECODES = {i: (length - 1, length) for i, length in enumerate(LENGTHS[:10])}
CHUNKS = {10: (0, 16), 11: (12, 17), 12: (0, 33), 13: (200, 300), 14: (199, 200), 15: (1000, 1200)}
MIXED = DECODES | CHUNKS


# Floats of 16 and 32 bits differ in their rounding, which does not depend on shapes.
CASES = [(SMOLLM, precision) for precision in PRECISIONS]
CASES += [(shape, precision) for shape in SHAPES[1:] for precision in (BF16, INT8)]
# Windows and soft caps; every shape runs with the first two.
LIMITS = [(None, None), (600, 20.0), (1, None), (40, None), (None, 20.0)]


@pytest.mark.parametrize(("shape", "precision"), CASES, ids=str)
def test_ragged_batch_matches_the_reference(shape: Shape, precision: Precision) -> None:
    world = World(LENGTHS, shape, precision)
    for window, softcap in LIMITS if shape is SMOLLM else LIMITS[:2]:
        result = world.attend(MIXED, len(DECODES), window=window, softcap=softcap)
        expected = world.expected(MIXED, window=window, softcap=softcap)
        assert result.dtype == precision.activations
        assert relative_error(result, expected) < precision.bound, (window, softcap)


def test_reference_is_plain_attention_when_blocks_are_in_order() -> None:
    world = World([70], SMOLLM, FP32)
    flat = world.cache.keys[list(world.tables[0])].flatten(0, 1)[:70].double()
    values = world.cache.values[list(world.tables[0])].flatten(0, 1)[:70].double()
    query = world.query({0: (0, 70)}).double()
    expected = functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        flat.transpose(0, 1),
        values.transpose(0, 1),
        is_causal=True,
        enable_gqa=True,
    ).transpose(0, 1)
    torch.testing.assert_close(world.expected({0: (0, 70)}), expected)


def test_reference_of_a_window_of_one_is_the_own_value() -> None:
    world = World([40], SMOLLM, FP32)
    slots = World._slots(world.tables[0], 20, 40)
    own = world.cache.values.flatten(0, 1)[slots].double().repeat_interleave(3, dim=1)
    torch.testing.assert_close(world.expected({0: (20, 40)}, window=1), own)


def test_layers_with_and_without_a_window_share_a_plan() -> None:
    world = World([300, 90], SMOLLM, BF16)
    spans = {0: (299, 300), 1: (10, 90)}
    work = cpu.plan_attention(world.batch(spans, 1), BLOCK_SIZE)
    for window in (None, 50, None, 50):
        result = cpu.paged_attention(
            world.query(spans), world.cache, work, scale=64**-0.5, window=window
        )
        assert relative_error(result, world.expected(spans, window=window)) < BF16.bound, window


@pytest.mark.parametrize("precision", [BF16, INT8], ids=str)
def test_the_query_may_be_a_view_of_a_fused_projection(precision: Precision) -> None:
    world = World([300, 90], SMOLLM, precision)
    spans = {0: (299, 300), 1: (10, 90)}
    query = world.query(spans)
    fused = torch.cat((query, torch.full((81, 6, 64), torch.nan)), dim=1).to(query.dtype)
    work = cpu.plan_attention(world.batch(spans, 1), BLOCK_SIZE)
    result = cpu.paged_attention(fused[:, :9], world.cache, work, scale=64**-0.5)
    assert relative_error(result, world.expected(spans)) < precision.bound


lengths = st.integers(1, 400)


@settings(max_examples=25, derandomize=True)
@given(
    st.lists(lengths, max_size=4),
    st.lists(st.tuples(lengths, st.floats(0, 1)), max_size=3),
    st.none() | st.integers(1, 500),
)
def test_any_ragged_batch_matches_the_reference(
    decodes: list[int], chunks: list[tuple[int, float]], window: int | None
) -> None:
    spans = {i: (length - 1, length) for i, length in enumerate(decodes)}
    for i, (length, share) in enumerate(chunks, start=len(decodes)):
        spans[i] = (min(length - 1, int(length * share)), length)
    if not spans:
        return
    world = World([stop for _, stop in spans.values()], Shape(2, 2, 64), FP32)
    result = world.attend(spans, len(decodes), window=window)
    assert relative_error(result, world.expected(spans, window=window)) < FP32.bound


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("precision", [FP32, INT8], ids=str)
def test_rows_of_a_picture_see_all_of_it(precision: Precision, window: int | None) -> None:
    world = World([40, 70, 50], SMOLLM, precision)
    spans = {0: (39, 40), 1: (20, 70), 2: (0, 50)}
    pictures = {1: range(24, 60), 2: range(3, 8)}
    seen = []
    for i, (start, stop) in spans.items():
        own = torch.arange(start, stop, dtype=torch.int32) + 1
        if i in pictures:
            own[pictures[i].start - start : pictures[i].stop - start] = pictures[i].stop
        seen.append(own)
    sees = torch.cat(seen)
    expected = world.expected(spans, window=window, sees=sees)
    found = world.attend(spans, 1, window=window, sees=sees)
    assert relative_error(found, expected) < precision.bound
    assert relative_error(world.expected(spans, window=window), expected) > 0.1
    assert relative_error(world.attend(spans, 1, window=window), expected) > 0.1  # of another step
