"""What decode's kernels move and execute, counted while their PTX runs: gates on efficiency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
from ptx_machine.driver import PtxDriver
from ptx_machine.memory import SECTOR
from support.kernels.attention_spans import span_table
from support.kernels.compiled_kernels.signatures.paged_attention import FORMATS
from support.kernels.fp4_weights import random_fp4
from support.kernels.packed_weights import random_packed

from appliance.kernels.attention import launch as attention_launch
from appliance.kernels.attention.launch import (
    decode_spans,
    paged_attention,
    plan_attention,
)
from appliance.kernels.attention.variant import Tile, Variant, choose_tile
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cache.sealed_blocks import SealedBlocks
from appliance.kernels.latent_attention.launch import latent_attention
from appliance.kernels.packed_matmul import launch as matmul_launch
from appliance.kernels.packed_matmul.launch import TiledLinear, prepare_linear
from appliance.kernels.packed_matmul.sums import group_sums
from appliance.kernels.packed_matmul.tiles import TILE_N, choose_splits
from appliance.kernels.packed_matmul.variant import takes_sums
from appliance.kernels.rows.ragged import RaggedBatch, SealedSpans
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.packed import OffsetKind, PackedWeight

pytestmark = pytest.mark.compiled
CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, CONTEXT, PAGE = 4, 1, 128, 2048, 32


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a step.

    Attributes:
        sectors: bytes of the sectors that were read, as a share of those that have to be.
        conflicts: turns of shared memory's banks beyond the fewest.
        instructions: of warps, for each weight or element of a key or value.
    """

    sectors: float
    conflicts: int
    instructions: float


def cost_of(traffic: Counter[str], needed: int, elements: int) -> Cost:
    executed = sum(count for name, count in traffic.items() if " " not in name)
    return Cost(
        traffic["global load sectors"] * SECTOR / needed,
        traffic["shared turns"] - traffic["shared turns at best"],
        executed / elements,
    )


def counted() -> Counter[str]:
    """What the machine counts from now on."""
    driver = triton.runtime.driver.active
    assert isinstance(driver, PtxDriver)
    driver.traffic = Counter()
    return driver.traffic


