"""Parts of the library's step alone: a linear, rows of an embedding, a layer's attention."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.decoder_cache import allocate_layer
from appliance.kernels.cache.kv_cache import KVBlocks, KVPages
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.cache.sealed_blocks import SealedBlocks
from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.cache import NativeCache
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.parts import LibraryLinear, attend_layer
from appliance.kernels.cpu.structs import AttentionStruct
from appliance.kernels.cpu.weights import WeightPacker
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.native import batch_struct
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods.rtn import quantize

BLOCK_SIZE = 32


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


class Parts:
    """An engine, and the memory of its linears."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.engine = NativeEngine(library, 2)
        self._packer = WeightPacker(self.engine, Arena(), torch.float32)

    def linear(
        self, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None
    ) -> LibraryLinear:
        return LibraryLinear(self.engine, self._packer.linear(weight, bias), self._packer.arena)


@pytest.fixture
def parts(loaded: ctypes.CDLL) -> Iterator[Parts]:
    made = Parts(loaded)
    yield made
    made.engine.close()


def test_a_linear_multiplies_and_adds_its_bias(parts: Parts) -> None:
    weight, bias, x = random(37, 64), random(37, seed=1), random(9, 64, seed=2)
    made = parts.linear(weight, bias)
    assert (made.in_features, made.out_features) == (64, 37)
    torch.testing.assert_close(made(x), x @ weight.T + bias, atol=1e-4, rtol=0)
    assert made(x[:0]).shape == (0, 37)


def test_a_packed_linear_is_near_its_weight_and_the_same_in_each_row(parts: Parts) -> None:
    weight, x = random(48, 128), random(9, 128, seed=2)
    packed = quantize(weight, WeightScheme(bits=8, group_size=32))
    made = parts.linear(packed)
    wanted = x @ packed.dequantize(torch.float32).T
    torch.testing.assert_close(made(x), wanted, atol=0.02 * float(wanted.std()), rtol=0)
    assert torch.equal(torch.cat([made(row[None]) for row in x]), made(x))


def test_rows_of_a_weight_are_those_of_its_matrix(parts: Parts) -> None:
    weight, ids = random(37, 64), torch.tensor([36, 0, 5, 5])
    assert torch.equal(parts.linear(weight).rows(ids), weight[ids])


@pytest.mark.parametrize("window", [0, 1, 9, 300])
def test_attention_may_look_ahead_as_far_as_back(parts: Parts, window: int) -> None:
    """Some texts are longer than what is computed at once, beside one of a single token."""
    heads, dim, lengths = 2, 16, [300, 1, 37]
    struct = AttentionStruct(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        window=window,
        scale=0.4,
        looks_ahead=1,
    )
    native = NativeCache(
        parts.engine.library, KVFormat.FP32, [(heads, dim)], num_blocks=20, block_size=BLOCK_SIZE
    )
    tables = [tuple(range(3, 13)), (0,), (2, 1)]
    batch = RaggedBatch.of(
        lengths, lengths, tables, block_size=BLOCK_SIZE, device=torch.device("cpu")
    )
    qkv = random(sum(lengths), 3 * heads, dim)
    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    places = batch_struct(tokens, tokens, batch, None)
    found = attend_layer(parts.engine, struct, native, 0, places, qkv)
    for own, text in zip(found.split(lengths), qkv.split(lengths), strict=True):
        query, key, value = text.transpose(0, 1).split(heads)
        at = torch.arange(len(text))
        near = (at[:, None] - at).abs() < (window or len(text))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=near, scale=0.4
        )
        torch.testing.assert_close(own, wanted.transpose(0, 1), atol=1e-5, rtol=0)


