"""Time attention of whole prompts and of chunks at the end of long ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.gpu.attention import FORMATS, LLAMA, TINY, Problem, contest
from bench.gpu.attention_peers import FLASHINFER, SDPA, installed
from bench.gpu.plan import Amount

if TYPE_CHECKING:
    from bench.gpu.plan import Wanted
    from bench.gpu.rows import Rows

# rows, context
CHUNKS = {
    Amount.TINY: ((20, 40),),
    Amount.FIRST: ((2048, 2048), (8192, 8192), (512, 8192)),
    Amount.FULL: ((2048, 2048), (8192, 8192), (512, 8192), (128, 32768)),
}


def measure(rows: Rows, wanted: Wanted) -> None:
    """Measure every chunk in every format."""
    heads = TINY if wanted.amount is Amount.TINY else LLAMA
    bench = rows.bench
    for count, context in CHUNKS[wanted.amount]:
        for format in FORMATS:
            problem = Problem(heads, format, 1, count, context, bench.device, bench.dtype)
            contest(rows, wanted, "prefill", problem, [*SDPA, *installed(FLASHINFER)])
