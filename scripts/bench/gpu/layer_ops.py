"""Time norms, activations, cache writes and sampling, all bound by memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from appliance.kernels.activation import Activation
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gated_activation import reference as reference_activation
from appliance.kernels.norm_rope import reference as reference_norm
from appliance.kernels.norm_rope.weights import NormWeights
from appliance.kernels.sampling import reference as reference_sampling
from appliance.kernels.sampling.rows import SamplingRows
from bench.gpu.backend import our_backend
from bench.gpu.plan import Amount
from bench.gpu.rows import Contender, Rows, Work, relative_error

if TYPE_CHECKING:
    from torch import Tensor

    from bench.gpu.plan import Wanted
    from bench.gpu.timing import Bench, Call

EPS = 1e-5
ROWS = {Amount.TINY: (3,), Amount.FIRST: (1, 16, 64, 2048), Amount.FULL: (1, 16, 64, 256, 2048)}
SAMPLED, MOST_SAMPLED = ("sample greedily", "sample top-p"), 64
HIDDEN, MIDDLE, VOCAB = 4096, 14336, 128256
TINY_HIDDEN, TINY_MIDDLE, TINY_VOCAB = 320, 192, 1000
BLOCK = 32
ROUNDING = 4e-3  # of bf16 results, in the norm of all


def measure(rows: Rows, wanted: Wanted) -> None:
    """Measure all operations at several numbers of rows."""
    bench, tiny, peers = rows.bench, wanted.amount is Amount.TINY, wanted.peers
    hidden, middle, vocab = (
        (TINY_HIDDEN, TINY_MIDDLE, TINY_VOCAB) if tiny else (HIDDEN, MIDDLE, VOCAB)
    )
    operations = {
        "add_norm": partial(_norm, hidden=hidden, peers=peers),
        "gated_activation": partial(_activation, middle=middle, peers=peers),
        "rotate_and_write bf16": partial(_write, format=KVFormat.BF16),
        "rotate_and_write int8": partial(_write, format=KVFormat.INT8),
        "rotate_and_write int4": partial(_write, format=KVFormat.INT4),
        "sample greedily": partial(_sample, vocab=vocab, temperature=0.0),
        "sample top-p": partial(_sample, vocab=vocab, temperature=0.8),
    }
    if tiny:  # the interpreter takes seconds for it
        del operations["sample top-p"]
    for m in ROWS[wanted.amount]:
        for name, operation in operations.items():
            if (not wanted.only or name in wanted.only) and not (
                name in SAMPLED and m > MOST_SAMPLED
            ):
                rows.prepare(name, "layer", {"m": m}, partial(operation, bench, rows, name, m))


def _random(bench: Bench, *shape: int) -> Tensor:
    return torch.randn(shape, device=bench.device).to(bench.dtype)


def _norm(bench: Bench, rows: Rows, name: str, m: int, *, hidden: int, peers: bool) -> None:
    backend, nbytes = our_backend(bench), 8 * m * hidden
    weight = torch.rand(hidden, device=bench.device) + 0.5
    inputs = [
        (_random(bench, m, hidden), _random(bench, m, hidden)) for _ in range(bench.copies(nbytes))
    ]

    def error(call: Call) -> tuple[float, float]:
        expected = reference_norm.rms_norm(inputs[0][0] + inputs[0][1], weight, EPS).double()
        out = call()
        assert isinstance(out, tuple)
        return relative_error(out[0], expected), ROUNDING

    def calls() -> list[Call]:
        return [partial(backend.add_norm, *pair, NormWeights(weight, EPS)) for pair in inputs]

    work = Work(name, "hidden", {"m": m, "width": hidden}, nbytes)
    rows.measure(work, Contender("ours", calls, error))

    def plain(x: Tensor, residual: Tensor) -> Tensor:
        return functional.rms_norm(x + residual, (hidden,), weight.to(bench.dtype), EPS)

    if peers:
        theirs = Contender("torch", lambda: [partial(plain, *pair) for pair in inputs])
        rows.measure(work, theirs)


def _activation(bench: Bench, rows: Rows, name: str, m: int, *, middle: int, peers: bool) -> None:
    backend, nbytes = our_backend(bench), 6 * m * middle
    inputs = [_random(bench, m, 2 * middle) for _ in range(bench.copies(nbytes))]
    kind = Activation.SILU

    def error(call: Call) -> tuple[float, float]:
        expected = reference_activation.gated_activation(inputs[0].double(), kind)
        out = call()
        assert isinstance(out, torch.Tensor)
        return relative_error(out, expected.double()), ROUNDING

    def calls() -> list[Call]:
        return [partial(backend.gated_activation, x, kind) for x in inputs]

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    work = Work(name, "middle", {"m": m, "width": middle}, nbytes)
    rows.measure(work, Contender("ours", calls, error))
    if peers:
        rows.measure(work, Contender("torch", lambda: [partial(plain, x) for x in inputs]))


def _write(bench: Bench, rows: Rows, name: str, m: int, *, format: KVFormat) -> None:
    backend, heads, kv_heads, dim = our_backend(bench), 32, 8, 128
    cache = backend.allocate_cache(
        format,
        num_blocks=-(-m // BLOCK) * 8 + 1,
        block_size=BLOCK,
        num_kv_heads=kv_heads,
        head_dim=dim,
        device=bench.device,
    )
    angles = torch.rand((m, dim // 2), device=bench.device) * 6
    slots = torch.randperm(cache.num_blocks * BLOCK, device=bench.device)[:m]
    stored = KVPages.bytes_per_token(format, kv_heads, dim)
    nbytes = m * (2 * dim * (2 * heads + 2 * kv_heads) + stored)
    inputs = [_random(bench, m, heads + 2 * kv_heads, dim) for _ in range(bench.copies(nbytes))]
    rotation = (angles.cos(), angles.sin())

    def error(call: Call) -> tuple[float, float]:
        query = call()
        assert isinstance(query, torch.Tensor)
        if format.is_rotated:  # queries are in another basis, which preserves lengths
            expected = inputs[0][:, :heads].double().norm(dim=-1)
            return relative_error(query.double().norm(dim=-1), expected), 4 * ROUNDING
        expected = reference_norm.rotary(inputs[0][:, :heads].double(), *rotation).double()
        return relative_error(query, expected), ROUNDING

    def calls() -> list[Call]:
        return [partial(backend.rotate_and_write, x, *rotation, cache, slots) for x in inputs]

    rows.measure(Work(name, "llama_8b", {"m": m}, nbytes), Contender("ours", calls, error))


def _sample(bench: Bench, rows: Rows, name: str, m: int, *, vocab: int, temperature: float) -> None:
    from appliance.kernels.sampling.launch import DeviceSampling

    nbytes = 4 * m * vocab
    settings = SamplingRows.of(
        [temperature] * m, [0] * m, [0.9] * m, [0.0] * m, [0.37] * m, device=bench.device
    )
    sampling = DeviceSampling(m, vocab, bench.device)
    inputs = [3 * torch.randn((m, vocab), device=bench.device) for _ in range(bench.copies(nbytes))]

    def error(call: Call) -> tuple[float, float]:
        """Return the share of rows whose token differs; rounding of sums allows one."""
        expected = reference_sampling.sample(inputs[0], settings)
        out = call()
        assert isinstance(out, torch.Tensor)
        wrong = float((out != expected.to(out.device)).double().mean())
        return wrong, 0.0 if temperature == 0 else 1 / 16

    def calls() -> list[Call]:
        return [partial(sampling, logits, settings) for logits in inputs]

    rows.measure(
        Work(name, "vocabulary", {"m": m, "width": vocab}, nbytes), Contender("ours", calls, error)
    )
