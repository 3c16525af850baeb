"""Check every kernel on a few shapes; their tests have many more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from appliance.kernels.activation import Activation
from appliance.kernels.attention import reference as reference_attention
from appliance.kernels.attention.launch import paged_attention, plan_attention
from appliance.kernels.block_copy.launch import BlockMover
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cache.sealed_blocks import SealedBlocks
from appliance.kernels.fp8_matmul import launch as fp8_launch
from appliance.kernels.fp8_matmul import reference as fp8_reference
from appliance.kernels.fp8_matmul.launch import ActivationKind
from appliance.kernels.gated_activation import reference as reference_activation
from appliance.kernels.gated_activation.launch import gated_activation
from appliance.kernels.kv_seal import reference as reference_seal
from appliance.kernels.kv_seal.launch import seal
from appliance.kernels.kv_write import reference as reference_write
from appliance.kernels.kv_write.launch import rotate_and_write, write_kv
from appliance.kernels.norm_rope import reference as reference_norm
from appliance.kernels.norm_rope.launch import add_norm
from appliance.kernels.norm_rope.weights import NormWeights
from appliance.kernels.packed_matmul import launch as packed_launch
from appliance.kernels.penalties import reference as reference_penalties
from appliance.kernels.penalties.launch import penalize
from appliance.kernels.penalties.rows import PenaltyRows
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.kernels.sampling import reference as reference_sampling
from appliance.kernels.sampling.launch import DeviceSampling
from appliance.kernels.sampling.rows import SamplingRows
from appliance.kernels.soft_cap import reference as reference_cap
from appliance.kernels.soft_cap.launch import soft_cap
from appliance.kernels.token_mask import reference as reference_mask
from appliance.kernels.token_mask.launch import mask_tokens
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from bench.gpu.rows import relative_error

Check = Callable[[], tuple[float, float]]  # the error and its bound
BF16 = torch.bfloat16
ROUNDING = 4e-3  # of bf16 results, in the norm of all
PRODUCTS = 1e-2  # where a product takes operands in 16 bits
BLOCK = 32
# Two decode rows of one span and of several, then chunks: whole, continued, of one row.
QUERY_LENS, CONTEXT_LENS = (1, 1, 20, 37, 1), (17, 300, 20, 100, 33)
# Leading tokens that each row sees where the third sequence is a picture, and the fourth has one.
SEES = (17, 300, *[20] * 20, 64, 65, *[100] * 35, 33)
PAGED = (KVFormat.BF16, KVFormat.FP8, KVFormat.INT8, KVFormat.INT4)


def all_checks(device: torch.device) -> Iterator[tuple[str, Check]]:
    """Yield the name and check of each kernel."""
    for bits, group, rows in ((4, 128, 1), (4, 128, 16), (4, 64, 33), (8, 32, 8), (4, 128, 600)):
        name = f"packed_matmul {bits} bits g{group} rows {rows}"
        yield name, partial(_packed, device, bits, group, rows)
    yield "packed_matmul gated rows 3", partial(_gated, device)
    for kind in ActivationKind:
        yield f"fp8_matmul {kind.value} rows 9", partial(_fp8, device, kind)
    for form, (window, softcap) in product(PAGED, ((None, None), (50, 30.0))):
        name = f"paged_attention {form.value}" + (" window, cap" if window else "")
        yield name, partial(_attention, device, form, window, softcap)
        yield f"{name}, pictures", partial(_attention, device, form, window, softcap, SEES)
    yield "paged_attention int4-sealed", partial(_sealed_attention, device)
    for form in PAGED:
        yield f"kv_write {form.value}", partial(_write, device, form)
        yield f"rotate_and_write {form.value}", partial(_rotate, device, form)
    yield "kv_seal", partial(_seal, device)
    yield "block_copy", partial(_move, device)
    yield "add_norm", partial(_norm, device)
    yield "gated_activation", partial(_activation, device)
    yield "soft_cap", partial(_cap, device)
    yield "penalties", partial(_penalties, device)
    yield "token_mask", partial(_mask, device)
    for temperature in (0.0, 0.8):
        yield f"sampling, temperature {temperature}", partial(_sample, device, temperature)


def random_numbers(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers in bf16, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, BF16)


def random_weight(
    device: torch.device, rows: int, columns: int, bits: int, group: int
) -> PackedWeight:
    """Return codes of every value, varied scales and integer zero points."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, columns * bits // 8), generator=generator)
    shape, middle = (rows, columns // group), 2 ** (bits - 1)
    scale = (0.5 + torch.rand(shape, generator=generator)) * columns**-0.5 / middle
    zero = middle + torch.randint(-2, 3, shape, generator=generator)
    packed = PackedWeight(
        codes.byte(), scale.half(), zero.half(), OffsetKind.ZERO_POINT, bits, group
    )
    return packed.to(device)


def beside_torch(out: Tensor, x: Tensor, weight: Tensor) -> tuple[float, float]:
    """Return our error against float64, and torch's in bf16 with some room."""
    expected = x.double() @ weight.double().T
    theirs = relative_error(x @ weight.to(BF16).T, expected)
    return relative_error(out, expected), 1.5 * theirs


def _packed(device: torch.device, bits: int, group: int, rows: int) -> tuple[float, float]:
    weight, x = random_weight(device, 192, 1024, bits, group), random_numbers(device, rows, 1024)
    out = packed_launch.prepare_linear(weight, None, BF16)(x)
    return beside_torch(out, x, weight.dequantize(torch.float32))


def _gated(device: torch.device) -> tuple[float, float]:
    weight, x = random_weight(device, 256, 512, 4, 128), random_numbers(device, 3, 512)
    out = packed_launch.prepare_gate_up(weight, None, BF16, Activation.SILU)(x)
    both = x.double() @ weight.dequantize(torch.float64).T
    return relative_error(
        out, reference_activation.gated_activation(both, Activation.SILU)
    ), PRODUCTS


def _fp8(device: torch.device, kind: ActivationKind) -> tuple[float, float]:
    codes = (
        (100 * random_numbers(device, 128, 512).float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    )
    scale = torch.linspace(0.5, 1.5, 128, device=device) / 512
    weight, x = Fp8Weight(codes, scale), random_numbers(device, 9, 512)
    out = fp8_launch.prepare_linear(weight, None, BF16, kind)(x)
    if kind is ActivationKind.SAME:
        return beside_torch(out, x, weight.dequantize())
    x8, scales = fp8_reference.quantize_rows(x)
    rounded = x8.double() * scales.double().view(-1, 1)
    return relative_error(out, rounded @ weight.dequantize(torch.float64).T), ROUNDING


def _pages(
    device: torch.device, form: KVFormat, num_blocks: int, heads: int = 2, dim: int = 64
) -> KVPages:
    cache = KVPages.allocate(
        form,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_kv_heads=heads,
        head_dim=dim,
        device=device,
    )
    if cache.head_scales is not None:
        cache.head_scales.copy_(torch.linspace(0.01, 0.02, 2 * heads).view(2, -1))
    return cache


def _tables() -> list[tuple[int, ...]]:
    """Return scattered, disjoint block tables."""
    lengths = [-(-context // BLOCK) for context in CONTEXT_LENS]
    order = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(1))
    return [tuple(table.tolist()) for table in order.split(lengths)]


def _attention(
    device: torch.device,
    form: KVFormat,
    window: int | None,
    softcap: float | None,
    sees: tuple[int, ...] | None = None,
) -> tuple[float, float]:
    tables = _tables()
    num_blocks = sum(map(len, tables))
    cache = _pages(device, form, num_blocks)
    key, value = random_numbers(device, 2, num_blocks * BLOCK, 2, 64).unbind()
    reference_write.write_kv(key, value, cache, torch.arange(num_blocks * BLOCK, device=device))
    batch = RaggedBatch.of(
        QUERY_LENS, CONTEXT_LENS, tables, block_size=BLOCK, device=device, sees=sees
    )
    query = random_numbers(device, sum(QUERY_LENS), 8, 64, seed=2)
    options: dict[str, Any] = {"scale": 0.125, "window": window, "softcap": softcap}
    options["sees"] = batch.sees
    out = paged_attention(query, cache, plan_attention(batch, BLOCK), **options)
    expected = reference_attention.paged_attention(query.double(), cache, batch, **options)
    return relative_error(out, expected), PRODUCTS


def _sealed(device: torch.device, num_open: int) -> SealedBlocks:
    cache = SealedBlocks.allocate(
        num_blocks=num_open, num_open=num_open, num_kv_heads=2, head_dim=64, device=device
    )
    key, value = random_numbers(device, 2, num_open * BLOCK, 2, 64).unbind()
    slots = torch.arange(num_open * BLOCK, device=device)
    reference_write.write_kv(key, value, cache.open, slots)
    return cache


def _sealed_attention(device: torch.device) -> tuple[float, float]:
    """Check attention where each context's last block is open and all others are sealed."""
    tables = _tables()
    cache = _sealed(device, sum(map(len, tables)))
    ids = [block for table in tables for block in table]
    reference_seal.seal(cache, ids, ids)
    chunk = (1, 1, 20, 4, 1)  # each lies within one block
    batch = RaggedBatch.of(
        chunk, CONTEXT_LENS, tables, block_size=BLOCK, device=device,
        open_blocks=[table[-1:] for table in tables],
    )  # fmt: skip
    query = random_numbers(device, sum(chunk), 8, 64, seed=2)
    out = paged_attention(query, cache, plan_attention(batch, BLOCK), scale=0.125)
    expected = reference_attention.paged_attention(query.double(), cache, batch, scale=0.125)
    return relative_error(out, expected), PRODUCTS


def _unlike(found: Tensor, expected: Tensor) -> float:
    """Return the share of bytes that differ."""
    return float((found.view(torch.uint8) != expected.view(torch.uint8)).double().mean())


def _write(device: torch.device, form: KVFormat) -> tuple[float, float]:
    found, expected = _pages(device, form, 4), _pages(device, form, 4)
    key, value = random_numbers(device, 2, 7, 2, 64).unbind()
    slots = torch.tensor([127, 0, 33, 32, 31, -1, 70], device=device)
    write_kv(key, value, found, slots)
    reference_write.write_kv(key, value, expected, slots)
    # A code at a halfway point may be rounded either way where a division differs in its last bit.
    return _unlike(found.pages, expected.pages), 1e-3


def _rotate(device: torch.device, form: KVFormat) -> tuple[float, float]:
    found, expected = _pages(device, form, 4), _pages(device, form, 4)
    qkv, slots = random_numbers(device, 5, 12, 64), torch.tensor([3, 40, 127, 64, 5], device=device)
    angles = 6 * torch.rand((5, 32), generator=torch.Generator().manual_seed(3)).to(device)
    compose = reference_write.rotate_and_write_with(
        reference_norm.rms_norm, reference_norm.rotary, reference_write.write_kv
    )
    query = rotate_and_write(qkv, angles.cos(), angles.sin(), found, slots)
    wanted = compose(qkv, angles.cos(), angles.sin(), expected, slots)
    keys = [cache.gather([0, 1, 2, 3], 128, torch.float32)[0] for cache in (found, expected)]
    step = {KVFormat.FP8: 4e-2, KVFormat.INT4: 8e-2, KVFormat.INT8: 1e-2}.get(form, ROUNDING)
    off = max(relative_error(query, wanted) / ROUNDING, relative_error(*keys) / step)
    return off, 1.0  # in units of each one's bound


def _seal(device: torch.device) -> tuple[float, float]:
    found, expected = _sealed(device, 3), _sealed(device, 3)
    seal(found, torch.tensor([[2, 1], [-1, 0], [0, 2]], device=device))
    reference_seal.seal(expected, [2, 0], [1, 2])
    return _unlike(found.closed.pages, expected.closed.pages), 1e-3


def _move(device: torch.device) -> tuple[float, float]:
    layers = [_pages(device, KVFormat.INT8, 6) for _ in range(2)]
    for layer in layers:
        layer.pages.copy_(torch.randint(0, 256, layer.pages.shape, device=device))
    expected = [layer.pages[[0, 3]].clone() for layer in layers]
    mover = BlockMover(layers)
    staging = torch.zeros((2, mover.block_bytes), dtype=torch.uint8, device=device)
    mover.swap_out([0, 3], staging)
    mover.swap_in(staging, [5, 4])
    mover.copy([5], [1])
    wrong = (_unlike(layer.pages[[1, 4]], old) for layer, old in zip(layers, expected, strict=True))
    return max(wrong), 0.0


def _norm(device: torch.device) -> tuple[float, float]:
    x, residual = random_numbers(device, 5, 576), random_numbers(device, 5, 576, seed=1)
    weight = torch.linspace(0.5, 1.5, 576, device=device)
    out, total = add_norm(x, residual, NormWeights(weight, 1e-5))
    assert out is not None
    normed = reference_norm.rms_norm(x + residual, weight, 1e-5)
    return relative_error(out, normed) + _unlike(total, x + residual), ROUNDING


def _activation(device: torch.device) -> tuple[float, float]:
    x = random_numbers(device, 5, 1024)
    expected = reference_activation.gated_activation(x.double(), Activation.SILU)
    return relative_error(gated_activation(x, Activation.SILU), expected), ROUNDING


def _cap(device: torch.device) -> tuple[float, float]:
    logits = 40 * random_numbers(device, 3, 5000)
    return relative_error(soft_cap(logits, 30.0), reference_cap.soft_cap(logits, 30.0)), 1e-5


def _penalties(device: torch.device) -> tuple[float, float]:
    count, vocab = 4, 5000
    rows = PenaltyRows(
        torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=device),
        torch.tensor([1, 1, 0, 1], dtype=torch.int32, device=device),
        torch.linspace(0.5, 1.5, count, device=device),
        torch.linspace(-2, 2, count, dtype=torch.float64, device=device),
        torch.linspace(2, -2, count, dtype=torch.float64, device=device),
    )
    logits = random_numbers(device, count, vocab).float()
    seen = (random_numbers(device, 3, vocab, seed=1) > 1).int()
    read = torch.arange(count, device=device)
    expected, expected_seen = logits.clone(), seen.clone()
    reference_penalties.penalize(expected, expected_seen, rows, read)
    penalize(logits, seen, rows, read)
    return _unlike(logits, expected) + _unlike(seen, expected_seen), 0.0


def _mask(device: torch.device) -> tuple[float, float]:
    vocab = 5000
    logits = random_numbers(device, 4, vocab).float()
    rows = torch.tensor([3, 0], device=device)
    generator = torch.Generator().manual_seed(4)
    shape = (2, -(-vocab // 32))
    words = torch.randint(-(2**31), 2**31, shape, generator=generator).int().to(device)
    expected = logits.clone()
    reference_mask.mask_tokens(expected, rows, words)
    mask_tokens(logits, rows, words)
    return _unlike(logits, expected), 0.0


def _sample(device: torch.device, temperature: float) -> tuple[float, float]:
    """Return the share of rows whose token differs; rounding of sums allows one in 16."""
    count, vocab = 16, 5000
    uniform = torch.linspace(0.01, 0.99, count).tolist()
    settings = SamplingRows.of(
        [temperature] * count, [0] * count, [0.9] * count, [0.0] * count, uniform, device=device
    )
    logits = 3 * random_numbers(device, count, vocab).float()
    out = DeviceSampling(count, vocab, device)(logits, settings)
    expected = reference_sampling.sample(logits, settings)
    wrong = float((out != expected.to(device)).double().mean())
    return wrong, 1 / 16 if temperature else 0.0