def one_sequence(rows: int, context: int) -> RaggedBatch:
    """A step of the last rows of a context whose blocks lie anywhere."""
    return RaggedBatch(
        query_start=torch.tensor([0, rows], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_tables=torch.randperm(context // PAGE, dtype=torch.int32).unsqueeze(0),
        slot_mapping=torch.zeros(rows, dtype=torch.int64),
        num_decodes=1,
        host_query_lens=(rows,),
        host_context_lens=(context,),
        decode_rows=rows,
    )


def decode(
    kv_format: KVFormat,
    rows: int = 1,
    window: int | None = None,
    head_dim: int = HEAD_DIM,
    context: int = CONTEXT,
) -> Cost:
    """Rows over one context: pages, for each span queries and a partial result, a block table."""
    batch = one_sequence(rows, context)
    table = batch.block_tables[0]
    sizes: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": head_dim, "device": CPU}
    cache: KVPages | SealedBlocks
    if kv_format.is_sealed:
        cache = SealedBlocks.allocate(num_blocks=len(table), num_open=1, **sizes)
        lens = torch.tensor([context], dtype=torch.int32)
        opened = SealedSpans(lens, torch.zeros(1, 1, dtype=torch.int32), (context,), ((),))
        batch, pages = replace(batch, sealed=opened), cache.closed.pages
    else:
        cache = KVPages.allocate(kv_format, num_blocks=len(table), block_size=PAGE, **sizes)
        pages = cache.pages
    query = torch.randn(rows, HEADS, head_dim).bfloat16()
    work = plan_attention(batch, PAGE)
    traffic = counted()
    paged_attention(query, cache, work, scale=0.1, window=window)
    spans = span_table([context], [rows], window)
    seen = int((spans[:, 2] - spans[:, 1]).sum())
    programs = len(spans) * KV_HEADS
    partial = rows * HEADS // KV_HEADS * (head_dim + 2) * 4
    table_entries = seen // PAGE * KV_HEADS * SECTOR
    read = pages.nbytes * seen // context
    needed = read + programs * (partial + query.nbytes // KV_HEADS) + table_entries
    return cost_of(traffic, needed, 2 * seen * KV_HEADS * head_dim)


def decode_latents(kv_format: KVFormat, num_heads: int, rows: int, tiles: int) -> Cost:
    """Heads of rows over latents: pages for each tile of heads, for each span as `decode`.

    Instructions are those that a longer context adds: maps of queries and values take the same.
    """
    half, whole = (_decoded_latents(kv_format, num_heads, rows, tiles, n) for n in (256, 512))
    return replace(whole, instructions=2 * whole.instructions - half.instructions)


def _decoded_latents(
    kv_format: KVFormat, num_heads: int, rows: int, tiles: int, context: int
) -> Cost:
    latent, rotary = 512, 64
    cache = KVPages.allocate(
        kv_format,
        num_blocks=context // PAGE,
        block_size=PAGE,
        num_kv_heads=1,
        head_dim=(latent + rotary) // 2,
        device=CPU,
    )
    cache = replace(cache, in_rows=True)
    query = torch.randn(rows, num_heads, 128 + rotary).bfloat16()
    keys, values = torch.randn(2, num_heads, 128, latent).bfloat16()
    angles = torch.zeros(rows, rotary // 2)
    work = plan_attention(one_sequence(rows, context), PAGE)
    traffic = counted()
    maps = {"keys": keys, "values": values}
    latent_attention(query, angles.cos(), angles, cache, work, **maps, scale=0.1)
    spans = len(span_table([context], [rows], None))
    mapped = rows * num_heads * (latent + rotary) * 2
    partial = rows * num_heads * (latent + 1) * 4
    needed = tiles * (cache.pages.nbytes + context // PAGE * SECTOR)
    needed += spans * (mapped + partial)
    if kv_format.is_quantized:  # queries are scaled first, and undone in each span
        needed += spans * rows * num_heads * 4
    # Each head's maps once for all rows, and its queries before they are mapped.
    needed += keys.nbytes + values.nbytes + query.nbytes
    return cost_of(traffic, needed, tiles * context * (latent + rotary))


def beginning_alike(sequences: int, blocks: int, shared_blocks: int) -> RaggedBatch:
    """Sequences of so many blocks, of which the first are the same."""
    tables = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    tables[:, :shared_blocks] = tables[0, :shared_blocks]
    contexts = (blocks * PAGE - 7,) * sequences
    return RaggedBatch(
        query_start=torch.arange(sequences + 1, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.zeros(sequences, dtype=torch.int64),
        num_decodes=sequences,
        host_query_lens=(1,) * sequences,
        host_context_lens=contexts,
    )


def decode_alike(kv_format: KVFormat, sequences: int, shared_blocks: int) -> Cost:
    """A layer after the first, over 34 blocks each: the pages that the sequences hold, once."""
    batch = beginning_alike(sequences, 34, shared_blocks)
    tables = batch.block_tables
    sizes: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "device": CPU}
    cache = KVPages.allocate(kv_format, num_blocks=tables.numel(), block_size=PAGE, **sizes)
    query = torch.randn(sequences, HEADS, HEAD_DIM).bfloat16()
    work = plan_attention(batch, PAGE)
    decode_spans(work, None, 16 // HEADS)
    traffic = counted()
    paged_attention(query, cache, work, scale=0.1)
    held = cache.pages.nbytes * len(tables.unique()) // tables.numel()
    return cost_of(traffic, held, 2 * tables.numel() * PAGE * KV_HEADS * HEAD_DIM)


def matmul(rows: int, group_size: int) -> Cost:
    """Rows by a weight of 4 bits with offsets of no integer zero points."""
    return matmul_of(random_packed(256, 2048, group_size), rows)


def matmul_of(weight: PackedWeight | Fp4Weight, rows: int) -> Cost:
    """Rows by a weight: its tiles once, and the rows for each tile of the result.

    Where the weight has offsets, also sums of the rows for each tile. What takes these sums is
    counted apart: all features share it, and here are few.
    """
    linear = prepare_linear(weight, None, torch.bfloat16)
    assert isinstance(linear, TiledLinear)
    x = torch.randn(rows, 2048).bfloat16()
    padded = 8 if rows <= 8 else 16
    sums, summing = None, counted()
    if takes_sums(linear.weight.params_kind, padded):
        sums = group_sums(linear.weight, x, padded)
    traffic = counted()
    linear(x)
    traffic.subtract(summing)
    needed = linear.weight.nbytes + x.nbytes * 256 // TILE_N
    if sums is not None:
        needed += len(sums) * padded * sums.itemsize * 256 // TILE_N
    return cost_of(traffic, needed, 256 * 2048)


# The share of sectors, and instructions for an element: a little above what was found, the latter
# on the capability that needs most.
DECODE = {
    KVFormat.BF16: (1.01, 0.103),
    KVFormat.FP8: (1.013, 0.176),
    KVFormat.INT8: (1.012, 0.162),
    KVFormat.INT4: (1.02, 0.172),
    KVFormat.INT4_SEALED: (1.02, 0.174),
}
# The same for heads of 512, whose scores four warps add up.
IN_PARTS = {
    KVFormat.BF16: (1.01, 0.197),
    KVFormat.INT8: (1.016, 0.193),
    KVFormat.INT4_SEALED: (1.028, 0.206),
}
# The same of latents, whose elements are keys and values at once: of up to 16 heads, and of more.
LATENTS = ((1.045, 0.17), (1.04, 0.34))
LATENT_CODES = (1.05, 0.4)
# Bytes read for four sequences that begin alike, as a share of the pages that they hold: those
# once, and the partial results of all.
ALIKE = {KVFormat.BF16: 1.19, KVFormat.INT4: 1.74}
# Instructions of warps for each sequence, once a step, by the blocks that all share.
FINDING = {0: 162, 128: 210}
FP8_BY_HARDWARE = 0.130  # from 8.9 on
MATMUL = {  # by rows and group size; what is read on top is the sums of splits
    (1, 32): (1.1, 0.203),
    (1, 128): (1.12, 0.142),
    (16, 32): (1.06, 0.213),
    (16, 128): (1.07, 0.146),
}


# Words of scale and zero point are read twice, for sums and for codes.
ZERO_POINT = {(1, 128): (1.17, 0.143), (16, 128): (1.1, 0.145)}
FP4 = {(1, torch.float8_e8m0fnu): (1.12, 0.2), (16, torch.float8_e4m3fn): (1.13, 0.23)}


def offends(cost: Cost, limits: tuple[float, float], conflicts: int = 0) -> list[str]:
    """Which gates it fails."""
    sectors, instructions = limits
    gates = {
        "sectors": cost.sectors > sectors,
        "conflicts": cost.conflicts > conflicts,
        "instructions": cost.instructions > instructions,
    }
    return [name for name, fails in gates.items() if fails]


def test_decode_attention_reads_little_more_than_pages(target: str) -> None:
    assert set(DECODE) == set(FORMATS)
    for kv_format, limits in DECODE.items():
        cost = decode(kv_format)
        assert not offends(cost, limits), (kv_format, cost)
        if kv_format is KVFormat.FP8 and target != "sm_86":
            assert cost.instructions < FP8_BY_HARDWARE


def test_warps_that_share_out_a_head_read_its_pages_once() -> None:
    for kv_format, limits in IN_PARTS.items():
        cost = decode(kv_format, head_dim=512, context=512)
        assert not offends(cost, limits), (kv_format, cost)


# Of few heads, of a token and its drafts, and of more heads than a tile of 16 rows has.
@pytest.mark.parametrize(("num_heads", "rows", "tiles"), [(16, 1, 1), (8, 2, 1), (32, 1, 1)])
def test_latents_are_read_once_for_scores_and_sums(num_heads: int, rows: int, tiles: int) -> None:
    cost = decode_latents(KVFormat.BF16, num_heads, rows, tiles)
    assert not offends(cost, LATENTS[num_heads > 16]), cost


# Codes of more than 16 heads are read by two tiles. Stores of widened codes take twice the turns:
# a thread has 16 codes beside each other, whose halves are two stores.
@pytest.mark.parametrize(("num_heads", "rows", "tiles"), [(16, 1, 1), (32, 1, 2)])
def test_codes_of_latents_are_read_once_for_each_tile(
    num_heads: int, rows: int, tiles: int
) -> None:
    cost = decode_latents(KVFormat.INT8, num_heads, rows, tiles)
    store_turns = tiles * 512 * 512 * 2 // 128
    assert not offends(cost, LATENT_CODES, store_turns), cost


def test_packed_matmul_reads_little_more_than_weights() -> None:
    for (rows, group_size), limits in MATMUL.items():
        cost = matmul(rows, group_size)
        assert not offends(cost, limits), (rows, group_size, cost)


def test_integer_zero_points_take_no_product_of_their_own() -> None:
    for (rows, group_size), limits in ZERO_POINT.items():
        cost = matmul_of(random_packed(256, 2048, group_size, kind=OffsetKind.ZERO_POINT), rows)
        assert not offends(cost, limits), (rows, group_size, cost)


def test_four_bit_floats_read_little_more_than_weights() -> None:
    for (rows, form), limits in FP4.items():
        cost = matmul_of(random_fp4(256, 2048, form), rows)
        assert not offends(cost, limits), (rows, form, cost)


@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.INT4])
def test_four_tokens_of_a_group_of_four_cost_what_one_does(kv_format: KVFormat) -> None:
    one, four = decode(kv_format), decode(kv_format, rows=4)
    # Of instructions four tokens have more for what follows the keys: a row is merged by itself.
    assert four.instructions < 1.2 * one.instructions
    assert four.sectors < 1.02 * one.sectors


@pytest.mark.parametrize(("kv_format", "most"), ALIKE.items())
def test_a_beginning_that_four_sequences_share_is_read_once(
    kv_format: KVFormat, most: float
) -> None:
    """Of 34 blocks each 32 are the same, so 136 that are read alone are 40."""
    together, apart = (decode_alike(kv_format, 4, blocks) for blocks in (32, 0))
    assert together.sectors < most
    assert together.instructions < 0.4 * apart.instructions


@pytest.mark.parametrize(("shared_blocks", "most"), FINDING.items())
def test_who_shares_a_beginning_is_found_with_few_instructions(
    shared_blocks: int, most: int
) -> None:
    sequences = 16
    batch = beginning_alike(sequences, 132, shared_blocks)
    found = []
    for most_members in (1, 4):
        traffic = counted()
        decode_spans(plan_attention(batch, PAGE), None, most_members)
        found.append(sum(count for name, count in traffic.items() if " " not in name))
    assert found[1] - found[0] < most * sequences


def test_keys_before_a_window_are_not_read() -> None:
    for kv_format in (KVFormat.BF16, KVFormat.INT4):
        whole, windowed = decode(kv_format), decode(kv_format, window=256)
        assert windowed.sectors < 1.3 * whole.sectors
        assert windowed.instructions < 1.6 * whole.instructions


def test_spans_that_are_too_short_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_launch, "SPAN_LENGTHS", (32, 32, 32, 32))
    monkeypatch.setattr(attention_launch, "most_partials", lambda rows, *_: rows * CONTEXT // 32)
    found = offends(decode(KVFormat.INT4), DECODE[KVFormat.INT4])
    assert {"sectors", "instructions"} <= set(found)


@pytest.fixture
def configured_anew() -> Iterator[None]:
    """Attention chooses tiles again, in the test and after it."""
    attention_launch.configured.cache_clear()
    yield
    attention_launch.configured.cache_clear()


@pytest.mark.usefixtures("configured_anew")
def test_another_order_of_codes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two warps share a tile whose order is that of one warp's registers."""

    def shared_tile(variant: Variant, capability: int) -> Tile:
        return replace(choose_tile(variant, capability), num_warps=2)

    monkeypatch.setattr(attention_launch, "choose_tile", shared_tile)
    found = offends(decode(KVFormat.INT8), DECODE[KVFormat.INT8])
    assert {"conflicts", "instructions"} <= set(found)


def test_too_many_splits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_launch, "choose_splits", lambda *args: 2 * choose_splits(*args))
    assert offends(matmul(1, 128), MATMUL[1, 128]) == ["sectors", "instructions"]
