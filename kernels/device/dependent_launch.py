"""Programmatic dependent launch: a kernel starts before the one before it has ended.

Until `wait_for_previous` a kernel may compute and prefetch, but neither load nor store: what the
kernel before writes is not there yet, and what it reads must stay. A prefetch only moves a line to
L2, where all programs see what is written to it later. See griddepcontrol in the PTX manual.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_previous():
    """Wait until the kernel before has ended, then let the next one start.

    All programs wait, so a kernel that has ended implies that all before it have.
    """
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()


@triton.jit
def prefetch_lines(p_line):
    """Prefetch lines of memory to L2, by a pointer into each."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [p_line.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
