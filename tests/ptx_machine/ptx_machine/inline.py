"""Runs short PTX texts on arrays."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ptx_machine.machine import Machine
from ptx_machine.memory import GlobalMemory
from ptx_machine.numbers import UNSIGNED, Bits
from ptx_machine.steps import compiled
from ptx_machine.syntax import parse

Array = NDArray[Any]
WARP = 32


def launch(
    body: str, *arrays: Array, threads: int = WARP, programs: int = 1, shared: int = 0
) -> Counter[str]:
    """Run statements as a kernel; return counts of instructions and accesses.

    Args:
        body: the statements; may use `p0`, `p1`, ..., which point to the arrays, `tid` (thread of
            its program), `pid` (program), `at` (thread of all), and as its own `r0` to `r31` (32
            bits), `d0` to `d15` (64 bits), `h0` to `h15` (16 bits) and `c0` to `c7` (predicates).
        arrays: read and written in place.
        threads: per program.
        programs: of the grid.
        shared: bytes of shared memory per program, at address 0.

    Raises:
        MemoryAccessError: an access that a GPU would refuse, or answer with undefined data.
        NotImplementedError: an instruction is unknown.
    """
    params = [f"param{i}" for i in range(len(arrays))]
    pointers = "".join(f", p{i}" for i in range(len(arrays)))
    text = f"""
    .visible .entry kernel({", ".join(f".param .u64 {name}" for name in params)})
    .reqntid {threads}
    {{
    .reg .pred c<8>; .reg .b16 h<16>; .reg .b32 r<32>, tid, pid, at; .reg .b64 d<16>{pointers};
    mov.u32 tid, %tid.x;
    mov.u32 pid, %ctaid.x;
    mad.lo.s32 at, pid, {threads}, tid;
    {"".join(f"ld.param.b64 p{i}, [{name}];" for i, name in enumerate(params))}
    {body}
    ret;
    }}"""
    program = parse(text)
    traffic: Counter[str] = Counter()
    tensors = [torch.from_numpy(array) for array in arrays]
    memory = GlobalMemory(tensors, traffic)
    arguments = dict(zip(params, [tensor.data_ptr() for tensor in tensors], strict=True))
    blocks = [(i, 0, 0) for i in range(programs)]
    grid = (programs, 1, 1)
    machine = Machine(program, arguments, memory, blocks, grid, shared, traffic)
    machine.run(compiled(program))
    return traffic


def evaluate(text: str, results: Sequence[int], *operands: Array) -> list[Bits]:
    """Return what a text leaves in `$0`, `$1`, ..., of so many bits each; the operands follow.

    Each thread has one element of the operands. A result or an operand of one bit is a predicate.
    """
    count, size = -(-len(operands[0]) // WARP), len(operands[0])
    words = [np.resize(bits_of(one), count * WARP) for one in operands]
    made = [np.zeros(count * WARP, UNSIGNED[max(8, width)]) for width in results]
    widths = [*results, *(8 * word.itemsize for word in words)]
    is_predicate = [*(width == 1 for width in results), *(one.dtype == bool for one in operands)]
    before, after = [], []
    for i, width in enumerate(widths):
        kind = "pred" if is_predicate[i] else f"b{width}"
        width = max(8, width)
        before.append(f".reg .{kind} v{i}; .reg .b64 a{i};")
        before.append(f"mad.wide.u32 a{i}, at, {width // 8}, p{i};")
        if i < len(results):
            held = "h0" if is_predicate[i] else f"v{i}"
            after += [f"selp.b16 h0, 1, 0, v{i};"] if is_predicate[i] else []
            after.append(f"st.global.b{width} [a{i}], {held};")
        elif is_predicate[i]:
            before += [f"ld.global.b8 h0, [a{i}];", f"setp.ne.b16 v{i}, h0, 0;"]
        else:
            before.append(f"ld.global.b{width} v{i}, [a{i}];")
    body = re.sub(r"\$(\d+)", r"v\1", text)
    launch("\n".join([*before, body, *after]), *made, *words, programs=count)
    found = zip(made, results, strict=True)
    return [one[:size].astype(bool) if width == 1 else one[:size] for one, width in found]


def bits_of(numbers: Array) -> Bits:
    """Numbers of any type as unsigned integers of their size."""
    return np.ascontiguousarray(numbers).view(UNSIGNED[8 * numbers.itemsize])