def test_attention_of_one_layer_equals_the_reference(parts: Parts) -> None:
    """Two sequences run over two steps, with a window, a soft cap and sinks."""
    heads, kv_heads, dim, lens = 4, 2, 16, [40, 7]
    sinks = random(heads, seed=9)
    struct = AttentionStruct(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        window=11,
        scale=0.3,
        softcap=2.0,
        sinks=sinks.data_ptr(),
    )
    tables = [(3, 1), (0,)]
    native = NativeCache(
        parts.engine.library,
        KVFormat.FP32,
        [(1, 32), (kv_heads, dim)],
        num_blocks=4,
        block_size=BLOCK_SIZE,
    )
    plain = REFERENCE.allocate_cache(
        KVFormat.FP32,
        num_blocks=4,
        block_size=BLOCK_SIZE,
        num_kv_heads=kv_heads,
        head_dim=dim,
        device=torch.device("cpu"),
    )
    for rows, ends in (([33, 6], [33, 6]), ([7, 1], lens)):
        batch = RaggedBatch.of(
            rows, ends, tables, block_size=BLOCK_SIZE, device=torch.device("cpu")
        )
        qkv = random(sum(rows), heads + 2 * kv_heads, dim, seed=sum(ends))
        tokens = torch.zeros(sum(rows), dtype=torch.int64)
        places = batch_struct(tokens, tokens, batch, None)
        found = attend_layer(parts.engine, struct, native, 1, places, qkv)
        query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
        REFERENCE.write_kv(key, value, plain, batch.slot_mapping)
        wanted = REFERENCE.paged_attention(
            query,
            plain,
            REFERENCE.plan_attention(batch, BLOCK_SIZE),
            scale=0.3,
            window=11,
            softcap=2.0,
            sinks=sinks,
        )
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("kv_format", [KVFormat.INT4_SEALED, KVFormat.K8V4, KVFormat.INT8])
def test_rows_of_a_picture_see_all_of_it_in_open_blocks(
    parts: Parts, kv_format: KVFormat, window: int | None
) -> None:
    """Beside another sequence; the picture is longer than one split of a sequence's tokens."""
    heads, kv_heads, dim, picture = 4, 2, 16, range(63, 380)
    blocks, ends = 16, [400, 70]
    struct = AttentionStruct(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        window=window or 0,
        scale=0.3,
        sees_picture=1,
    )
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
    tables, opened = [table[:13], table[13:]], [*reversed(range(blocks))]
    native = NativeCache(
        parts.engine.library,
        kv_format,
        [(kv_heads, dim)],
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        num_open=blocks,
    )
    plain = allocate_layer(
        REFERENCE.allocate_cache,
        LayerPrecision(kv_format),
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        num_open=blocks,
        num_kv_heads=kv_heads,
        head_dim=dim,
        device=torch.device("cpu"),
    )
    for starts, stops in (([0, 0], [63, 69]), ([63, 69], ends)):
        seen = [
            place + 1 if number or place not in picture else picture.stop
            for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
            for place in range(start, stop)
        ]
        batch = RaggedBatch.of(
            [stop - start for start, stop in zip(starts, stops, strict=True)],
            stops,
            tables,
            block_size=BLOCK_SIZE,
            device=torch.device("cpu"),
            open_blocks=[
                [opened[at + block] for block in range(start // 32, (stop - 1) // 32 + 1)]
                for at, start, stop in zip((0, 13), starts, stops, strict=True)
            ],
            sees=seen,
        )
        qkv = random(len(seen), heads + 2 * kv_heads, dim, seed=sum(stops))
        tokens = torch.zeros(len(seen), dtype=torch.int64)
        found = attend_layer(
            parts.engine, struct, native, 0, batch_struct(tokens, tokens, batch, None), qkv
        )
        query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
        assert batch.sealed is not None
        assert batch.sealed.moves is not None
        if isinstance(plain, SealedBlocks):
            assert batch.sealed.slot_mapping is not None
            REFERENCE.write_kv(key, value, plain.open, batch.sealed.slot_mapping)
            REFERENCE.seal_kv(plain, batch.sealed.moves)
        else:
            assert isinstance(plain, KVPages | KVBlocks)
            REFERENCE.write_kv(key, value, plain, batch.slot_mapping)
        work = REFERENCE.plan_attention(batch, BLOCK_SIZE)
        wanted, causal = (
            REFERENCE.paged_attention(query, plain, work, scale=0.3, window=window, sees=sees)
            for sees in (batch.sees, None)
        )
        # A code between two levels may become either.
        assert rms(found - wanted) < (0.02 if kv_format.is_sealed else 0.001) * rms(wanted)
    assert rms(causal - wanted) > 0.5 * rms(wanted)
