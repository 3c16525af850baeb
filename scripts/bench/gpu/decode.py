"""Time decode attention over each KV format, and verification of four rows a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.cache.kv_format import KVFormat
from bench.gpu.attention import FORMATS, LLAMA, TINY, Problem, contest
from bench.gpu.attention_peers import FLASHINFER, FLEX, SDPA, installed
from bench.gpu.plan import Amount

if TYPE_CHECKING:
    from bench.gpu.plan import Wanted
    from bench.gpu.rows import Rows

# batch, context
STEPS = {
    Amount.TINY: ((2, 40),),
    Amount.FIRST: ((16, 8192), (64, 8192), (1, 8192), (64, 1024), (1, 32768)),
    Amount.FULL: (
        (16, 8192), (64, 8192), (1, 8192), (64, 1024), (1, 32768),
        (1, 1024), (16, 1024), (4, 32768),
    ),
}  # fmt: skip
VERIFIED = 4  # rows of a sequence, as a draft of three tokens has them
FLEX_STEPS = {Amount.TINY: 1, Amount.FIRST: 2, Amount.FULL: 8}  # each is compiled for half a minute
VERIFY_FORMATS = (KVFormat.BF16, KVFormat.INT8)


def measure(rows: Rows, wanted: Wanted) -> None:
    """Measure every step in every format, then several rows a sequence, then slow compilers."""
    heads = TINY if wanted.amount is Amount.TINY else LLAMA
    steps = STEPS[wanted.amount]

    def problem(format: KVFormat, batch: int, context: int, count: int = 1) -> Problem:
        device, dtype = rows.bench.device, rows.bench.dtype
        return Problem(heads, format, batch, count, context, device, dtype)

    for step in steps:
        for format in FORMATS:
            contest(rows, wanted, "decode", problem(format, *step), [*SDPA, *installed(FLASHINFER)])
    for step in steps[:2]:
        for format in VERIFY_FORMATS:
            contest(rows, wanted, "verify", problem(format, *step, VERIFIED), [])
    for step in steps[: FLEX_STEPS[wanted.amount]]:
        contest(rows, wanted, "decode", problem(KVFormat.BF16, *step), [FLEX], with_ours=False)
